"""What pages for people show: counts over time, the newest interactions, histories thinned to what a screen
can draw. Reads only, and of a busy day's rows only what an index holds."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import sqlalchemy as sa
from sqlalchemy.engine import Connection, Row

from onlinerl.records import (
    Decision,
    DecisionKind,
    FeedbackStatus,
    Run,
    Step,
    Verdict,
    VersionState,
)
from onlinerl.store.database import Database
from onlinerl.store.runs import get as get_run
from onlinerl.store.schema import audit, experiments, feedback, interactions, runs, steps
from onlinerl.store.schema import decisions as history
from onlinerl.worth import ONLY_TIMEOUTS

KINDS = ("shown", "silent", "nothing")
"""All of them: named, so that one index serves a policy's whole traffic in the order of time."""
DRAWN = 400
"""Most points of a curve; a screen is not much wider."""
_CHUNK = 500
"""Rows that an export reads in one transaction."""


@dataclass(frozen=True, slots=True)
class Slice:
    """What one version served in one stretch of time, and what was said of it. Made by `traffic`."""

    start: float
    version: int
    opportunities: int
    shown: int
    silent: int
    accepted: int
    rejected: int
    timeout: int
    mute: int
    """Those timeouts of clients that can report nothing else."""


@dataclass(frozen=True, slots=True)
class Change:
    """A version went live. Made by `changes`."""

    at: float
    version: int
    actor: str
    reason: str
    back: bool
    """It had been live before: somebody took its successor back."""


@dataclass(frozen=True, slots=True)
class Served:
    """An interaction as pages show it. Made by `newest` and `export`."""

    seq: int
    id: str
    index: int
    at: float
    finished_at: float
    version: int
    arm: str
    experiment: int | None
    project: str
    user: str
    language: str
    finish: str
    kind: str
    verdict: str | None
    verdict_source: str
    verdict_at: float | None
    score: float | None
    use: str
    dropped: str
    untrainable: str
    run: int | None
    reward: float | None
    """What a run trained with; None: none did."""
    displayed: int | None
    prompt: str
    completion: str
    offsets: tuple[int, ...]
    logprobs: tuple[float, ...]


# ---------------------------------------------------------------------------------------- over time


def traffic(c: Connection, *, policy: str, since: float, until: float, width: float) -> list[Slice]:
    """What each version served from `since` to `until`, in slices of `width` seconds from `since` on.

    A verdict counts where its request was asked for. By time, then version; empty slices are left out.
    """
    t = interactions.c
    place = sa.cast((t.at - since) / width, sa.Integer)  # at >= since: cutting and flooring are the same
    shown, timeout = t.kind == "shown", t.verdict == Verdict.TIMEOUT.value
    mute = t.verdict_source.in_(sorted(ONLY_TIMEOUTS))

    def count(*where: sa.ColumnElement[bool]) -> sa.ColumnElement[int]:
        return sa.func.coalesce(sa.func.sum(sa.case((sa.and_(*where), 1), else_=0)), 0)

    query = (
        sa.select(
            place.label("place"),
            t.version,
            sa.func.count(),
            count(shown),
            count(t.kind == "silent"),
            count(shown, t.verdict == Verdict.ACCEPTED.value),
            count(shown, t.verdict == Verdict.REJECTED.value),
            count(shown, timeout),
            count(shown, timeout, mute),
        )
        .where(t.policy == policy, t.kind.in_(KINDS), t.at >= since, t.at < until)
        .group_by(place, t.version)
        .order_by(place, t.version)
    )
    return [Slice(since + row[0] * width, *row[1:]) for row in c.execute(query)]


def changes(c: Connection, *, policy: str, since: float, limit: int = 100) -> list[Change]:
    """Versions that went live at or after `since`, the newest `limit`, oldest first."""
    query = (
        sa.select(audit)
        .where(audit.c.policy == policy, audit.c.at >= since, audit.c.to_state == VersionState.LIVE.value)
        .order_by(audit.c.seq.desc())
        .limit(limit)
    )
    found = [
        Change(row.at, row.version, row.actor, row.reason, row.from_state == VersionState.RETIRED.value)
        for row in c.execute(query)
    ]
    return found[::-1]


def statuses(c: Connection, *, since: float) -> dict[FeedbackStatus, int]:
    """What became of the feedback, of all policies, that came at or after `since`."""
    query = (
        sa.select(feedback.c.status, sa.func.count())
        .where(feedback.c.at >= since)
        .group_by(feedback.c.status)
    )
    counts = {FeedbackStatus(status): int(number) for status, number in c.execute(query)}
    return {status: counts.get(status, 0) for status in FeedbackStatus}


# --------------------------------------------------------------------------------------- histories


