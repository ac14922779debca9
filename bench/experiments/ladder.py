"""Whole experiments, look by look through `read`, `watch` and `decide`: bad versions, and others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from bench.experiments.population import COLUMNS, SHOWN, TAU, Mask, People, Table, Version, days
from bench.experiments.studies import ALPHA
from numpy.random import Generator
from numpy.typing import NDArray

from onlinerl import config
from onlinerl.experiments import analysis, decisions, guardrails
from onlinerl.experiments.analysis import Floats, Observations
from onlinerl.records import DecisionKind, Experiment

FAULTS = {
    "no better": Version(),
    "accepted 10 % more": Version(lift=0.1),
    "accepted 30 % less": Version(lift=-0.3),
    "latency × 3": Version(slow=0.57),
    "errors 5 %": Version(errors=0.05),
    "shows 40 % of what it did": Version(shown=0.4 * SHOWN),
}
"""Latency is lognormal with σ = 0.6: three times as long puts 57 % beyond what was the 95th percentile."""


@dataclass(slots=True)
class Stage:
    """What the users did in one stage so far; arrays by user."""

    treated: Mask
    begun: Floats
    """Hours; ∞ where a user has not come yet."""
    sums: Table

    @staticmethod
    def fresh(lots: Floats, share: float) -> Stage:
        """With nothing seen."""
        blank = {name: np.zeros(len(lots)) for name in (*COLUMNS[:2], *COLUMNS[4:])}
        return Stage(lots < share, np.full(len(lots), np.inf), blank)

    def observations(self, treated: bool, before: Table, hour: float) -> Observations:
        """Of one arm."""
        here = (self.treated == treated) & np.isfinite(self.begun)
        columns = {name: column[here] for name, column in (self.sums | before).items()}
        return Observations.of(**columns, ended=(hour - self.begun >= 24.0)[here])


def whole(
    rng: Generator, version: Version, stages: tuple[float, ...], users: int, most: int, looks: int
) -> dict[str, Any]:
    """One experiment from its first stage to its end, or for `most` days, as the loop would run it, with so
    many `looks` in a working day of eight hours."""
    plan = config.Experiments(stages=stages)
    people = People.draw(rng, users)
    yesterday = days(rng, people, Version(), history=0.85)
    before = {name: yesterday[name] for name in COLUMNS[2:4]}
    lots = rng.random(users)
    frozen, alpha = plan.model_dump(mode="json"), analysis.spend(ALPHA, 1)
    experiment = replace(Experiment.example(), plan=frozen, stage=0, stage_at=0.0, alpha=alpha)
    stage = Stage.fresh(lots, stages[0])
    harmed, requests = np.zeros(users, dtype=np.bool_), 0
    for step in range(most * looks):
        day, part = divmod(step, looks)
        hour = 24.0 * day + 8.0 * (part + 1) / looks
        if part == 0:
            lifted = np.clip(people.taste * (1 + version.lift * stage.treated), 0.001, 0.999)
            rate = rng.beta(30 * lifted, 30 * (1 - lifted))
            activity = people.activity * rng.lognormal(-0.125, 0.5, users)
        came = np.repeat(np.arange(users), rng.poisson(activity / looks))
        stage.begun[came] = np.minimum(stage.begun[came], hour)
        harmed[came] |= stage.treated[came]
        requests += int(stage.treated[came].sum())
        _answer(rng, stage, people, version, rate, came[hour - stage.begun[came] < 24.0])
        control, treatment = (stage.observations(treated, before, hour) for treated in (False, True))
        reading = analysis.read(control, treatment, alpha=experiment.alpha, tuned=plan.tuned)
        surprise = float(analysis.imbalance((control.units, treatment.units), experiment.share))
        watched = guardrails.watch(control, treatment, plan)
        made = decisions.decide(experiment, reading, watched, surprise, hour * 3600.0)
        if made.kind is DecisionKind.RAMP:
            experiment = replace(experiment, stage=experiment.stage + 1, stage_at=hour * 3600.0)
            stage = Stage.fresh(lots, experiment.share)
            lifted = np.clip(people.taste * (1 + version.lift * stage.treated), 0.001, 0.999)
            rate = rng.beta(30 * lifted, 30 * (1 - lifted))
        elif made.kind is not DecisionKind.CONTINUE:
            break
    return {
        "end": made.kind.value,
        "share": experiment.share,
        "hours": hour,
        "working hours": 8.0 * day + hour - 24.0 * day,
        "users": int(harmed.sum()),
        "requests": requests,
        "reason": made.reason,
    }


def _answer(
    rng: Generator, stage: Stage, people: People, version: Version, rate: Floats, came: NDArray[np.int64]
) -> None:
    """One request of each entry of `came`."""
    old = Version()
    treated = stage.treated[came]
    luck = rng.random((5, len(came)))
    shown = luck[0] < people.shown[came] * np.where(treated, version.shown, old.shown)
    accepted = shown & (luck[1] < rate[came])
    retained = accepted & (came % 2 == 0)
    facts = {
        "opportunities": np.ones(len(came)),
        "reward": accepted - TAU * shown,
        "shown": shown,
        "accepted": accepted,
        "errors": luck[2] < people.errors[came] * 0.005 + np.where(treated, version.errors - 0.005, 0.0),
        "slow": luck[3] < people.slow[came] * np.where(treated, version.slow, old.slow),
        "retained": retained,
        "reverted": retained & (luck[4] < np.where(treated, version.reverted, old.reverted)),
        "characters": shown * people.length[came] * np.where(treated, version.length, old.length),
    }
    for name, fact in facts.items():
        stage.sums[name] += np.bincount(came, weights=fact, minlength=len(stage.begun))


def ladder(rng: Generator, *, experiments: int = 200) -> dict[str, Any]:
    """Whole experiments with bad versions, and with some that are not: where they end, and who was harmed."""
    five, default = (0.05, 0.25, 0.5), config.Experiments().stages
    rows = []
    for users, stages, count in ((5_000, five, experiments), (5_000, default, experiments // 2),
                                 (1_000, five, experiments // 2)):  # fmt: skip
        for name, version in FAULTS.items():
            good = version.lift >= 0 and version == Version(lift=version.lift)
            if good and stages is not default:
                continue
            most, looks = (7, 16) if good else (5, 96)
            runs = [whole(rng, version, stages, users, most, looks) for _ in range(count)]
            rows.append(_row(name, users, stages, most, looks, runs))
    return {"rows": rows, "alpha": ALPHA}


def _row(
    name: str, users: int, stages: Sequence[float], most: int, looks: int, runs: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    ends: dict[str, int] = {}
    for run in runs:
        key = f"{run['end']} at {run['share']:.0%}"
        ends[key] = ends.get(key, 0) + 1
    spread = {
        of: [float(np.percentile([run[of] for run in runs], point)) for point in (50, 95)]
        for of in ("users", "requests", "hours", "working hours")
    }
    aborted = next((run["reason"] for run in runs if run["end"] == "abort"), "")
    return {
        "version": name,
        "users": users,
        "stages": list(stages),
        "experiments": len(runs),
        "days": most,
        "looks a day": looks,
        "ends": dict(sorted(ends.items(), key=lambda item: -item[1])),
        "harmed": spread,
        "example": aborted,
    }
