"""Which arm a request is served in, and with which probability. Pure: the same unit gets the same answer.

An arm is a way of being served. `live` samples as the client asked. `explore` samples at temperature 1 and
top-p 1 from the same version (ALGORITHMS 8): a client that always asks for the most likely answer would never
show what else its user might have accepted, and its answers are too cold to learn from.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from onlinerl import config

LIVE = "live"
EXPLORE = "explore"


@dataclass(frozen=True, slots=True)
class Assignment:
    """Made by `assign`, eaten by the gateway, which records both with the interaction."""

    arm: str
    propensity: float
    """Probability over salts with which the unit is in this arm; 1 where nothing was drawn, never 0."""


def assign(unit: str, *, share: float, salt: str) -> Assignment:
    """Draw `explore` with probability `share`, else `live`, for one unit.

    The lot is the SHA-256 of salt and unit, so it needs no memory: in every process a unit stays where it is
    for as long as the salt stays. A larger share moves units into `explore` and none out of it.
    """
    digest = hashlib.sha256(f"{salt}\0{unit}".encode("utf-8", "surrogatepass")).digest()
    if int.from_bytes(digest[:8], "big") < share * 2.0**64:
        return Assignment(EXPLORE, share)
    return Assignment(LIVE, 1.0 - share)


def exploration(settings: config.Exploration, *, policy: str, user: str, request: str) -> Assignment:
    """The arm of a request (its id) by a user (the sticky key, "" for none).

    Who did not opt in is in `live` with probability 1. Requests without a user key are no single user: they
    are drawn one by one. Policies draw independently.
    """
    opted_in = settings.users == "all" or (settings.users != "none" and user in settings.users)
    if not opted_in:
        return Assignment(LIVE, 1.0)
    unit = user if settings.unit == "user" and user else request
    return assign(unit, share=settings.share, salt=f"exploration of {policy}")