def readings(c: Connection, experiment: int, limit: int = DRAWN) -> list[Decision]:
    """An experiment's history, oldest first: all that changed something, and of the looks between them an
    even choice of at most `limit`, the last one among them."""
    looks = history.c.kind == DecisionKind.CONTINUE.value
    total = c.execute(
        sa.select(sa.func.count()).select_from(history).where(history.c.experiment == experiment, looks)
    ).scalar_one()
    back = sa.func.row_number().over(partition_by=looks, order_by=history.c.seq.desc()).label("back")
    numbered = sa.select(history, back).where(history.c.experiment == experiment).subquery()
    stride = max(1, -(-total // limit))
    query = (
        sa.select(numbered)
        .where(
            sa.or_(
                numbered.c.kind != DecisionKind.CONTINUE.value,
                (numbered.c.back - 1) % stride == 0,
            )
        )
        .order_by(numbered.c.seq)
    )
    return [_decision(row) for row in c.execute(query)]


def last_reading(c: Connection, experiment: int) -> Decision | None:
    """The newest row of an experiment's history that has an interval; None: there is none among its last."""
    query = (
        sa.select(history).where(history.c.experiment == experiment).order_by(history.c.seq.desc()).limit(50)
    )
    for row in c.execute(query):
        decision = _decision(row)
        if {"estimate", "low", "high"} <= decision.numbers.keys():
            return decision
    return None


def recent_runs(c: Connection, *, policy: str, limit: int) -> list[Run]:
    """The newest runs of a policy, newest first."""
    ids = c.execute(
        sa.select(runs.c.id).where(runs.c.policy == policy).order_by(runs.c.id.desc()).limit(limit)
    ).scalars()
    return [get_run(c, policy, id) for id in ids.all()]


def recent_experiments(c: Connection, *, policy: str, limit: int) -> list[int]:
    """Ids of the newest experiments of a policy, newest first."""
    query = sa.select(experiments.c.id).where(experiments.c.policy == policy)
    return list(c.execute(query.order_by(experiments.c.id.desc()).limit(limit)).scalars())


def progress(c: Connection, run: int, limit: int = DRAWN) -> list[Step]:
    """What the batches of a run measured: evenly chosen, about `limit`, the first and last among them."""
    last = c.execute(sa.select(sa.func.max(steps.c.batch)).where(steps.c.run == run)).scalar()
    stride = max(1, -(-int(last or 0) // limit))
    query = (
        sa.select(steps)
        .where(
            steps.c.run == run,
            sa.or_((steps.c.batch - 1) % stride == 0, steps.c.batch == last),
        )
        .order_by(steps.c.batch)
    )
    return [Step(row.run, row.batch, row.at, json.loads(row.numbers)) for row in c.execute(query)]


# ------------------------------------------------------------------------------------ interactions


def newest(
    c: Connection, *, policy: str, limit: int, verdict: str | None = None, before: float = math.inf
) -> list[Served]:
    """The newest interactions of a policy, newest first.

    verdict: only those with it; `waiting` are shown ones without. before: only those asked for before.
    """
    t = interactions.c
    where = [t.policy == policy]
    kinds: Sequence[str] = KINDS
    if verdict == "waiting":
        where.append(t.verdict.is_(None))
        kinds = ("shown",)
    elif verdict is not None:
        where.append(t.verdict == verdict)
        kinds = ("silent",) if verdict == Verdict.SILENT.value else ("shown",)
    if math.isfinite(before):
        where.append(t.at < before)
    # One walk down the index for each kind; the rows of the newest alone are read.
    walks = [
        sa.select(t.seq, t.at).where(*where, t.kind == kind).order_by(t.at.desc()).limit(limit).subquery()
        for kind in kinds
    ]
    both = sa.union_all(*(sa.select(walk.c.seq, walk.c.at) for walk in walks)).subquery()
    chosen = sa.select(both.c.seq).order_by(both.c.at.desc(), both.c.seq.desc()).limit(limit)
    rows = c.execute(sa.select(interactions).where(t.seq.in_(chosen)).order_by(t.at.desc(), t.seq.desc()))
    return [_served(row) for row in rows]


def export(database: Database, *, policy: str, since: float, until: float) -> Iterator[Served]:
    """All interactions of a policy asked for from `since` to `until`, in the order in which they were
    written, read in chunks so that neither memory nor the write-ahead log grows with their number."""
    t = interactions.c
    with database.read() as c:
        bounds = [
            c.execute(
                sa.select(sa.func.min(t.seq), sa.func.max(t.seq)).where(
                    t.policy == policy, t.kind == kind, t.at >= since, t.at < until
                )
            ).one()
            for kind in KINDS
        ]
    firsts = [low for low, _ in bounds if low is not None]
    after, last = (
        min(firsts, default=0) - 1,
        max((high for _, high in bounds if high is not None), default=-1),
    )
    while after < last:
        query = sa.select(interactions).where(t.seq > after, t.seq <= last).order_by(t.seq).limit(_CHUNK)
        with database.read() as c:
            rows = c.execute(query).all()
        if not rows:
            return
        for row in rows:
            if row.policy == policy and since <= row.at < until:
                yield _served(row)
        after = rows[-1].seq


def _served(row: Row[Any]) -> Served:
    return Served(
        seq=row.seq,
        id=row.id,
        index=row._mapping["index"],
        at=row.at,
        finished_at=row.finished_at,
        version=row.version,
        arm=row.arm,
        experiment=row.experiment,
        project=row.project,
        user=row.user,
        language=row.language,
        finish=row.finish,
        kind=row.kind,
        verdict=row.verdict,
        verdict_source=row.verdict_source,
        verdict_at=row.verdict_at,
        score=row.score,
        use=row.use,
        dropped=row.dropped,
        untrainable=row.untrainable,
        run=row.run,
        reward=row.reward,
        displayed=row.displayed,
        prompt=row.prompt,
        completion=row.completion,
        offsets=tuple(np.frombuffer(row.offsets, dtype="<i4").tolist()),
        logprobs=tuple(np.frombuffer(row.behavior_logprobs, dtype="<f4").tolist()),
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
