"""Experiments, what was decided about them, and the numbers of their units."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection, Row

from onlinerl.errors import Conflict, NotFound
from onlinerl.records import (
    EXPERIMENT_TRANSITIONS,
    Arm,
    Decision,
    DecisionKind,
    Experiment,
    ExperimentState,
    VersionState,
)
from onlinerl.store import versions
from onlinerl.store.schema import decisions as history
from onlinerl.store.schema import experiments as table

OPEN = (ExperimentState.RUNNING, ExperimentState.WAITING)
"""States in which requests are assigned."""


# ------------------------------------------------------------------------------------------ reading


def get(c: Connection, policy: str, id: int) -> Experiment:
    """One experiment. Raises NotFound."""
    row = c.execute(sa.select(table).where(table.c.policy == policy, table.c.id == id)).first()
    if row is None:
        raise NotFound(f"the policy {policy} has no experiment {id}")
    return _experiment(row)


def list_(c: Connection, policy: str) -> list[Experiment]:
    """All of a policy's, oldest first."""
    query = sa.select(table).where(table.c.policy == policy).order_by(table.c.id)
    return [_experiment(row) for row in c.execute(query)]


def running(c: Connection, policy: str) -> Experiment | None:
    """The one whose arms are served now, running or waiting for a person."""
    states = [state.value for state in OPEN]
    row = c.execute(sa.select(table).where(table.c.policy == policy, table.c.state.in_(states))).first()
    return None if row is None else _experiment(row)


def decisions(c: Connection, experiment: int) -> list[Decision]:
    """The history of one, oldest first."""
    query = sa.select(history).where(history.c.experiment == experiment).order_by(history.c.seq)
    return [_decision(row) for row in c.execute(query)]


# ------------------------------------------------------------------------------------------ writing


def start(
    c: Connection,
    *,
    policy: str,
    control: Arm,
    treatment: Arm,
    plan: Mapping[str, Any],
    tau: float,
    alpha: float,
    actor: str,
    now: float,
) -> Experiment:
    """Begin one in its first stage. A candidate of the policy that is the treatment becomes its canary.

    Raises Conflict when one runs already, the arms are the same, or a version cannot take part: rejected, or
    its files collected; NotFound for a version that does not exist.
    """
    other = running(c, policy)
    if other is not None:
        raise Conflict(f"experiment {other.id} of {policy} is {other.state}: stop it first")
    if control == treatment:
        raise Conflict(f"both arms are {control.name}: there is nothing to compare")
    for arm in (control, treatment):
        if arm.version is None:
            continue
        version = versions.get(c, arm.policy, arm.version)
        if version.state is VersionState.REJECTED or version.collected_at is not None:
            why = "it was rejected" if version.collected_at is None else "its files were collected by gc"
            raise Conflict(f"{version.name} cannot take part: {why}")
        if arm is treatment and arm.policy == policy and version.state is VersionState.CANDIDATE:
            reason = "enters an experiment"
            versions.transition(c, policy, version.id, VersionState.CANARY, actor=actor, reason=reason)
    result = c.execute(
        table.insert().values(
            policy=policy,
            state=ExperimentState.RUNNING.value,
            control=json.dumps(asdict(control)),
            treatment=json.dumps(asdict(treatment)),
            plan=json.dumps(dict(plan)),
            salt=secrets.token_hex(8),
            tau=tau,
            alpha=alpha,
            stage=0,
            stage_at=now,
            created_at=now,
            actor=actor,
            message="",
        )
    )
    assert result.inserted_primary_key is not None
    id = int(result.inserted_primary_key[0])
    reason = f"{treatment.name} against {control.name}"
    record(c, id, Decision(DecisionKind.START, reason, {"tau": tau, "alpha": alpha}, now, actor))
    return get(c, policy, id)


