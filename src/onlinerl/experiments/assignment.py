"""Which arm a user or a request is in, and with which probability. Pure: the same unit, the same answer.

An arm is a way of being served. `live` serves as the client asked. `explore` samples at temperature 1 and
top-p 1 from the same version (ALGORITHMS 8): a client that asks for the most likely answer alone would
otherwise never show what else its user might have accepted, and nothing could be learned from it.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

LIVE = "live"
EXPLORE = "explore"


@dataclass(frozen=True, slots=True)
class Assignment:
    """Made by `assign`, eaten by the gateway, which records both of it with the interaction."""

    arm: str
    propensity: float
    """The probability, over salts, with which the unit is in this arm; more than 0."""


def assign(unit: str, *, share: float, salt: str) -> Assignment:
    """Draw `explore` with probability `share`, else `live`, for one unit (a user's key, a request's id).

    The draw is the SHA-256 of salt and unit, so it needs no memory: a unit stays where it is, in every
    process, as long as the salt stays. Growing the share moves units into `explore` and none out of it.
    """
    digest = hashlib.sha256(f"{salt}\0{unit}".encode("utf-8", "surrogatepass")).digest()
    if int.from_bytes(digest[:8], "big") / 2.0**64 < share:
        return Assignment(EXPLORE, share)
    return Assignment(LIVE, 1.0 - share)
