"""Which arm a request is served in, and with which probability. Pure: the same unit gets the same answer.

An arm is a way of being served. `live` samples as the client asked. `explore` samples at temperature 1 and
top-p 1 from the same version (ALGORITHMS 8): a client that always asks for the most likely answer would never
show what else its user might have accepted, and its answers are too cold to learn from.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from onlinerl import config
from onlinerl.records import Experiment

LIVE = "live"
EXPLORE = "explore"
CONTROL = "control"
TREATMENT = "treatment"
HOLDOUT = "holdout"
"""Stays on the policy's first version for good."""
DAY = 86_400.0
"""Seconds of a session's day, UTC."""
SEPARATOR = "\0"
"""Between the parts of a session's name; the first is the user."""


@dataclass(frozen=True, slots=True)
class Assignment:
    """Made by `assign`, eaten by the gateway, which records both with the interaction."""

    arm: str
    propensity: float
    """Probability over salts with which the unit is in this arm; 1 where nothing was drawn, never 0."""
    experiment: int | None = None
    """The experiment that the arm is of; None: of none."""
    unit: str = ""
    """What was drawn in that experiment."""


def lot(unit: str, salt: str) -> float:
    """A number in [0, 1) for a unit, the same in every process for as long as the salt stays: SHA-256."""
    digest = hashlib.sha256(f"{salt}\0{unit}".encode("utf-8", "surrogatepass")).digest()
    return int.from_bytes(digest[:8], "big") / 2.0**64


def assign(unit: str, *, share: float, salt: str) -> Assignment:
    """Draw `explore` with probability `share`, else `live`, for one unit.

    The lot is the SHA-256 of salt and unit, so it needs no memory: in every process a unit stays where it is
    for as long as the salt stays. A larger share moves units into `explore` and none out of it.
    """
    if lot(unit, salt) < share:
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


def holdout(settings: config.Experiments, *, policy: str, user: str) -> bool:
    """Whether a user stays on the first version for good. Users without a key never do."""
    return bool(user) and lot(user, f"hold-out of {policy}") < settings.holdout


def session(user: str, path: str, at: float) -> str:
    """The unit of a `session` experiment: a user's work on one file in one day (UTC).

    >>> session("u1", "a.py", 90_000.0)
    'u1\\x00a.py\\x001'
    """
    return SEPARATOR.join((user, path, str(int(at // DAY))))


def experimental(
    experiment: Experiment, settings: config.Experiments, *, user: str, project: str, path: str, at: float
) -> Assignment | None:
    """The arm of a request in a running experiment; None: it takes no part.

    Requests without a user key take none, nor those of the hold-out, of who is not on the list, or beyond the
    share. As stages rise units move from control to treatment and none back; who takes part stays the same.
    """
    plan = experiment.plan
    listed = plan["users"] == "all" or user in plan["users"]
    if not user or not listed or (plan["projects"] and project not in plan["projects"]):
        return None
    if holdout(settings, policy=experiment.policy, user=user):
        return None
    unit = session(user, path, at) if plan["unit"] == "session" else user
    if lot(unit, f"{experiment.salt} takes part") >= plan["share"]:
        return None
    share = experiment.share
    if lot(unit, experiment.salt) < share:
        return Assignment(TREATMENT, share, experiment.id, unit)
    return Assignment(CONTROL, 1.0 - share, experiment.id, unit)
