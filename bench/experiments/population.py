"""Simulated users and what versions do to them.

Opportunities of a day are lognormal (median 23, mean 42, 99th percentile 300). Everybody has an accept rate
of their own (Beta around 25 % of opportunities, standard deviation 10 points), a show rate, a share of slow
answers and of errors, and a mood of the day, so that yesterday tells only a part of today.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from onlinerl.experiments.analysis import Floats

TAU = 0.1
BASE = 0.25
"""Accepts per opportunity."""
SHOWN = 0.8
COLUMNS = (
    "reward", "opportunities", "before_reward", "before_opportunities", "shown", "accepted", "errors", "slow",
    "reverted", "retained", "characters",
)  # fmt: skip
Table = dict[str, Floats]
Mask = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Version:
    """What a version does to people."""

    lift: float = 0.0
    """Of the accept rate, relative."""
    slow: float = 0.05
    """Share of requests beyond the control's 95th percentile."""
    errors: float = 0.005
    """Beyond 0.005, which falls on few users, they fall on all alike."""
    shown: float = SHOWN
    reverted: float = 0.2
    length: float = 60.0
    """Characters of an answer."""


@dataclass(frozen=True, slots=True)
class People:
    """What stays with users from day to day; arrays of one length."""

    activity: Floats
    """Mean opportunities of a day."""
    taste: Floats
    """Accept rate of what is shown."""
    shown: Floats
    """These as ratios to the version's: how much more or less than others they see of it."""
    slow: Floats
    errors: Floats
    length: Floats

    @staticmethod
    def draw(rng: Generator, size: int, *, median: float = 25.0, spread: float = 1.0) -> People:
        """Activity is lognormal with `spread` of its logarithm, rates are Beta and Gamma."""
        mean = BASE / SHOWN
        return People(
            activity=rng.lognormal(math.log(median), spread, size),
            taste=rng.beta(12 * mean, 12 * (1 - mean), size),
            shown=rng.beta(20 * SHOWN, 20 * (1 - SHOWN), size) / SHOWN,
            slow=rng.gamma(1.0, 1.0, size),
            errors=rng.gamma(0.3, 1.0 / 0.3, size),
            length=rng.lognormal(-0.08, 0.4, size),
        )


def days(rng: Generator, people: People, version: Version, *, history: float = 1.0) -> Table:
    """A day of each, and the day before for a share `history` of them: a column for each of COLUMNS."""
    size = len(people.activity)

    def day(version: Version) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        asked = 1 + rng.poisson(people.activity * rng.lognormal(-0.125, 0.5, size))
        shown = rng.binomial(asked, np.minimum(people.shown * version.shown, 1.0))
        rate = np.clip(people.taste * (1 + version.lift), 0.001, 0.999)
        return asked, shown, rng.binomial(shown, rng.beta(30 * rate, 30 * (1 - rate)))

    asked, shown, accepted = day(version)
    asked_before, shown_before, accepted_before = day(Version())
    known = rng.random(size) < history
    reporting = rng.random(size) < 0.5
    retained = np.where(reporting, accepted, 0)
    columns = {
        "reward": accepted - TAU * shown,
        "opportunities": asked,
        "before_reward": np.where(known, accepted_before - TAU * shown_before, 0.0),
        "before_opportunities": np.where(known, asked_before, 0),
        "shown": shown,
        "accepted": accepted,
        "errors": rng.binomial(asked, np.minimum(people.errors * 0.005 + version.errors - 0.005, 1.0)),
        "slow": rng.binomial(asked, np.minimum(people.slow * version.slow, 1.0)),
        "reverted": rng.binomial(retained, version.reverted),
        "retained": retained,
        "characters": shown * people.length * version.length,
    }
    return {name: column.astype(np.float64) for name, column in columns.items()}


def taken(table: Mapping[str, Floats], rows: NDArray[np.int64], names: Sequence[str]) -> list[Floats]:
    """Some columns of some of the population."""
    return [np.take(table[name], rows) for name in names]


def truth(table: Mapping[str, Floats], above: str = "reward", below: str = "opportunities") -> float:
    """The ratio of the whole population."""
    return float(table[above].sum() / table[below].sum())
