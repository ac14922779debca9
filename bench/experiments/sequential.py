"""Many sequential experiments at once: totals after every unit, first crossings, and mSPRT beside it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np
from bench.experiments.population import Mask
from scipy.stats import beta, norm

from onlinerl.experiments.analysis import Contrast, Floats, Totals


def running(treated: Mask, columns: Sequence[Floats]) -> tuple[Totals, Totals]:
    """Both arms' totals after every unit: arrays of (experiments, units) go in, and come out in Totals."""
    count, shape = len(columns), treated.shape
    first = np.empty((2, count, *shape))
    second = np.empty((2, count, count, *shape))

    def both(part: Floats) -> tuple[Floats, Floats]:
        inside = np.cumsum(part * treated, axis=1)
        return np.cumsum(part, axis=1) - inside, inside

    for i, one in enumerate(columns):
        first[0, i], first[1, i] = both(one)
        for j in range(i, count):
            pair = both(one * columns[j])
            for arm in (0, 1):
                second[arm, i, j] = second[arm, j, i] = pair[arm]
    units = both((columns[1] > 0).astype(np.float64))
    history = both((columns[3] > 0).astype(np.float64)) if count == 4 else (np.zeros(shape), np.zeros(shape))
    arms = [Totals(units[arm], history[arm], first[arm], second[arm]) for arm in (0, 1)]
    return arms[0], arms[1]


def without_history(arm: Totals) -> Totals:
    """The same units, their history forgotten."""
    return Totals(arm.units, arm.history, arm.first[:2], arm.second[:2, :2])


def share_of(hits: int, trials: int) -> dict[str, float]:
    """A proportion with its Clopper–Pearson interval at 95 %."""
    low = float(beta.ppf(0.025, hits, trials - hits + 1)) if hits else 0.0
    high = float(beta.ppf(0.975, hits + 1, trials - hits)) if hits < trials else 1.0
    return {"share": hits / trials, "low": low, "high": high, "hits": hits, "trials": trials}


def firsts(crossed: Mask) -> Floats:
    """The unit (from 1) after which each experiment first crosses; ∞ where it never does."""
    return np.where(crossed.any(axis=1), crossed.argmax(axis=1) + 1.0, np.inf)


def statistic(found: Contrast) -> Floats:
    """The estimate in standard errors; 0 where nothing is known."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(found.known, found.estimate / np.sqrt(found.variance), 0.0)


def chunks(total: int, size: int = 20) -> Iterator[int]:
    """Sizes of the chunks that `total` experiments are done in: what fits the processor's cache."""
    for start in range(0, total, size):
        yield min(size, total - start)


def rank(times: Floats, share: float) -> float | None:
    """After how many units so large a share has crossed; None: not that many did."""
    value = float(np.sort(times)[math.ceil(share * len(times)) - 1])
    return value if math.isfinite(value) else None


def curve(times: Floats, units: int, points: int = 100) -> list[list[float]]:
    """Share of experiments that have crossed, by units."""
    grid = np.unique(np.linspace(1, units, points).astype(int))
    return [[int(n), float(np.mean(times <= n))] for n in grid]


def msprt(difference: Floats, variance: Floats, units: Floats, *, mixture: Floats, alpha: float) -> Mask:
    """Whether the mixture sequential probability ratio test rejects: Λ ≥ 1/α [Johari et al. 2017, eq. 12].

    `units` in each arm, `variance` that of one unit (of both arms alike, known or plugged in), `mixture` τ²,
    the variance of the effects that it looks for:

        Λ = √(2σ²/(2σ² + nτ²)) · exp(n²τ²Δ² / (4σ²(2σ² + nτ²)))
    """
    whole = 2.0 * variance + units * mixture
    exponent = units**2 * mixture * difference**2 / (4.0 * variance * whole)
    return np.asarray(0.5 * np.log(2.0 * variance / whole) + exponent >= -math.log(alpha))


def published_mixture(alpha: float, horizon: float) -> float:
    """τ² in units of σ² for a test of at most `horizon` units in each arm, where effects are as wide as the
    noise: τ² = σ²·Φ(−b)/(φ(b)/b − Φ(−b)), b = 2 ln(1/α)/√n [Johari et al. 2017; `calcTau` of the R package
    mixtureSPRT].

    >>> round(published_mixture(0.05, 100), 2)
    0.97
    """
    b = 2.0 * math.log(1 / alpha) / math.sqrt(horizon)
    tail = float(norm.sf(b))
    return tail / (float(norm.pdf(b)) / b - tail)
