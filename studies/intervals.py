"""95 % intervals: Student's t over seeds or users, the normal one over prompts, and when a curve reaches a
level. Pure functions."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from onlinerl.validate.estimates import t_quantile

Over = Literal["seeds", "users", "prompts", "one value"]


@dataclass(frozen=True, slots=True)
class Interval:
    """A mean and its 95 % interval. Made by the functions here, eaten by reports."""

    mean: float
    low: float
    high: float
    n: int
    """Independent units."""
    over: Over
    """What varies: seeds or users (t), one run's prompts (clustered by file), or nothing: then there is no
    interval, and `low` and `high` are the value itself."""

    @staticmethod
    def example() -> Interval:
        """A small one, for tests and documentation."""
        return Interval(0.5, 0.4, 0.6, 3, "seeds")

    def apart(self, other: Interval) -> bool:
        """Whether the two intervals have nothing in common."""
        return self.low > other.high or self.high < other.low


def mean(values: Sequence[float], over: Literal["seeds", "users"] = "seeds") -> Interval:
    """Mean of independent values with Student's t. One value has no interval. Raises ValueError for none."""
    if not values:
        raise ValueError("there is nothing to average")
    middle = statistics.fmean(values)
    if len(values) == 1:
        return Interval(middle, middle, middle, 1, "one value")
    half = t_quantile(len(values) - 1) * statistics.stdev(values) / math.sqrt(len(values))
    return Interval(middle, middle - half, middle + half, len(values), over)


def difference(one: Sequence[float], other: Sequence[float]) -> Interval:
    """Mean of `one` minus mean of `other`, independent samples of any spread (Welch 1947)."""
    middle = statistics.fmean(one) - statistics.fmean(other)
    if len(one) < 2 or len(other) < 2:
        return Interval(middle, middle, middle, 1, "one value")
    parts = [statistics.variance(values) / len(values) for values in (one, other)]
    error = sum(parts)
    if error == 0:
        return Interval(middle, middle, middle, len(one) + len(other), "seeds")
    below = sum(p * p / (len(v) - 1) for p, v in zip(parts, (one, other), strict=True))
    half = t_quantile(max(1.0, error * error / below)) * math.sqrt(error)
    return Interval(middle, middle - half, middle + half, len(one) + len(other), "seeds")


def of_prompts(value: float, error: float) -> Interval:
    """One run's number with the standard error that it has over its prompts, clustered by file."""
    half = t_quantile(math.inf) * error
    return Interval(value, value - half, value + half, 1, "prompts")


def value_at(curve: Sequence[tuple[float, float]], at: float) -> float:
    """Value of a curve of (interactions, value), in order, by straight lines; before its start and after its
    end that of the nearest point: a run that a guard stopped keeps what it had.

    >>> value_at([(0, 0.0), (100, 1.0)], 50), value_at([(0, 0.0), (100, 1.0)], 300)
    (0.5, 1.0)
    """
    before = curve[0]
    for point in curve:
        if point[0] >= at:
            if point[0] == before[0]:
                return point[1]
            share = max(0.0, (at - before[0]) / (point[0] - before[0]))
            return before[1] + share * (point[1] - before[1])
        before = point
    return before[1]


def reaches(curve: Sequence[tuple[float, float]], level: float) -> float | None:
    """Interactions at which a curve of (interactions, value), in order, first is at `level`, by straight
    lines between its points; None: never.

    >>> reaches([(0, 0.0), (100, 1.0), (200, 3.0)], 2.0)
    150.0
    """
    before: tuple[float, float] | None = None
    for at, value in curve:
        if value >= level:
            if before is None or before[1] >= value:
                return at
            share = (level - before[1]) / (value - before[1])
            return before[0] + share * (at - before[0])
        before = (at, value)
    return None