def record(c: Connection, id: int, decision: Decision) -> None:
    """Add a row to the history; changes nothing else."""
    c.execute(
        history.insert().values(
            experiment=id,
            at=decision.at or time.time(),
            stage=decision.stage,
            kind=decision.kind.value,
            actor=decision.actor,
            proposed=decision.proposed,
            reason=decision.reason,
            numbers=json.dumps(dict(decision.numbers)),
        )
    )


def ramp(c: Connection, experiment: Experiment, decision: Decision, now: float) -> Experiment:
    """On to the next stage. Raises Conflict when somebody else moved it meanwhile, or there is none."""
    current = _unchanged(c, experiment)
    if current.stage + 1 >= len(current.plan["stages"]):
        raise Conflict(f"experiment {current.id} of {current.policy} is in its last stage")
    _set(c, current.id, stage=current.stage + 1, stage_at=now, state=ExperimentState.RUNNING.value)
    record(c, current.id, decision)
    return get(c, current.policy, current.id)


def wait(c: Connection, experiment: Experiment, decision: Decision) -> Experiment:
    """Let a person confirm `decision`; the arms are served as before."""
    current = _unchanged(c, experiment)
    _move(c, current, ExperimentState.WAITING)
    record(c, current.id, decision)
    return get(c, current.policy, current.id)


def finish(
    c: Connection, experiment: Experiment, state: ExperimentState, decision: Decision, now: float
) -> Experiment:
    """End it, with what follows for the treatment: PROMOTED lets it go live, ABORTED and FUTILE reject it
    where it is the policy's canary, STOPPED too unless it is live by now.

    Raises Conflict for one that has ended, or that somebody else moved meanwhile.
    """
    current = _unchanged(c, experiment)
    _move(c, current, state, ended_at=now, message=decision.reason)
    record(c, current.id, decision)
    arm = current.treatment
    if arm.policy != current.policy or arm.version is None:
        return get(c, current.policy, current.id)  # its versions are another policy's business
    version = versions.get(c, arm.policy, arm.version)
    actor, reason = decision.actor, f"experiment {current.id}: {decision.reason}"
    if state is ExperimentState.PROMOTED:
        if version.state is not VersionState.LIVE:
            versions.promote(c, arm.policy, arm.version, actor=actor, reason=reason)
    elif version.state is VersionState.CANARY:
        versions.reject(c, arm.policy, arm.version, actor=actor, reason=reason)
    return get(c, current.policy, current.id)


# ------------------------------------------------------------------------------------------ helpers


def _unchanged(c: Connection, experiment: Experiment) -> Experiment:
    current = get(c, experiment.policy, experiment.id)
    if (current.state, current.stage) != (experiment.state, experiment.stage):
        raise Conflict(
            f"experiment {current.id} of {current.policy} has moved: "
            f"it is {current.state}, in stage {current.stage + 1}"
        )
    return current


def _move(c: Connection, current: Experiment, to: ExperimentState, **values: object) -> None:
    if to not in EXPERIMENT_TRANSITIONS[current.state]:
        raise Conflict(
            f"experiment {current.id} of {current.policy} is {current.state} and cannot become {to}"
        )
    _set(c, current.id, state=to.value, **values)


def _set(c: Connection, id: int, **values: object) -> None:
    c.execute(table.update().where(table.c.id == id).values(**values))


def _experiment(row: Row[Any]) -> Experiment:
    return Experiment(
        id=row.id,
        policy=row.policy,
        state=ExperimentState(row.state),
        control=Arm(**json.loads(row.control)),
        treatment=Arm(**json.loads(row.treatment)),
        plan=json.loads(row.plan),
        salt=row.salt,
        tau=row.tau,
        alpha=row.alpha,
        stage=row.stage,
        stage_at=row.stage_at,
        created_at=row.created_at,
        ended_at=row.ended_at,
        actor=row.actor,
        message=row.message,
    )


def _decision(row: Row[Any]) -> Decision:
    return Decision(
        kind=DecisionKind(row.kind),
        reason=row.reason,
        numbers=json.loads(row.numbers),
        at=row.at,
        actor=row.actor,
        stage=row.stage,
        proposed=row.proposed,
    )
