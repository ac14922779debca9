"""Experiments, what was decided about them, and the numbers of their units.

    start ──both arms can be served: begin──▶ first stage ──ramp──▶ … last stage ──▶ finish
                                                  └── wait (for a person) ──▶ finish

Every change leaves a decision row in its own transaction. A change of an arm's version from outside ends the
experiment too: `versions.transition` does that.
"""

from __future__ import annotations

import json
import math
import secrets
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import sqlalchemy as sa
from sqlalchemy.engine import Connection, Row

from onlinerl import config
from onlinerl.errors import Conflict, NotFound
from onlinerl.experiments.analysis import Observations
from onlinerl.experiments.assignment import CONTROL, SEPARATOR, TREATMENT
from onlinerl.records import (
    EXPERIMENT_TRANSITIONS,
    Arm,
    Decision,
    DecisionKind,
    Experiment,
    ExperimentState,
    FinishReason,
    Verdict,
    VersionState,
)
from onlinerl.store import versions
from onlinerl.store.interactions import KINDS
from onlinerl.store.schema import decisions as history
from onlinerl.store.schema import experiments as table
from onlinerl.store.schema import interactions
from onlinerl.worth import ONLY_TIMEOUTS

OPEN = (ExperimentState.RUNNING, ExperimentState.WAITING)
"""States in which requests are assigned."""
HOUR = 3600.0
RECENT = 2000
"""Answers of the control before a stage from which its 95th percentile is taken."""
ENOUGH = 100
"""Fewer than these say too little: then it is taken from the stage itself."""

Habits = Mapping[str, tuple[int, float]]
"""(opportunities, reward) of each user before an experiment."""


# ------------------------------------------------------------------------------------------ reading


def get(c: Connection, policy: str, id: int) -> Experiment:
    """One experiment. Raises NotFound."""
    row = c.execute(sa.select(table).where(table.c.policy == policy, table.c.id == id)).first()
    if row is None:
        raise NotFound(f"the policy {policy} has no experiment {id}")
    return _experiment(row)


def list_(c: Connection, policy: str | None = None) -> list[Experiment]:
    """All, or those of one policy, oldest first."""
    query = sa.select(table).order_by(table.c.id)
    if policy is not None:
        query = query.where(table.c.policy == policy)
    return [_experiment(row) for row in c.execute(query)]


def running(c: Connection, policy: str) -> Experiment | None:
    """The one whose arms are served now, running or waiting for a person."""
    states = [state.value for state in OPEN]
    row = c.execute(sa.select(table).where(table.c.policy == policy, table.c.state.in_(states))).first()
    return None if row is None else _experiment(row)


def open_(c: Connection) -> list[Experiment]:
    """All whose arms are served now, of all policies."""
    query = sa.select(table).where(table.c.state.in_([state.value for state in OPEN])).order_by(table.c.id)
    return [_experiment(row) for row in c.execute(query)]


def number(c: Connection, policy: str) -> int:
    """How many experiments the policy has had, whatever became of them."""
    return int(
        c.execute(sa.select(sa.func.count()).select_from(table).where(table.c.policy == policy)).scalar_one()
    )


def decisions(c: Connection, experiment: int) -> list[Decision]:
    """The history of one, oldest first."""
    query = sa.select(history).where(history.c.experiment == experiment).order_by(history.c.seq)
    return [_decision(row) for row in c.execute(query)]


def last(c: Connection, experiment: int) -> Decision:
    """The newest decision about one; there is at least its start."""
    query = sa.select(history).where(history.c.experiment == experiment).order_by(history.c.seq.desc())
    return _decision(c.execute(query.limit(1)).one())


def proposal(c: Connection, experiment: Experiment) -> Decision:
    """What a waiting experiment asks a person to confirm. Raises Conflict where it does not wait."""
    if experiment.state is not ExperimentState.WAITING:
        raise Conflict(
            f"experiment {experiment.id} of {experiment.policy} is {experiment.state}: it proposes nothing "
            "that could be confirmed"
        )
    query = sa.select(history).where(history.c.experiment == experiment.id, history.c.proposed)
    return _decision(c.execute(query.order_by(history.c.seq.desc()).limit(1)).one())


# ------------------------------------------------------------------------------- what its units did


