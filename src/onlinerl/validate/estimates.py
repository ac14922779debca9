"""Means whose values go together in clusters, with 95 % intervals."""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass

LEVEL = 0.95
Z = 1.96
"""Normal quantile of a 95 % interval."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean, and its standard error with what goes together in one cluster (mostly prompts of a file)."""

    mean: float
    error: float

    @property
    def low(self) -> float:
        """Lower end of the 95 % interval."""
        return self.mean - Z * self.error

    @property
    def high(self) -> float:
        """Upper end."""
        return self.mean + Z * self.error

    def as_json(self) -> dict[str, float]:
        """With the interval's ends."""
        return {**asdict(self), "low": self.low, "high": self.high}


def ratio(values: Sequence[float], weights: Sequence[float], clusters: Sequence[str]) -> Estimate:
    """Σ values / Σ weights, with the cluster-robust error of its linearisation.

    With R the ratio, G clusters and e_g = Σ over the cluster of (value − R·weight):
    variance = G/(G−1) · Σ e_g² / (Σ weights)² (Taylor linearisation; Cochran 1977, chapter 11). NaN where
    no weight is; the error is NaN below two clusters.
    """
    whole = math.fsum(weights)
    if not whole:
        return Estimate(math.nan, math.nan)
    mean = math.fsum(values) / whole
    sums: dict[str, float] = {}
    for value, weight, cluster in zip(values, weights, clusters, strict=True):
        sums[cluster] = sums.get(cluster, 0.0) + value - mean * weight
    count = len(sums)
    if count < 2:
        return Estimate(mean, math.nan)
    variance = count / (count - 1) * math.fsum(e * e for e in sums.values()) / whole**2
    return Estimate(mean, math.sqrt(variance))


@functools.lru_cache(maxsize=256)
def t_quantile(freedom: float) -> float:
    """Two-sided 95 % quantile q of Student's t, P(|T| ≤ q) = 0.95; `freedom` ≥ 1, fractions allowed (Welch).

    Bisection on the integral of the density, which over angles (t = √ν·tan φ) is cos(φ)^(ν−1). Beyond 500
    degrees the expansion around the normal quantile, z + (z³ + z)/4ν, is right to five digits.

    >>> round(t_quantile(2), 3), round(t_quantile(4), 3), round(t_quantile(1e6), 3)
    (4.303, 2.776, 1.96)
    """
    if freedom > 500:  # infinity included
        z = statistics.NormalDist().inv_cdf((1 + LEVEL) / 2)
        return z + (z**3 + z) / (4 * freedom)
    half = math.sqrt(math.pi) / 2 * math.exp(math.lgamma(freedom / 2) - math.lgamma((freedom + 1) / 2))

    def inside(angle: float) -> float:
        steps = 400  # Simpson's rule
        width = angle / steps
        weights = (1 if i in (0, steps) else 4 if i % 2 else 2 for i in range(steps + 1))
        return sum(w * math.pow(math.cos(i * width), freedom - 1) for i, w in enumerate(weights)) * width / 3

    low, high = 0.0, math.pi / 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if inside(middle) < LEVEL * half else (low, middle)
    return math.sqrt(freedom) * math.tan(low)
