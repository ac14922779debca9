"""What an experiment's numbers say, at every look: the difference of two arms with an interval that stays
valid however often one looks. Pure functions; arrays of looks or of simulated experiments take the same way.

    Observations → Totals → Contrast → Reading

**Reward per opportunity** of an arm is R = ΣY / ΣN over its units, Y a unit's reward, N its opportunities.
A user who asks often counts for more, and the units, not the requests, are what chance distributed: so the
variance is that of the units' deviations e = (Y − R·N) / mean(N), the delta method [Deng et al. 2018,
1803.06336]. For the difference of two arms

    V = Var(e of the treatment)/n_t + Var(e of the control)/n_c

**CUPED** [Deng et al. 2013]: where units have a history, b = Y' − R'·N' from before the experiment (R' over
both arms) tells part of e in advance. With θ = Σ e·b / Σ b·b within arms the difference is less
θ·(mean(b of the treatment) − mean(b of the control)), whose expectation is 0, and e − θ·b takes the place of
e. A unit without history has b = 0 and takes part unadjusted.

**The interval** is the asymptotic confidence sequence [Waudby-Smith et al., 2103.06476; Netflix, 2205.14762]

    Δ ± √V · √[ 2(nη²+1)/(nη²) · ln(√(nη²+1)/α) ],   η² = (−2 ln α + ln(1 − 2 ln α)) / n*

With n units in each arm √V is σ̂/√n, σ̂² the sum of both arms' variances. For unequal arms n is their harmonic
mean 2·n_t·n_c/(n_t+n_c): at a fixed share it is proportional to all units seen, so that nothing but n* is
scaled. Over all looks together the interval misses the truth with probability α, in the limit of many units.
With few it may miss more often: the variance is estimated, and units are skewed. So there is no interval
below LEAST units an arm [delayed starts: Bibaut et al., 2212.14411]; docs/experiments.md tells what that is
worth, and that an n* of hundreds does the rest.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import betaln, ndtr

Floats = NDArray[np.float64]

LEAST = 20
"""Units of each arm below which there is no interval; units with a history below which there is no CUPED."""
CONCENTRATION = 100.0
"""Weight of the prior of `imbalance`, in units. Looking for shifts of a few points among a thousand units it
is the quickest of 20 to 10,000, and it is what published implementations take."""

_ROUNDS = 8
"""Of the iteration for a one-sided bound; seven digits at α = 0.1."""


def _none() -> Floats:
    return np.zeros(0)


@dataclass(frozen=True, slots=True)
class Observations:
    """The units of one arm: arrays of one length, one entry a unit. Made by the store, eaten by `read`,
    `guardrails.watch` and `secondary`.

    Sums run over a unit's exposure: its requests since the stage began, up to the end of its window.

    >>> Observations.of(opportunities=[10, 4], reward=[2.0, -0.5]).units
    2
    """

    opportunities: Floats
    """Assigned requests, silent and cancelled ones and errors included."""
    reward: Floats
    """At the experiment's τ."""
    shown: Floats
    accepted: Floats
    errors: Floats
    slow: Floats
    """Requests that took longer than the control's 95th percentile."""
    reverted: Floats
    """Of `retained`: gone a minute later."""
    retained: Floats
    """Accepted answers about which the client told what is left of them."""
    characters: Floats
    """Of the answers shown."""
    before_opportunities: Floats
    """Of the same unit (of its user, where units are sessions) in the equally long time before the experiment
    began: before its first stage, since later ones find users whom the treatment has already served. 0 where
    there is no history."""
    before_reward: Floats
    ended: NDArray[np.bool_]
    """Its window is over: it counts for a promotion. Guardrails look at all."""
    kept: Floats = field(default_factory=_none)
    """Characters still there a minute later; empty where nobody counts them."""
    cost: Floats = field(default_factory=_none)
    """Of serving it, in the settings' currency; empty where there are no prices."""

    def __post_init__(self) -> None:
        sizes = {name: len(getattr(self, name)) for name in _COLUMNS}
        wrong = {name: size for name, size in sizes.items() if size != self.units}
        if {name for name in wrong if name not in _OPTIONAL or wrong[name]}:
            raise ValueError(f"columns of observations must be of one length, not {sizes}")

    @property
    def units(self) -> int:
        """How many there are."""
        return len(self.opportunities)

    def over(self) -> Observations:
        """Those whose window is over."""
        parts = {name: getattr(self, name) for name in _COLUMNS}
        return replace(self, **{name: part[self.ended] for name, part in parts.items() if len(part)})

    @staticmethod
    def of(**columns: ArrayLike) -> Observations:
        """From the columns that there are; the rest is 0, and every window over."""
        size = max((np.size(column) for column in columns.values()), default=0)
        known: dict[str, Any] = {
            name: np.asarray(column, dtype=np.bool_ if name == "ended" else np.float64)
            for name, column in columns.items()
        }
        missing = [name for name in _COLUMNS if name not in known and name not in _OPTIONAL]
        blank: dict[str, Any] = {name: np.zeros(size) for name in missing}
        if "ended" in blank:
            blank["ended"] = np.ones(size, dtype=np.bool_)
        return Observations(**known, **blank)


