"""Experiments for tests: started, begun, and filled with what users did."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from sqlalchemy.engine import Connection

from onlinerl import config
from onlinerl.experiments import assignment
from onlinerl.records import Arm, Experiment, Interaction, Verdict
from onlinerl.store import experiments, interactions, versions
from tests.store_helpers import base, version

T0 = 1_000_000.0
"""When experiments of tests begin."""
HOUR = 3600.0


def lineage(c: Connection, *candidates: int) -> None:
    """Version 0, live, and candidates that descend from it."""
    base(c)
    for id in candidates:
        versions.register(c, version(id, parent=0))


def start(
    c: Connection,
    treatment: Arm | int = 1,
    *,
    control: Arm | int = 0,
    policy: str = "tab",
    begin: bool = True,
    rewards: Mapping[str, Any] | None = None,
    tau: float = 0.1,
    **plan: Any,
) -> Experiment:
    """An experiment that began at T0, by default of one stage with both arms alike."""
    settings = config.Experiments.model_validate({"stages": [0.5], **plan})
    begun = experiments.start(
        c,
        policy=policy,
        control=control if isinstance(control, Arm) else Arm(policy, control),
        treatment=treatment if isinstance(treatment, Arm) else Arm(policy, treatment),
        plan=settings.model_dump(mode="json"),
        rewards=config.Rewards.model_validate(rewards or {}).model_dump(mode="json"),
        tau=tau,
        alpha=0.03,
        actor="test",
        now=T0,
    )
    return experiments.begin(c, begun, T0) if begin else begun


def users(experiment: Experiment, arm: str, count: int) -> list[str]:
    """Users whom the experiment assigns to an arm."""
    found = []
    for number in range(100 * count):
        user = f"user-{number}"
        drawn = assignment.experimental(
            experiment, config.Experiments(), user=user, project="default", path="", at=T0
        )
        if drawn is not None and drawn.arm == arm:
            found.append(user)
            if len(found) == count:
                return found
    raise AssertionError(f"not so many users are in {arm}")


def answered(
    experiment: Experiment | None,
    user: str,
    arm: str,
    at: float,
    verdict: Verdict | None = None,
    *,
    took: float = 0.2,
    **changes: Any,
) -> Interaction:
    """One answer as the gateway records it."""
    fields: dict[str, Any] = {
        "id": f"cmpl-{user}-{arm}-{at}",
        "user": user,
        "arm": arm,
        "at": at,
        "finished_at": at + took,
    }
    if experiment is not None:
        fields |= {"experiment": experiment.id, "unit": user}
    if verdict is not None:
        fields |= {"verdict": verdict, "verdict_source": "native", "verdict_at": at + 1}
    return replace(Interaction.example(), **{**fields, **changes})


def served(
    c: Connection,
    experiment: Experiment,
    rates: Mapping[str, float],
    *,
    units: int,
    requests: int = 4,
    at: float = T0 + 1,
    **changes: Any,
) -> None:
    """Each arm's users ask, and accept that share of the answers; the rest is rejected."""
    rows: list[Interaction] = []
    for arm, rate in rates.items():
        for place, user in enumerate(users(experiment, arm, units)):
            for number in range(requests):
                # evenly, with some spread between users
                accepted = (place * requests + number) * rate % 1 < rate
                verdict = Verdict.ACCEPTED if accepted else Verdict.REJECTED
                rows.append(answered(experiment, user, arm, at + number, verdict, **changes))
    insert(c, rows)


def insert(c: Connection, rows: Iterable[Interaction]) -> None:
    interactions.insert(c, list(rows))
