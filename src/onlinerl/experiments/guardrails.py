"""How much worse a treatment may be, watched at every look. Pure functions.

A guardrail is a **deterioration** with a margin, positive where the treatment is worse:

| name | deterioration | margin |
|---|---|---|
| `reward` | reward per opportunity, control − treatment | 0; with goal `equal` its `margin` |
| `latency` | requests beyond the control's 95th percentile, treatment − control | `guardrails.latency` |
| `errors` | requests that end in an error, treatment − control | `guardrails.errors` |
| `shown` | `guardrails.shown` × show rate of the control − that of the treatment | 0 |
| `reverted` | accepted answers gone a minute later, treatment − control | `guardrails.reverted` |
| `length` | characters of a shown answer, treatment − `guardrails.length` × control | 0 |

All units are looked at, also those whose window is still open: harm is wanted early. Each guardrail has two
one-sided bounds of an asymptotic confidence sequence (`analysis.radius`), for two different questions:

- `low`: is it **broken**? The deterioration's lower bound is beyond the margin. Six guardrails ask, and any
  of them can end the experiment, so they share α: half of it is the reward's, a tenth each the others'. In
  one stage a version that is within every margin is taken back with a probability of at most α.
- `high`: is it **safe**? The upper bound is within the margin. To go live all must be, and a version that is
  beyond one margin must fool that one: each has the whole α.

Bounds are cautious (`analysis.contrast`): the few units of an early stage are given the variance of the many
of the control, if that is larger. Where a number is missing, because nobody reports it or too few units have
it, a guardrail is not known: neither broken nor in doubt, and it stops no promotion.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from onlinerl import config
from onlinerl.experiments import analysis
from onlinerl.experiments.analysis import LEAST, Observations, Totals, totals

TUNED = 100
"""Units of each arm at which these bounds are tightest: harm should show within some hundred users."""
SHARES = {"reward": 0.5, "latency": 0.1, "errors": 0.1, "shown": 0.1, "reverted": 0.1, "length": 0.1}
"""Of α, by guardrail."""
TOLERANCE = 0.3
"""Share of the control's accepts whose loss must be unlikely before a version gets more traffic."""


@dataclass(frozen=True, slots=True)
class Guard:
    """How one guardrail stands. Made by `watch`, eaten by `decisions.decide` and people."""

    name: str
    value: float
    """The deterioration: positive is worse. NaN where it is not known."""
    error: float
    """Its standard error at this look alone; ∞ where it is not known."""
    low: float
    high: float
    margin: float
    tolerance: float
    """Deterioration that must be unlikely before the version gets more traffic: for the reward TOLERANCE of
    the control's accepts per opportunity, which is what losing that share of them costs; else the margin."""
    units: tuple[int, int]
    """Control, treatment: those that have the number at all."""
    control: float
    """The rate or mean that it compares; NaN where there is none."""
    treatment: float

    @property
    def known(self) -> bool:
        """Whether there are enough units to say anything."""
        return math.isfinite(self.low)

    @property
    def broken(self) -> bool:
        """Surely beyond the margin."""
        return self.known and self.low > self.margin

    @property
    def safe(self) -> bool:
        """Surely within the margin; also where it is not known, since missing data stops nothing."""
        return not self.known or self.high <= self.margin

    @property
    def doubtful(self) -> bool:
        """Not surely tolerable: no proof of harm, but no reason to give it more traffic either. The reward,
        which varies most, must be two standard errors from its tolerance."""
        distance = 2.0 * self.error if self.name == "reward" else 0.0
        return self.known and self.value + distance > self.tolerance

    @property
    def likely(self) -> bool:
        """A standard error beyond the margin."""
        return self.known and self.value - self.error > self.margin


def watch(control: Observations, treatment: Observations, plan: config.Experiments) -> tuple[Guard, ...]:
    """Every guardrail of a stage, `reward` first; both arms are of that stage alone."""
    limits, alpha = plan.guardrails, plan.alpha

    def of(above: str, below: str) -> tuple[Totals, Totals]:
        arms = (totals(getattr(arm, above), getattr(arm, below)) for arm in (control, treatment))
        return next(arms), next(arms)

    opportunities = float(control.opportunities.sum())
    rate = float(control.accepted.sum()) / opportunities if opportunities else 0.0
    allowed = plan.margin if plan.goal == "equal" else 0.0
    tolerance = max(TOLERANCE * rate, allowed)
    return (
        _guard(
            "reward", (_reward(control), _reward(treatment)), allowed, alpha, worse=-1.0, tolerance=tolerance
        ),
        _guard("latency", of("slow", "opportunities"), limits.latency, alpha),
        _guard("errors", of("errors", "opportunities"), limits.errors, alpha),
        _guard("shown", of("shown", "opportunities"), 0.0, alpha, worse=-1.0, scale=limits.shown),
        _guard("reverted", of("reverted", "retained"), limits.reverted, alpha),
        _guard("length", of("characters", "shown"), 0.0, alpha, scale=limits.length),
    )


def _reward(arm: Observations) -> Totals:
    return totals(arm.reward, arm.opportunities, arm.before_reward, arm.before_opportunities)


def _guard(
    name: str,
    arms: tuple[Totals, Totals],
    margin: float,
    alpha: float,
    *,
    worse: float = 1.0,
    scale: float = 1.0,
    tolerance: float | None = None,
) -> Guard:
    """`worse` is 1 where more of the treatment is worse, −1 where less is."""
    control, treatment = arms
    found = analysis.contrast(control, treatment, scale=scale, cautious=True, least=LEAST // 2)
    known = bool(found.known and found.size >= LEAST)
    value = worse * float(found.estimate) if known else math.nan
    error = math.sqrt(float(found.variance)) if known else math.inf

    def bound(alpha: float) -> float:
        return error * float(analysis.radius(found.size, alpha=alpha, tuned=TUNED, two_sided=False))

    return Guard(
        name,
        value,
        error,
        low=value - bound(SHARES[name] * alpha) if known else -math.inf,
        high=value + bound(alpha) if known else math.inf,
        margin=margin,
        tolerance=margin if tolerance is None else tolerance,
        units=(int(control.units), int(treatment.units)),
        control=float(found.control),
        treatment=float(found.treatment),
    )