def observations(
    c: Connection, experiment: Experiment, now: float, *, before: Habits | None = None
) -> Mapping[str, Observations]:
    """What each unit of an experiment did in its present stage, by arm (`control`, `treatment`).

    Counted are a unit's requests from its first in the stage for `window_hours`; `ended` says that these are
    over at `now`. Rewards are those of the plan at the experiment's τ; a verdict that is not there (yet) is
    worth 0. An answer is slow that took longer than 95 of 100 of the control's that were shown before the
    stage, and an accepted one reverted when less than half of it is left. `before`: see `habits`; give it to
    look often.

    A unit whose requests are in both arms moved to the treatment as the stage rose, while a gateway had not
    heard of it: what it did before counts in neither.
    """
    units: list[_Unit] = []
    if experiment.begun:
        before = habits(c, experiment) if before is None else before
        units = _units(c, experiment, now)
    treated = [unit for unit in units if unit.arm == TREATMENT]
    moved = {unit.name for unit in treated}
    control = [unit for unit in units if unit.arm == CONTROL and unit.name not in moved]
    return {CONTROL: _observed(control, before or {}), TREATMENT: _observed(treated, before or {})}


def habits(c: Connection, experiment: Experiment) -> Habits:
    """What each user of the policy did before the experiment, for as long as a unit's exposure: what CUPED
    takes out of the comparison.

    Before the experiment and not before its stage: what users do in a later stage's past is an effect of
    the arm that they were in, and taking it out would take out a part of what is to be measured.
    """
    t, until = interactions, experiment.created_at
    reward = _reward(experiment, t, sa.func.length(t.c.completion))
    query = (
        sa.select(t.c.user, sa.func.count(), sa.func.sum(reward))
        .where(
            t.c.policy == experiment.policy,
            t.c.kind.in_(KINDS),
            t.c.at >= until - experiment.plan["window_hours"] * HOUR,
            t.c.at < until,
        )
        .group_by(t.c.user)
    )
    return {row[0]: (row[1], row[2]) for row in c.execute(query) if row[0]}


@dataclass(frozen=True, slots=True)
class _Unit:
    """One unit in one arm: sums over its exposure, in the order of `_sums`."""

    name: str
    arm: str
    ended: bool
    opportunities: int
    reward: float
    shown: int
    accepted: int
    errors: int
    slow: int
    reverted: int
    retained: int
    characters: int
    kept: int


def _units(c: Connection, experiment: Experiment, now: float) -> list[_Unit]:
    window = experiment.plan["window_hours"] * HOUR
    t, u = interactions.alias("t"), interactions.alias("u")
    first = (
        sa.select(u.c.unit, u.c.arm, sa.func.min(u.c.at).label("first"))
        .where(u.c.experiment == experiment.id, u.c.at >= experiment.stage_at)
        .group_by(u.c.unit, u.c.arm)
        .subquery("f")
    )
    # Its sums are read by one seek for each unit: a join would sort all rows again, and take twice as long.
    sums = (
        sa.select(sa.func.json_array(*_sums(experiment, t, _slowest(c, experiment))))
        .where(t.c.experiment == experiment.id, t.c.unit == first.c.unit, t.c.arm == first.c.arm)
        .where(t.c.at >= first.c.first, t.c.at < first.c.first + window)
        .scalar_subquery()
    )
    query = sa.select(first, sums.label("sums"))
    return [
        _Unit(row.unit, row.arm, row.first + window <= now, *json.loads(row.sums)) for row in c.execute(query)
    ]


def _sums(experiment: Experiment, t: sa.FromClause, slowest: float) -> list[sa.ColumnElement[Any]]:
    def many(condition: sa.ColumnElement[bool]) -> sa.ColumnElement[int]:
        return sa.func.count(sa.case((condition, 1)))

    def total(condition: sa.ColumnElement[bool], value: sa.ColumnElement[Any]) -> sa.ColumnElement[int]:
        return sa.func.sum(sa.case((condition, value), else_=0))

    shown = t.c.kind == "shown"
    accepted = t.c.verdict == Verdict.ACCEPTED.value
    reported = accepted & t.c.retained_characters.is_not(None)
    return [
        sa.func.count(),
        sa.func.sum(_reward(experiment, t, t.c.characters)),
        many(shown),
        many(accepted),
        many(t.c.finish == FinishReason.ERROR.value),
        many(t.c.finished_at - t.c.at > slowest),
        many(reported & (2 * t.c.retained_characters < t.c.characters)),
        many(reported),
        total(shown, t.c.characters),
        total(reported, sa.func.min(t.c.retained_characters, t.c.characters)),
    ]


def _observed(units: list[_Unit], before: Habits) -> Observations:
    def column(name: str) -> Any:
        return np.array([getattr(unit, name) for unit in units], dtype=np.float64)

    past = [before.get(unit.name.partition(SEPARATOR)[0], (0, 0.0)) for unit in units]
    return Observations(
        opportunities=column("opportunities"),
        reward=column("reward"),
        shown=column("shown"),
        accepted=column("accepted"),
        errors=column("errors"),
        slow=column("slow"),
        reverted=column("reverted"),
        retained=column("retained"),
        characters=column("characters"),
        before_opportunities=np.array([opportunities for opportunities, _ in past], dtype=np.float64),
        before_reward=np.array([reward for _, reward in past], dtype=np.float64),
        ended=np.array([unit.ended for unit in units], dtype=np.bool_),
        kept=column("kept") if any(unit.retained for unit in units) else np.zeros(0),
    )


