"""Means whose values go together in clusters, with 95 % intervals."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass

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
