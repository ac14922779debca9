"""Versions: their states, who changed them, and what follows from it.

`transition` is the one door: `promote`, `rollback` and `reject` go through it, and every change leaves an
audit row. That at most one version of a policy is live is enforced by the database itself.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection, Row

from onlinerl.errors import Conflict, NotFound
from onlinerl.records import (
    VERSION_TRANSITIONS,
    DecisionKind,
    ExperimentState,
    Version,
    VersionState,
)
from onlinerl.store import interactions
from onlinerl.store.schema import audit, decisions, experiments, policies, runs
from onlinerl.store.schema import versions as table

_OPEN = (VersionState.CANDIDATE, VersionState.CANARY)
_UNFINISHED = ("pending", "running", "paused")
_RUNNING = sa.select(experiments).where(experiments.c.state.in_(("running", "waiting")))
"""Experiments whose arms are served now."""


@dataclass(frozen=True, slots=True)
class Change:
    """One audit row. Made by `transition` and `register`, eaten by people."""

    at: float
    actor: str
    policy: str
    version: int
    before: VersionState | None
    """None: it was registered."""
    after: VersionState
    reason: str


# ------------------------------------------------------------------------------------------ reading


def get(c: Connection, policy: str, id: int) -> Version:
    """One version. Raises NotFound."""
    version = find(c, policy, id)
    if version is None:
        raise NotFound(f"the policy {policy} has no version {id}")
    return version


def find(c: Connection, policy: str, id: int) -> Version | None:
    """One version; None when there is none."""
    row = c.execute(sa.select(table).where(table.c.policy == policy, table.c.id == id)).first()
    return None if row is None else _version(row)


def list_(c: Connection, policy: str | None = None) -> list[Version]:
    """All versions, or those of one policy, by policy and id."""
    query = sa.select(table).order_by(table.c.policy, table.c.id)
    if policy is not None:
        query = query.where(table.c.policy == policy)
    return [_version(row) for row in c.execute(query)]


def live(c: Connection, policy: str) -> Version:
    """The live version. Raises NotFound while there is none."""
    row = _live_row(c, policy)
    if row is None:
        raise NotFound(
            f"the policy {policy} has no live version yet: `onlinerl serve` registers the base model"
        )
    return _version(row)


def previous(c: Connection, policy: str) -> Version | None:
    """The version that a rollback would bring back; None: there is none."""
    row = _live_row(c, policy)
    return None if row is None else _before(c, row)


def mark(c: Connection) -> tuple[int, int, int]:
    """Changes whenever a version is registered, changes state, or is collected, and whenever something is
    decided about an experiment: cheap to ask often."""
    changes = c.execute(sa.select(sa.func.max(audit.c.seq))).scalar()
    collected = c.execute(sa.select(sa.func.count(table.c.collected_at))).scalar()
    decided = c.execute(sa.select(sa.func.max(decisions.c.seq))).scalar()
    return int(changes or 0), int(collected or 0), int(decided or 0)


def history(c: Connection, policy: str, id: int | None = None) -> list[Change]:
    """Who changed what, when and why, oldest first."""
    query = sa.select(audit).where(audit.c.policy == policy).order_by(audit.c.seq)
    if id is not None:
        query = query.where(audit.c.version == id)
    return [
        Change(
            at=row.at,
            actor=row.actor,
            policy=row.policy,
            version=row.version,
            before=VersionState(row.from_state) if row.from_state else None,
            after=VersionState(row.to_state),
            reason=row.reason,
        )
        for row in c.execute(query)
    ]


# ------------------------------------------------------------------------------------------ writing


def next_id(c: Connection, policy: str) -> int:
    """Take the next id, for good: one who dies before `register` leaves a gap, and never a clash.

    The base model is 0 and takes none.
    """
    row = c.execute(sa.select(policies.c.next_version).where(policies.c.policy == policy)).first()
    taken = 1 if row is None else int(row.next_version)
    _reserve(c, policy, taken)
    return taken


def register(c: Connection, version: Version, *, actor: str = "") -> None:
    """Make a version known, whose folder is complete. The same again changes nothing.

    Raises Conflict when the id stands for something else, when another one is live and this one says it
    is, or when its parent or another version of its run was rejected: the samples of a rejected version
    have gone back, and what was learned from them must not return by a later one.
    """
    known = find(c, version.policy, version.id)
    if known is not None:
        if known.digest == version.digest:
            return
        raise Conflict(f"{version.name} exists already and is not the same")
    if version.parent is not None and get(c, version.policy, version.parent).state is VersionState.REJECTED:
        raise Conflict(f"{version.name} descends from version {version.parent}, which was rejected")
    if version.run is not None and _has_rejected(c, version.run):
        raise Conflict(
            f"{version.name} cannot be registered: a version of its run {version.run} was rejected"
        )
    current = _live_row(c, version.policy)
    if version.state is VersionState.LIVE and current is not None:
        raise Conflict(f"{version.name} cannot be registered as live: version {current.id} is")
    _reserve(c, version.policy, version.id)
    now = time.time()
    c.execute(
        table.insert().values(
            policy=version.policy,
            id=version.id,
            state=version.state.value,
            parent=version.parent,
            run=version.run,
            step=version.step,
            created_at=version.created_at,
            url=version.url,
            digest=version.digest,
            metrics=json.dumps(dict(version.metrics)),
            live_at=(version.live_at or now) if version.state is VersionState.LIVE else version.live_at,
        )
    )
    who = actor or ("base model" if version.run is None else f"run {version.run}")
    _note(c, version.policy, version.id, None, version.state, who, "registered")


def transition(c: Connection, policy: str, id: int, to: VersionState, *, actor: str, reason: str) -> Version:
    """Bring a version into another state, with all that follows from it.

    live: the one that was live retires. rejected: the samples that no surviving version learned from go
    back, and the run that made it is told to stop. An experiment that has the version for an arm ends as
    stopped, and so does its canary. Raises NotFound, and Conflict where
    VERSION_TRANSITIONS does not allow the change or the files were collected.
    """
    row = _row(c, policy, id)
    before = VersionState(row.state)
    if to not in VERSION_TRANSITIONS[before]:
        allowed = ", ".join(sorted(VERSION_TRANSITIONS[before])) or "nothing: that is final"
        raise Conflict(
            f"version {id} of {policy} is {before} and cannot become {to} (it can become {allowed})"
        )
    values: dict[str, Any] = {"state": to.value}
    current = _live_row(c, policy) if to is VersionState.LIVE else None
    if to is VersionState.LIVE:
        if row.collected_at is not None:
            raise Conflict(f"version {id} of {policy} cannot go live: its files were collected by gc")
        if current is not None:
            _set(c, policy, current.id, {"state": VersionState.RETIRED.value})
            _note(
                c,
                policy,
                current.id,
                VersionState.LIVE,
                VersionState.RETIRED,
                actor,
                f"version {id} goes live",
            )
            if before is not VersionState.RETIRED:
                values["replaced"] = current.id
        values["live_at"] = time.time()
    _set(c, policy, id, values)
    _note(c, policy, id, before, to, actor, reason)
    if to is VersionState.REJECTED and row.run is not None:
        _stop_run(c, policy, only=row.run)
        release_unlearned(c, row.run)
    _stop_experiments(c, policy, id, to, actor)
    if current is not None:
        _stop_experiments(c, policy, current.id, VersionState.RETIRED, actor)
    return get(c, policy, id)


def promote(c: Connection, policy: str, id: int, *, actor: str, reason: str = "promoted") -> Version:
    """Let a version go live; a running run is told to stop unless it made this version.

    (A run starts from the live version; another one going live takes the ground from under it.)
    """
    version = transition(c, policy, id, VersionState.LIVE, actor=actor, reason=reason)
    _stop_run(c, policy, but=version.run)
    return version


def rollback(
    c: Connection, policy: str, *, to: int | None = None, actor: str, reason: str = "rolled back"
) -> Version:
    """Bring back the version that was live before, or the retired version `to`.

    Candidates and canaries that descend from the one taken back are rejected, and the running run is told
    to stop. Raises Conflict when there is nothing to go back to.
    """
    current = _live_row(c, policy)
    if current is None:
        raise Conflict(f"the policy {policy} has no live version to roll back")
    if to is None:
        target = _before(c, current)
        if target is None:
            raise Conflict(
                f"version {current.id} of {policy} is the first that was live: nothing to go back to"
            )
        to = target.id
    elif get(c, policy, to).state is not VersionState.RETIRED:
        raise Conflict(f"version {to} of {policy} was not live before: a rollback goes to a retired version")
    _stop_run(c, policy)
    version = transition(c, policy, to, VersionState.LIVE, actor=actor, reason=reason)
    for other in list_(c, policy):
        if other.state in _OPEN and current.id in _ancestors(c, other):
            reject(c, policy, other.id, actor=actor, reason=f"descends from version {current.id}, {reason}")
    return version


def reject(c: Connection, policy: str, id: int, *, actor: str, reason: str) -> Version:
    """Reject a candidate or canary; see `transition`."""
    return transition(c, policy, id, VersionState.REJECTED, actor=actor, reason=reason)


def release_unlearned(c: Connection, run: int) -> int:
    """Give back what the run claimed and no surviving version of it learned from; returns how many.

    A version says by its `step` how many batches went into it. Where one does not say, nothing is given
    back: a sample used twice is worse than one not used.
    """
    rows = c.execute(sa.select(table.c.step, table.c.state).where(table.c.run == run)).all()
    surviving = [row.step for row in rows if row.state != VersionState.REJECTED.value]
    if any(step == 0 for step in surviving):
        return 0
    return interactions.release(c, run=run, after_batch=max(surviving, default=0))


# ------------------------------------------------------------------------------------------- keeping


def keep(c: Connection, policy: str) -> set[int]:
    """Ids of the versions whose files gc must not touch.

    The first version (the hold-out), the live one, the one before it, the one that was live last (after a
    rollback one may want to look again), candidates and canaries, the arms of experiments that run, and the
    parent and the versions of an unfinished run.
    """
    kept = {0}
    lived: list[tuple[float, int]] = []
    for row in c.execute(sa.select(table).where(table.c.policy == policy)):
        if VersionState(row.state) in (*_OPEN, VersionState.LIVE):
            kept.add(row.id)
        elif row.live_at is not None and row.collected_at is None:
            lived.append((row.live_at, row.id))
    if lived:
        kept.add(max(lived)[1])
    before = previous(c, policy)
    if before is not None:
        kept.add(before.id)
    for row in c.execute(_RUNNING):
        for arm in (json.loads(row.control), json.loads(row.treatment)):
            if arm["policy"] == policy and arm["version"] is not None:
                kept.add(arm["version"])
    active = c.execute(
        sa.select(runs.c.id, runs.c.parent).where(runs.c.policy == policy, runs.c.state.in_(_UNFINISHED))
    ).first()
    if active is not None:
        kept.add(active.parent)
        mine = sa.select(table.c.id).where(table.c.policy == policy, table.c.run == active.id)
        kept.update(c.execute(mine).scalars())
    return kept


def collect(c: Connection, policy: str) -> tuple[set[int], set[int]]:
    """Decide what gc takes: (what it must keep, what it may remove at once).

    The latter are marked in the same transaction, so that none of them can go live while their files go.
    Hand both to `weights.directory.gc`.
    """
    kept = keep(c, policy)
    everything = set(c.execute(sa.select(table.c.id).where(table.c.policy == policy)).scalars())
    gone = everything - kept
    for id in gone:
        _set(c, policy, id, {"collected_at": sa.func.coalesce(table.c.collected_at, time.time())})
    return kept, gone


# ------------------------------------------------------------------------------------------- helpers


def _row(c: Connection, policy: str, id: int) -> Row[Any]:
    row: Row[Any] | None = c.execute(
        sa.select(table).where(table.c.policy == policy, table.c.id == id)
    ).first()
    if row is None:
        raise NotFound(f"the policy {policy} has no version {id}")
    return row


def _live_row(c: Connection, policy: str) -> Row[Any] | None:
    row: Row[Any] | None = c.execute(
        sa.select(table).where(table.c.policy == policy, table.c.state == VersionState.LIVE.value)
    ).first()
    return row


def _before(c: Connection, row: Row[Any]) -> Version | None:
    """The version that was live before `row`, the nearest whose files are still there."""
    seen: set[int] = set()
    id = row.replaced
    while id is not None and id not in seen:
        seen.add(id)
        earlier = _row(c, row.policy, id)
        if earlier.state == VersionState.RETIRED.value and earlier.collected_at is None:
            return _version(earlier)
        id = earlier.replaced
    return None


def _has_rejected(c: Connection, run: int) -> bool:
    rejected = (table.c.run == run) & (table.c.state == VersionState.REJECTED.value)
    return c.execute(sa.select(table.c.id).where(rejected)).first() is not None


def _ancestors(c: Connection, version: Version) -> set[int]:
    found: set[int] = set()
    parent = version.parent
    while parent is not None and parent not in found:
        found.add(parent)
        row = find(c, version.policy, parent)
        parent = None if row is None else row.parent
    return found


def _reserve(c: Connection, policy: str, id: int) -> None:
    """Never give out ids up to `id` (again)."""
    updated = c.execute(
        policies.update()
        .where(policies.c.policy == policy)
        .values(next_version=sa.case((policies.c.next_version > id, policies.c.next_version), else_=id + 1))
    )
    if updated.rowcount == 0:
        c.execute(policies.insert().values(policy=policy, next_version=id + 1))


def _stop_run(c: Connection, policy: str, *, only: int | None = None, but: int | None = None) -> None:
    where = (runs.c.policy == policy) & runs.c.state.in_(_UNFINISHED)
    if only is not None:
        where &= runs.c.id == only
    if but is not None:
        where &= runs.c.id != but
    c.execute(runs.update().where(where).values(wish="stop"))


def _stop_experiments(c: Connection, policy: str, id: int, to: VersionState, actor: str) -> None:
    """End the experiments that a change of this version takes the ground from.

    Those of the policy itself, since what they compare is what is live and what might be; those of other
    policies only where it was rejected: they go on with the same weights otherwise.
    """
    for row in c.execute(_RUNNING).all():
        arms = [json.loads(row.control), json.loads(row.treatment)]
        ours = any(arm["policy"] == policy and arm["version"] == id for arm in arms)
        if not ours or (row.policy != policy and to is not VersionState.REJECTED):
            continue
        now = time.time()
        reason = f"{policy}@{id}, one of its arms, became {to}"
        ended = {"state": ExperimentState.STOPPED.value, "ended_at": now, "message": reason}
        c.execute(experiments.update().where(experiments.c.id == row.id).values(ended))
        c.execute(
            decisions.insert().values(
                experiment=row.id,
                at=now,
                stage=row.stage,
                kind=DecisionKind.STOP.value,
                actor=actor,
                proposed=False,
                reason=reason,
                numbers="{}",
            )
        )
        treatment = arms[1]
        if treatment["policy"] == row.policy and treatment["version"] is not None:
            left = get(c, row.policy, treatment["version"])
            if left.state is VersionState.CANARY:
                why = f"experiment {row.id} was stopped: {reason}"
                reject(c, row.policy, left.id, actor=actor, reason=why)


def _set(c: Connection, policy: str, id: int, values: dict[str, Any]) -> None:
    c.execute(table.update().where(table.c.policy == policy, table.c.id == id).values(**values))


def _note(
    c: Connection,
    policy: str,
    id: int,
    before: VersionState | None,
    after: VersionState,
    actor: str,
    reason: str,
) -> None:
    c.execute(
        audit.insert().values(
            at=time.time(),
            actor=actor,
            policy=policy,
            version=id,
            from_state="" if before is None else before.value,
            to_state=after.value,
            reason=reason,
        )
    )


def _version(row: Row[Any]) -> Version:
    return Version(
        policy=row.policy,
        id=row.id,
        state=VersionState(row.state),
        parent=row.parent,
        run=row.run,
        created_at=row.created_at,
        url=row.url,
        digest=row.digest,
        metrics=json.loads(row.metrics),
        live_at=row.live_at,
        step=row.step,
        collected_at=row.collected_at,
    )