def _reward(
    experiment: Experiment, t: sa.FromClause, characters: sa.ColumnElement[Any]
) -> sa.ColumnElement[float]:
    """The reward of one row, as `learning.rewards.RewardTable.parts` has it, at the experiment's τ.

    A function of the user's own is code, and takes no part.
    """
    tau, rewards = experiment.tau, config.Rewards.model_validate(dict(experiment.rewards))
    weights = rewards.weights
    verdict = weights.get("verdict", 1.0)
    accepted = t.c.verdict == Verdict.ACCEPTED.value
    said: sa.ColumnElement[float] = sa.case(
        (accepted, verdict * (1.0 - tau)),
        (t.c.verdict == Verdict.REJECTED.value, -verdict * tau),
        (
            (t.c.verdict == Verdict.TIMEOUT.value) & t.c.verdict_source.in_(sorted(ONLY_TIMEOUTS)),
            -verdict * tau,
        ),
        (t.c.verdict == Verdict.TIMEOUT.value, -verdict * tau * rewards.timeout_weight),
        else_=0.0,
    )
    if rewards.retention_bonus:
        bonus = weights.get("retained", 1.0) * rewards.retention_bonus
        kept = sa.func.min(1.0, 1.0 * t.c.retained_characters / characters)
        told = accepted & t.c.retained_characters.is_not(None) & (characters > 0)
        said = said + sa.case((told, bonus * kept), else_=0.0)
    scored = weights.get("score", 1.0) * t.c.score
    if {"verdict", "score"} <= weights.keys():
        return said + sa.func.coalesce(scored, 0.0)
    return sa.func.coalesce(scored, said)


def _slowest(c: Connection, experiment: Experiment) -> float:
    """Seconds that 95 of 100 of the control's shown answers took at most."""
    t, arm = interactions, experiment.control
    took = (t.c.finished_at - t.c.at).label("took")
    recent = (
        sa.select(took, t.c.version)
        .where(
            t.c.policy == arm.policy,
            t.c.kind == "shown",
            t.c.at < experiment.stage_at,
            t.c.at >= experiment.stage_at - experiment.plan["window_hours"] * HOUR,
        )
        .order_by(t.c.at.desc())
        .limit(RECENT)
        .subquery()
    )
    seconds = c.execute(sa.select(recent.c.took).where(recent.c.version == arm.version)).scalars().all()
    if len(seconds) < ENOUGH:
        own = (t.c.experiment == experiment.id) & (t.c.arm == CONTROL) & (t.c.kind == "shown")
        seconds = c.execute(sa.select(took).where(own, t.c.at >= experiment.stage_at)).scalars().all()
    return float(np.quantile(seconds, 0.95)) if seconds else math.inf


# ------------------------------------------------------------------------------------------ writing


def start(
    c: Connection,
    *,
    policy: str,
    control: Arm,
    treatment: Arm,
    plan: Mapping[str, Any],
    rewards: Mapping[str, Any],
    tau: float,
    alpha: float,
    actor: str,
    now: float,
) -> Experiment:
    """Start one. A candidate of the policy that is the treatment becomes its canary. Nobody is assigned until
    both arms can be served: see `begin`.

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
            raise Conflict(
                f"{arm.name} cannot take part: upstream services are not routed to yet; name a version"
            )
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
            stage_at=math.inf,
            created_at=now,
            actor=actor,
            message="",
            rewards=json.dumps(dict(rewards)),
        )
    )
    assert result.inserted_primary_key is not None
    id = int(result.inserted_primary_key[0])
    reason = f"{treatment.name} against {control.name}"
    record(c, id, Decision(DecisionKind.START, reason, {"tau": tau, "alpha": alpha}, now, actor))
    return get(c, policy, id)


def begin(c: Connection, experiment: Experiment, now: float) -> Experiment:
    """Both arms can be served: the clock of the first stage starts, and requests are assigned.

    Raises Conflict when somebody else moved it meanwhile.
    """
    current = _unchanged(c, experiment)
    if current.begun:
        return current
    _set(c, current.id, stage_at=now)
    reason = f"both arms can be served: {100 * current.share:g} % get {current.treatment.name}"
    record(c, current.id, Decision(DecisionKind.CONTINUE, reason, at=now))
    return get(c, current.policy, current.id)


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
    if current.state is not ExperimentState.WAITING:  # another proposal takes the place of the one before
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
        rewards=json.loads(row.rewards),
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
