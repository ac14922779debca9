"""What follows from an experiment's numbers. Pure: the same numbers, the same decision.

The first line that applies is the decision. Those that ask are only proposed where the plan says
`decide: ask`; the others are done by the experiment itself in any case.

| | when | decision | asks |
|---|---|---|---|
| 1 | the arms' units do not match the share: p < MISMATCH | abort | |
| 2 | a guardrail is broken, the reward's among them | abort | |
| 3 | the interval of the difference lies below 0 (goal `equal`: below −`margin`) | abort | |
| 4 | a person has been asked | continue | |
| 5 | the stage has too few units to say anything | continue | |
| 6 | last stage: the interval lies above 0 (above −`margin`), every guardrail is safe, and `least_units` \
and `least_hours` are met | promote | yes |
| 7 | the stage has lasted `most_hours`; or it is an earlier one, in doubt, HELD exposure windows old, and \
no unit's window is open | futile | yes |
| 8 | earlier stage: `stage_hours` and `stage_units` are met, and nothing is in doubt | ramp | |
| 9 | otherwise | continue | |

Missing data triggers nothing: without units lines 6 to 8 cannot apply however late it is, and what nobody
reports breaks no guardrail.

**In doubt** (lines 7 and 8) is a guardrail whose value is beyond its margin, and the reward while a loss of
TOLERANCE of the control's accepts is less than two standard errors away. The few users of an early stage may
never take it that far: after a whole exposure window it is enough that the loss is not a standard error
beyond its margin. A ramp claims nothing and can be taken back: it needs no bound that is valid at every look.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from onlinerl import config
from onlinerl.experiments.analysis import LEAST, Reading
from onlinerl.experiments.guardrails import Guard
from onlinerl.records import Arm, Decision, DecisionKind, Experiment, ExperimentState

MISMATCH = 0.001
"""α of the sample-ratio test, of each stage."""
HELD = 3.0
"""Exposure windows for which a stage in doubt waits for more users; with windows of a day, over a weekend."""


def decide(
    experiment: Experiment, reading: Reading, guards: Sequence[Guard], imbalance: float, now: float
) -> Decision:
    """What to do with an experiment that runs (or waits for a person) after this look.

    `reading` and `guards` (all that `guardrails.watch` gives) are of its present stage, `imbalance` is the
    p-value of that stage's sample ratio. An abort is never only proposed.
    """
    plan = config.Experiments.model_validate(dict(experiment.plan))
    look = _Look(experiment, plan, reading, {guard.name: guard for guard in guards}, imbalance, now)
    kind, reason = look.verdict()
    asks = plan.decide == "ask" and kind in (DecisionKind.PROMOTE, DecisionKind.FUTILE)
    return Decision(kind, reason, look.numbers(), now, stage=experiment.stage, proposed=asks)


@dataclass(frozen=True, slots=True)
class _Look:
    """All that a decision rests on."""

    experiment: Experiment
    plan: config.Experiments
    reading: Reading
    guards: Mapping[str, Guard]
    imbalance: float
    now: float

    @property
    def hours(self) -> float:
        """Of the present stage."""
        return (self.now - self.experiment.stage_at) / 3600.0

    @property
    def line(self) -> float:
        """What the difference must exceed."""
        return -self.plan.margin if self.plan.goal == "equal" else 0.0

    @property
    def units(self) -> str:
        return f"{self.plan.unit}s"

    def verdict(self) -> tuple[DecisionKind, str]:
        """The table, line by line."""
        reading, reward = self.reading, self.guards["reward"]
        name = label(self.experiment.treatment, self.experiment)
        last = self.experiment.stage + 1 == len(self.plan.stages)
        if self.imbalance < MISMATCH:
            return DecisionKind.ABORT, self._mismatch(name)
        broken = [guard for guard in self.guards.values() if guard.broken]
        if broken:
            return DecisionKind.ABORT, "; ".join(complaint(guard, name) for guard in broken)
        if reading.known and reading.high < self.line:
            return DecisionKind.ABORT, f"{name} is worse: {self._difference()}"
        if self.experiment.state is ExperimentState.WAITING:
            return DecisionKind.CONTINUE, "a person has been asked"
        if not (reading.known if last else reward.known):
            return DecisionKind.CONTINUE, self._few(name, reading.units if last else reward.units, last)
        doubts = self._doubts()
        missing = self._unmet_last() if last else [*self._unmet(), *doubts]
        if last and not missing:
            return DecisionKind.PROMOTE, f"{name} {self._praise()}: {self._difference()}"
        if self.hours >= self.plan.most_hours:
            return DecisionKind.FUTILE, f"no answer in {self.hours:.0f} hours: {'; '.join(missing)}"
        exhausted = self.hours >= HELD * self.plan.window_hours and reading.units[1] == reward.units[1]
        if not last and doubts and exhausted:
            return DecisionKind.FUTILE, f"no more users come in this stage: {'; '.join(doubts)}"
        if not missing:
            share = self.plan.stages[self.experiment.stage + 1]
            reason = f"{name} does no visible harm to {reward.units[1]} {self.units}: on to {share:.0%}"
            return DecisionKind.RAMP, reason
        return DecisionKind.CONTINUE, "; ".join(missing)

    def _unmet_last(self) -> list[str]:
        """What a promotion still lacks, in words."""
        plan, reading = self.plan, self.reading
        least = max(plan.least_units, LEAST)
        missing = []
        if reading.low <= self.line:
            missing.append(self._difference())
        if min(reading.units) < least:
            counted = f"{min(reading.units)} {self.units} of the smaller arm have been seen to the end"
            missing.append(f"{counted}, {least} are needed")
        if self.hours < plan.least_hours:
            missing.append(f"{self.hours:.1f} of {plan.least_hours:g} hours are over")
        missing += [
            f"{guard.name} is not yet shown to be within its margin"
            for guard in self.guards.values()
            if guard.name != "reward" and not guard.safe
        ]
        return missing

    def _unmet(self) -> list[str]:
        """What an earlier stage still lacks, in words."""
        plan, reward = self.plan, self.guards["reward"]
        missing = []
        if self.hours < plan.stage_hours:
            missing.append(f"{self.hours:.1f} of {plan.stage_hours:g} hours of this stage are over")
        if reward.units[1] < plan.stage_units:
            missing.append(f"{reward.units[1]} of {plan.stage_units} {self.units} have come in this stage")
        return missing

    def _doubts(self) -> list[str]:
        """Why it should not get more traffic, in words."""
        reward, unit = self.guards["reward"], "points of reward per 100 requests"
        doubts = []
        if self.hours < self.plan.window_hours:
            if reward.doubtful:
                doubts.append(f"a loss of {points(reward.tolerance)} {unit} cannot be ruled out yet")
        elif reward.likely:
            doubts.append(f"it looks worse, by {points(reward.value)} {unit}")
        doubts += [
            f"{guard.name} looks worse than its margin"
            for guard in self.guards.values()
            if guard.name != "reward" and guard.doubtful
        ]
        return doubts

    def _praise(self) -> str:
        other = label(self.experiment.control, self.experiment)
        return f"is as good as {other}" if self.plan.goal == "equal" else f"is better than {other}"

    def _difference(self) -> str:
        """The interval in words."""
        low, high = self.reading.low, self.reading.high
        unit = "points of reward per 100 requests"
        if low > 0:
            words = f"better by {points(low)} to {points(high)} {unit}"
        elif high < 0:
            words = f"worse by {points(-high)} to {points(-low)} {unit}"
        else:
            words = f"between {points(-low)} {unit} worse and {points(high)} better"
        if self.plan.goal == "equal":
            words += f", {points(self.plan.margin)} worse are allowed"
        control, treatment = self.reading.units
        return f"{words} ({treatment} against {control} {self.units})"

    def _few(self, name: str, units: tuple[int, int], last: bool) -> str:
        seen = "have been seen to the end" if last else "have come"
        control, treatment = units
        return (
            f"{treatment} {self.units} with {name} and {control} without {seen} in this stage, "
            f"some {LEAST} are needed to say anything; where no more come, start it with larger stages"
        )

    def _mismatch(self, name: str) -> str:
        control, treatment = self.guards["reward"].units
        expected = (control + treatment) * self.experiment.share
        return (
            f"the arms cannot be compared: of {control + treatment} {self.units} {treatment} have {name}, "
            f"{expected:.0f} were to be expected (p = {self.imbalance:.2g})"
        )

    def numbers(self) -> dict[str, float]:
        """All of it by name; what is not known is left out."""
        reading = self.reading
        found = {
            "hours": self.hours,
            "share": self.experiment.share,
            "imbalance": self.imbalance,
            "estimate": reading.estimate,
            "low": reading.low,
            "high": reading.high,
            "error": reading.error,
            "control": reading.control,
            "treatment": reading.treatment,
            "units/control": reading.units[0],
            "units/treatment": reading.units[1],
            "alpha": reading.alpha,
            "saved": reading.saved,
        }
        for name, guard in self.guards.items():
            found |= {
                f"{name}/value": guard.value,
                f"{name}/low": guard.low,
                f"{name}/high": guard.high,
                f"{name}/margin": guard.margin,
                f"{name}/control": guard.control,
                f"{name}/treatment": guard.treatment,
                f"{name}/units/control": guard.units[0],
                f"{name}/units/treatment": guard.units[1],
            }
        return {name: float(value) for name, value in found.items() if math.isfinite(value)}


def label(arm: Arm, experiment: Experiment) -> str:
    """An arm in a sentence: `v7`, or its full name where it is not of the experiment's policy.

    >>> label(Arm("tab", 7), Experiment.example())
    'v7'
    """
    return f"v{arm.version}" if arm.policy == experiment.policy and not arm.upstream else arm.name


def points(reward: float) -> str:
    """A reward per opportunity as points per 100 requests.

    >>> points(0.0123)
    '1.2'
    """
    return f"{100 * reward:.1f}" if abs(reward) >= 0.001 else f"{100 * reward:.2f}"


def complaint(guard: Guard, name: str) -> str:
    """A broken guardrail as a sentence."""
    control, treatment, margin = guard.control, guard.treatment, guard.margin
    match guard.name:
        case "reward":
            loss = f"it loses at least {points(guard.low)} points of reward per 100 requests"
            said = f"{name} is worse: {loss}" + (f", {points(margin)} are allowed" if margin else "")
        case "latency":
            added = f"at least {guard.low:.1%} more of its requests are beyond the control's 95th percentile"
            said = f"{name} is too slow: {added}, {margin:.1%} are allowed"
        case "errors":
            added = f"at least {guard.low:.1%} more of its requests end in an error"
            said = f"{name} fails too often: {added}, {margin:.1%} are allowed"
        case "shown":
            said = f"{name} is too silent: it shows {treatment:.1%} of requests, the control {control:.1%}"
        case "reverted":
            added = f"at least {guard.low:.1%} more of its accepted answers are gone a minute later"
            said = f"{name} is taken back too often: {added}, {margin:.1%} are allowed"
        case "length":
            said = f"{name} is too long: {treatment:.0f} characters an answer, the control {control:.0f}"
        case other:
            raise ValueError(f"no guardrail {other!r}")
    return f"{said} (seen on {guard.units[1]} units)"
