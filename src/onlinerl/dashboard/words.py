"""What an experiment says, as a sentence that needs no statistics. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass

from onlinerl.records import Arm, Decision, Experiment, ExperimentState

OUTCOMES = {
    ExperimentState.PROMOTED: "promoted",
    ExperimentState.FUTILE: "given up",
    ExperimentState.ABORTED: "taken back",
    ExperimentState.STOPPED: "stopped",
}


@dataclass(frozen=True, slots=True)
class Verdict:
    """Made by `verdict`, eaten by the page, which says the time in the reader's own clock."""

    text: str
    """What the numbers say: "v7 is better by 1.2 to 4.0 points"."""
    outcome: str
    """What came of it: "promoted", or, while it runs, how far it is."""
    at: float | None
    """When that was; None while it runs."""
    reason: str = ""
    """Why it ended, in the words of who ended it."""


def name(arm: Arm, policy: str) -> str:
    """An arm as people call it: `v7` where the policy is plain."""
    return f"v{arm.version}" if arm.policy == policy and arm.version is not None else arm.name


def points(difference: float) -> str:
    """A difference of reward per opportunity in points, hundredths, without its sign.

    >>> points(-0.0123)
    '1.2'
    """
    return f"{abs(difference) * 100:.1f}"


def bounds(reading: Decision | None) -> tuple[float, float, float] | None:
    """(estimate, low, high) of a decision, where it has an interval."""
    if reading is None:
        return None
    found = tuple(reading.numbers.get(key, math.nan) for key in ("estimate", "low", "high"))
    return (found[0], found[1], found[2]) if all(map(math.isfinite, found)) else None


def share(fraction: float) -> str:
    """A share as people write it.

    >>> share(0.05), share(0.125)
    ('5 %', '12.5 %')
    """
    return f"{fraction * 100:.3g} %"


def verdict(experiment: Experiment, reading: Decision | None) -> Verdict:
    """What `reading`, the last one with an interval (None: there is none yet), says of the experiment."""
    treatment = name(experiment.treatment, experiment.policy)
    control = name(experiment.control, experiment.policy)
    found = bounds(reading)
    if not experiment.begun:
        text = f"{treatment} is compared with {control} once the engines hold both"
    elif found is None:
        text = f"{treatment} is compared with {control}; too few users for an interval"
    else:
        text = _compared(treatment, control, *found, margin=_margin(experiment))
    if experiment.state in OUTCOMES:
        return Verdict(text, OUTCOMES[experiment.state], experiment.ended_at, experiment.message)
    if not experiment.begun:
        return Verdict(text, "not begun yet", None)
    stages = experiment.plan["stages"]
    where = f"stage {experiment.stage + 1} of {len(stages)}, {share(experiment.share)} of users"
    if experiment.state is ExperimentState.WAITING:
        return Verdict(text, f"waiting for a person to decide; {where}", None)
    return Verdict(text, f"still running; {where}", None)


def _margin(experiment: Experiment) -> float | None:
    """The loss that is accepted; None where the treatment must be better."""
    return float(experiment.plan["margin"]) if experiment.plan.get("goal") == "equal" else None


def _compared(
    treatment: str, control: str, estimate: float, low: float, high: float, *, margin: float | None
) -> str:
    if low > 0:
        return f"{treatment} is better by {points(low)} to {points(high)} points"
    if high < 0:
        return f"{treatment} is worse by {points(high)} to {points(low)} points"
    if margin is not None and low > -margin:
        return (
            f"{treatment} is as good as {control}: at most {points(low)} points worse, "
            f"and {points(margin)} are accepted"
        )
    return (
        f"{treatment} is between {points(low)} points worse and {points(high)} points better than {control}"
    )