_COLUMNS = tuple(column.name for column in fields(Observations))
_OPTIONAL = ("kept", "cost")


@dataclass(frozen=True, slots=True)
class Totals:
    """Sums over the units of one arm; all that a contrast needs. Arrays of any shape (looks, experiments)."""

    units: Floats
    """Units with a positive denominator, shape S."""
    history: Floats
    """Units with a history, shape S."""
    first: Floats
    """Sums of the columns, shape (k, *S): numerator, denominator and, with a history, the same before it."""
    second: Floats
    """Sums of their products, shape (k, k, *S)."""


def totals(*columns: Floats) -> Totals:
    """Of one arm: numerator, denominator and, for CUPED, both before the experiment; one entry a unit."""
    table = np.stack([column[columns[1] > 0] for column in columns])
    history = np.count_nonzero(table[3]) if len(columns) == 4 else 0
    count = table.shape[1]
    return Totals(np.asarray(float(count)), np.asarray(float(history)), table.sum(axis=1), table @ table.T)


@dataclass(frozen=True, slots=True)
class Contrast:
    """R_t − scale·R_c and how well it is known. Arrays of the looks' shape."""

    estimate: Floats
    variance: Floats
    """Of the estimate."""
    size: Floats
    """Units of each arm of an equal split that would be as many: the n of the interval."""
    control: Floats
    """R_c."""
    treatment: Floats
    """R_t."""
    saved: Floats
    """Share of the variance that the history took away; 0 without CUPED."""
    known: NDArray[np.bool_]
    """There are enough units for an interval."""


