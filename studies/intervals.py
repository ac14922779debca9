"""95 % intervals: Student's t over seeds or users, the bootstrap over prompts' files, and when a curve
reaches a level. Pure functions, standard library only."""

from __future__ import annotations

import functools
import math
import random
import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

LEVEL = 0.95
RESAMPLES = 2000

Over = Literal["seeds", "users", "files", "one value"]


@dataclass(frozen=True, slots=True)
class Interval:
    """A mean and its 95 % interval. Made by the functions here, eaten by reports."""

    mean: float
    low: float
    high: float
    n: int
    """Independent units."""
    over: Over
    """What varies: seeds or users (t), files of prompts (bootstrap); or nothing, then there is no interval
    and `low` and `high` are the value itself."""

    @staticmethod
    def example() -> Interval:
        """A small one, for tests and documentation."""
        return Interval(0.5, 0.4, 0.6, 3, "seeds")

    def apart(self, other: Interval) -> bool:
        """Whether the two intervals have nothing in common."""
        return self.low > other.high or self.high < other.low


@functools.lru_cache(maxsize=256)
def t_quantile(freedom: float) -> float:
    """Two-sided 95 % quantile q of Student's t, P(|T| ≤ q) = 0.95; `freedom` ≥ 1, fractions allowed (Welch).

    Bisection on the integral of the density, which over angles (t = √ν·tan φ) is cos(φ)^(ν−1). Beyond 500
    degrees the expansion around the normal quantile, z + (z³ + z)/4ν, is right to five digits.

    >>> round(t_quantile(2), 3), round(t_quantile(4), 3), round(t_quantile(1e6), 3)
    (4.303, 2.776, 1.96)
    """
    if freedom > 500:
        z = statistics.NormalDist().inv_cdf((1 + LEVEL) / 2)
        return z + (z**3 + z) / (4 * freedom)
    half = math.sqrt(math.pi) / 2 * math.exp(math.lgamma(freedom / 2) - math.lgamma((freedom + 1) / 2))

    def inside(angle: float) -> float:
        steps = 400  # Simpson's rule
        width = angle / steps
        weights = (1 if i in (0, steps) else 4 if i % 2 else 2 for i in range(steps + 1))
        return sum(w * math.cos(i * width) ** (freedom - 1) for i, w in enumerate(weights)) * width / 3

    low, high = 0.0, math.pi / 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if inside(middle) < LEVEL * half else (low, middle)
    return math.sqrt(freedom) * math.tan(low)


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


def bootstrap(
    values: Sequence[float], clusters: Sequence[str], *, resamples: int = RESAMPLES, seed: int = 0
) -> Interval:
    """Mean of `values`, with the percentile bootstrap over `clusters` (prompts of one file stand or fall
    together). Both [n]. Raises ValueError for none."""
    if not values:
        raise ValueError("there is nothing to average")
    sums: dict[str, tuple[float, int]] = defaultdict(lambda: (0.0, 0))
    for value, cluster in zip(values, clusters, strict=True):
        total, count = sums[cluster]
        sums[cluster] = (total + value, count + 1)
    groups = list(sums.values())
    middle = statistics.fmean(values)
    if len(groups) == 1:
        return Interval(middle, middle, middle, 1, "one value")
    rng = random.Random(seed)
    means = []
    for _ in range(resamples):
        drawn = rng.choices(groups, k=len(groups))
        means.append(sum(total for total, _ in drawn) / sum(count for _, count in drawn))
    means.sort()
    tail = (1 - LEVEL) / 2
    return Interval(
        middle, means[int(tail * resamples)], means[int((1 - tail) * resamples) - 1], len(groups), "files"
    )


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