def contrast(
    control: Totals, treatment: Totals, *, scale: float = 1.0, cautious: bool = False, least: int = LEAST
) -> Contrast:
    """The difference of two ratios of sums, `scale` times the control's taken from the treatment's.

    `cautious` takes for each arm the larger of the two arms' variances. In an early stage the treatment has
    few units: by chance they may be alike and promise a precision that is not there.

    Entries with fewer than `least` units in an arm are not known, and mean nothing.
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        before: Floats | None = None
        if len(control.first) == 4:
            whole = control.first[3] + treatment.first[3]
            before = np.where(whole > 0, (control.first[2] + treatment.first[2]) / whole, 0.0)
        c, t = _deviations(control, before), _deviations(treatment, before)
        enough = np.minimum(control.history, treatment.history) >= LEAST
        slope = np.where(enough & (c.ahead + t.ahead > 0), (c.shared + t.shared) / (c.ahead + t.ahead), 0.0)
        estimate = t.rate - scale * c.rate - slope * (t.lead - scale * c.lead)

        def variance(slope: Floats) -> Floats:
            arms = [
                np.maximum(one.spread - 2 * slope * one.shared + slope**2 * one.ahead, 0) / (one.units - 1)
                for one in (c, t)
            ]
            if cautious:
                arms = [np.maximum(*arms)] * 2
            return np.asarray(arms[1] / t.units + scale**2 * arms[0] / c.units)

        found, plain = variance(slope), variance(np.zeros_like(slope))
        size = 2.0 / (1.0 / c.units + 1.0 / t.units)
        known = np.minimum(c.units, t.units) >= least
        known &= np.isfinite(estimate) & np.isfinite(found)
        saved = np.where(plain > 0, 1.0 - found / plain, 0.0)
    return Contrast(estimate, found, size, c.rate, t.rate, saved, known)


@dataclass(frozen=True, slots=True)
class _Deviations:
    """Of one arm: R, and sums over its units of e², e·b, (b − mean)², and the mean of b."""

    units: Floats
    rate: Floats
    spread: Floats
    shared: Floats
    ahead: Floats
    lead: Floats


def _deviations(arm: Totals, before: Floats | None) -> _Deviations:
    first, s = arm.first, arm.second
    rate, mean = first[0] / first[1], first[1] / arm.units
    spread = np.maximum(s[0, 0] - 2 * rate * s[0, 1] + rate**2 * s[1, 1], 0) / mean**2
    if before is None:
        nothing = np.zeros_like(rate)
        return _Deviations(arm.units, rate, spread, nothing, nothing, nothing)
    lead = (first[2] - before * first[3]) / arm.units
    shared = (s[0, 2] - before * s[0, 3] - rate * (s[1, 2] - before * s[1, 3])) / mean
    ahead = s[2, 2] - 2 * before * s[2, 3] + before**2 * s[3, 3] - arm.units * lead**2
    return _Deviations(arm.units, rate, spread, shared, np.maximum(ahead, 0), lead)


def radius(size: ArrayLike, *, alpha: float, tuned: float, two_sided: bool = True) -> Floats:
    """Half the width of the interval in standard errors, at `size` units of each arm.

    Two-sided: √[2(nη²+1)/(nη²)·ln(√(nη²+1)/α)]; over all n, its product with 1/√n is smallest at η² for n =
    `tuned` (the approximation of their appendix).

    One-sided, a bound that is missed with probability α at whichever end it is used: the mixture over a
    half-normal instead of a normal. It is y·√[(nη²+1)/(nη²)] where 2·exp(y²/2)·Φ(y) = √(nη²+1)/α, with η² at
    2α [`normal_mixture_bound` of confseq, Howard et al., 1810.08240]. The root is found from above by
    y ← √[2·ln(√(nη²+1)/(2αΦ(y)))], which contracts five-fold or more where α < 0.1.

    >>> float(radius(1000, alpha=0.05, tuned=1000).round(4))
    3.0352
    >>> float(radius(1000, alpha=0.05, tuned=1000, two_sided=False).round(4))
    2.7661
    """
    twice = -2.0 * math.log(alpha if two_sided else 2 * alpha)
    squared = (twice + math.log1p(twice)) / tuned
    mass = np.asarray(size, dtype=np.float64) * squared
    odds = np.sqrt(mass + 1.0)
    if two_sided:
        normal = np.sqrt(2.0 * np.log(odds / alpha))
    else:
        normal = np.sqrt(2.0 * np.log1p(odds / (2 * alpha)))
        for _ in range(_ROUNDS):
            normal = np.sqrt(2.0 * np.log(odds / (2 * alpha * ndtr(normal))))
    with np.errstate(divide="ignore"):
        return normal * np.sqrt((mass + 1.0) / mass)


@dataclass(frozen=True, slots=True)
class Reading:
    """What the units whose windows are over say. Made by `read`, eaten by `decisions.decide` and people."""

    estimate: float
    """Reward per opportunity, treatment − control; NaN where nothing can be said."""
    low: float
    """−∞ where nothing can be said yet."""
    high: float
    error: float
    """Standard error of the estimate at this look alone."""
    control: float
    """Its reward per opportunity, unadjusted."""
    treatment: float
    units: tuple[int, int]
    """Control, treatment."""
    alpha: float
    saved: float
    """Share of the variance, and so of the users, that the history saves."""

    @property
    def known(self) -> bool:
        """Whether there is an interval."""
        return math.isfinite(self.low)

    @property
    def cuped(self) -> bool:
        """Whether a history was used."""
        return self.saved > 0


def read(
    control: Observations, treatment: Observations, *, alpha: float, tuned: int, two_sided: bool = True
) -> Reading:
    """The difference in reward per opportunity, of the units whose windows are over.

    Over all looks together [low, high] misses the truth with probability `alpha`; one-sided, each of its two
    ends does.
    """
    sums = [
        totals(
            *(
                c[arm.ended]
                for c in (arm.reward, arm.opportunities, arm.before_reward, arm.before_opportunities)
            )
        )
        for arm in (control, treatment)
    ]
    return _reading(sums[0], sums[1], alpha, tuned, two_sided)


def _reading(control: Totals, treatment: Totals, alpha: float, tuned: int, two_sided: bool = True) -> Reading:
    found = contrast(control, treatment)
    units = int(control.units), int(treatment.units)
    if not found.known:
        rates = float(found.control), float(found.treatment)
        return Reading(math.nan, -math.inf, math.inf, math.inf, *rates, units, alpha, 0.0)
    error = math.sqrt(float(found.variance))
    half = error * float(radius(found.size, alpha=alpha, tuned=tuned, two_sided=two_sided))
    middle = float(found.estimate)
    return Reading(
        middle,
        middle - half,
        middle + half,
        error,
        float(found.control),
        float(found.treatment),
        units,
        alpha,
        float(found.saved),
    )


def secondary(
    control: Observations, treatment: Observations, *, alpha: float, tuned: int
) -> Mapping[str, Reading]:
    """What else people want to know, each with an interval of its own at `alpha`; nothing is decided by them.

    `accepted` of shown, `accepts` and `shown` per opportunity, `kept` characters per opportunity, `cost` per
    accepted answer. What nobody reports is left out.
    """
    named = {
        "accepted": ("accepted", "shown"),
        "accepts": ("accepted", "opportunities"),
        "shown": ("shown", "opportunities"),
        "kept": ("kept", "opportunities"),
        "cost": ("cost", "accepted"),
    }
    arms = control.over(), treatment.over()
    found = {}
    for name, (above, below) in named.items():
        if all(len(getattr(arm, above)) and np.any(getattr(arm, below)) for arm in arms):
            sums = [_ratio(getattr(arm, above), getattr(arm, below), arm.units) for arm in arms]
            found[name] = _reading(sums[0], sums[1], alpha, tuned)
    return MappingProxyType(found)


def _ratio(above: Floats, below: Floats, units: int) -> Totals:
    """Totals of all `units`: of a cost, those that accepted nothing cost too."""
    table = np.stack([above, below])
    return Totals(np.asarray(float(units)), np.zeros(()), table.sum(axis=1), table @ table.T)


def spend(alpha: float, number: int) -> float:
    """What a policy's `number`-th experiment (from 1) may spend of α: α·6/(π²·number²).

    Their sum is α for ever, so whatever number of versions is tried, the probability that any that is no
    better is promoted is at most α (union bound). The price is gentle, since α enters an interval's width by
    the root of its logarithm.

    >>> round(spend(0.05, 1), 4), round(spend(0.05, 10), 5)
    (0.0304, 0.0003)
    """
    if number < 1:
        raise ValueError(f"experiments are counted from 1, not {number}")
    return alpha * 6.0 / (math.pi * number) ** 2


def imbalance(units: tuple[ArrayLike, ArrayLike], share: float) -> Floats:
    """Sequential p-value of a sample-ratio mismatch: how surprising it is that of the `units` (control,
    treatment) so many got the treatment, when each did with probability `share`.

    It is 1 / Bayes factor of Beta(K·share, K·(1 − share)) against `share`, at most 1 [Lindon & Malek,
    2011.03567]; the factor is a martingale, so over all looks together it falls to x with probability at
    most x (Ville). Valid from the first unit on.

    >>> float(imbalance((156, 212), 0.5).round(3))
    0.075
    """
    control, treatment = (np.asarray(one, dtype=np.float64) for one in units)
    a, b = CONCENTRATION * share, CONCENTRATION * (1.0 - share)
    factor = betaln(a + treatment, b + control) - betaln(a, b)
    factor = factor - treatment * math.log(share) - control * math.log1p(-share)
    return np.asarray(np.minimum(1.0, np.exp(-factor)))
