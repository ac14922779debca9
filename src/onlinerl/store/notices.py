"""What webhooks are told: the history of versions, experiments and runs as one stream, and how far each
listener has come in it.

The history is written in the transactions that change what it tells of, and is never deleted, so it is the
queue: a restart loses nothing, and a listener that does not answer fills no table.
"""

from __future__ import annotations

import hashlib
import heapq
import json
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection, Row

from onlinerl.records import Arm, Notice
from onlinerl.store.schema import audit, decisions, experiments, run_changes
from onlinerl.store.schema import versions as versions_table
from onlinerl.store.schema import webhooks as table


@dataclass(frozen=True, slots=True)
class Place:
    """How far one listener has been told of one policy: rows of each table up to these are done with."""

    audit: int = 0
    decisions: int = 0
    run_changes: int = 0


@dataclass(frozen=True, slots=True)
class Listener:
    """What is known of telling one listener about one policy. Made by `state`, eaten by people."""

    policy: str
    place: Place
    delivered: int
    dropped: int
    """Events that were given up after too many attempts."""
    failing_at: float | None
    """Since when every attempt failed; None: the last one did not."""
    error: str


def target(url: str) -> str:
    """The name under which a listener is kept: its URL may hold secrets."""
    return hashlib.sha256(url.encode()).hexdigest()[:16]


def enrol(c: Connection, targets: Iterable[str], policies: Iterable[str]) -> None:
    """Know these listeners and no others.

    A new one is told what happens from now on; a known one goes on where it was, and hears a new policy's
    history from its beginning.
    """
    wanted = set(targets)
    c.execute(table.delete().where(table.c.target.not_in(wanted)))
    now = Place(*(_last(c, history) for history in (audit, decisions, run_changes)))
    for name in wanted:
        known = set(c.execute(sa.select(table.c.policy).where(table.c.target == name)).scalars())
        for policy in set(policies) - known:
            place = Place() if known else now
            c.execute(
                table.insert().values(
                    target=name,
                    policy=policy,
                    audit=place.audit,
                    decisions=place.decisions,
                    run_changes=place.run_changes,
                    delivered=0,
                    dropped=0,
                    failing_at=None,
                    error="",
                )
            )


def state(c: Connection, target: str) -> list[Listener]:
    """How it stands with one listener, by policy."""
    rows = c.execute(sa.select(table).where(table.c.target == target).order_by(table.c.policy))
    return [
        Listener(
            policy=row.policy,
            place=Place(row.audit, row.decisions, row.run_changes),
            delivered=row.delivered,
            dropped=row.dropped,
            failing_at=row.failing_at,
            error=row.error,
        )
        for row in rows
    ]


def place(c: Connection, target: str, policy: str) -> Place:
    """How far an enrolled listener has come."""
    row = c.execute(sa.select(table).where(*_is(target, policy))).one()
    return Place(row.audit, row.decisions, row.run_changes)


def after(c: Connection, policy: str, place: Place, limit: int) -> list[tuple[Notice, Place]]:
    """The next notices of a policy beyond `place`, in the order in which they happened, each with the place
    that one has come to by having been told it."""
    sources = (
        [(row.at, 0, row) for row in _changes(c, policy, place.audit, limit)],
        [(row.at, 1, row) for row in _decisions(c, policy, place.decisions, limit)],
        [(row.at, 2, row) for row in _runs(c, policy, place.run_changes, limit)],
    )
    found = []
    for _, kind, row in heapq.merge(*map(_rising, sources), key=lambda item: item[:2]):
        if kind == 0:
            notice, place = _version(row), replace(place, audit=row.seq)
        elif kind == 1:
            notice, place = _experiment(row), replace(place, decisions=row.seq)
        else:
            notice, place = _run(row), replace(place, run_changes=row.seq)
        found.append((notice, place))
        if len(found) == limit:
            break
    return found


def waiting(c: Connection, listener: Listener, kinds: Iterable[str]) -> int:
    """How many notices of these kinds (version, run, experiment) the listener has not been told yet."""
    policy, place = listener.policy, listener.place
    queries = {
        "version": sa.select(sa.func.count()).where(audit.c.policy == policy, audit.c.seq > place.audit),
        "run": sa.select(sa.func.count()).where(
            run_changes.c.policy == policy, run_changes.c.seq > place.run_changes
        ),
        "experiment": sa.select(sa.func.count())
        .select_from(decisions.join(experiments, experiments.c.id == decisions.c.experiment))
        .where(experiments.c.policy == policy, decisions.c.seq > place.decisions),
    }
    return sum(int(c.execute(queries[kind]).scalar_one()) for kind in kinds)


def told(
    c: Connection, target: str, policy: str, place: Place, *, delivered: int = 0, dropped: int = 0
) -> None:
    """The listener has come to `place`: so many of the notices on the way were delivered, or given up."""
    changes: dict[str, Any] = {
        "audit": place.audit,
        "decisions": place.decisions,
        "run_changes": place.run_changes,
        "delivered": table.c.delivered + delivered,
        "dropped": table.c.dropped + dropped,
    }
    if delivered:
        changes |= {"failing_at": None, "error": ""}
    c.execute(table.update().where(*_is(target, policy)).values(**changes))


def failed(c: Connection, target: str, policy: str, error: str, now: float) -> None:
    """An attempt to tell the listener failed."""
    c.execute(
        table.update()
        .where(*_is(target, policy))
        .values(failing_at=sa.func.coalesce(table.c.failing_at, now), error=error[:200])
    )


# ------------------------------------------------------------------------------------------- helpers


def _is(target: str, policy: str) -> tuple[sa.ColumnElement[bool], sa.ColumnElement[bool]]:
    return table.c.target == target, table.c.policy == policy


def _last(c: Connection, history: sa.Table) -> int:
    return int(c.execute(sa.select(sa.func.max(history.c.seq))).scalar() or 0)


def _rising(rows: list[tuple[float, int, Row[Any]]]) -> list[tuple[float, int, Row[Any]]]:
    """With times that never fall: within one table the order is that of its rows, whatever a clock did."""
    latest, rising = 0.0, []
    for at, kind, row in rows:
        latest = max(latest, at)
        rising.append((latest, kind, row))
    return rising


def _changes(c: Connection, policy: str, after: int, limit: int) -> list[Row[Any]]:
    of = (versions_table.c.policy == audit.c.policy) & (versions_table.c.id == audit.c.version)
    query = (
        sa.select(audit, versions_table.c.parent, versions_table.c.run, versions_table.c.digest)
        .select_from(audit.outerjoin(versions_table, of))
        .where(audit.c.policy == policy, audit.c.seq > after)
        .order_by(audit.c.seq)
        .limit(limit)
    )
    return list(c.execute(query))


def _decisions(c: Connection, policy: str, after: int, limit: int) -> list[Row[Any]]:
    query = (
        sa.select(decisions, experiments.c.policy, experiments.c.control, experiments.c.treatment)
        .select_from(decisions.join(experiments, experiments.c.id == decisions.c.experiment))
        .where(experiments.c.policy == policy, decisions.c.seq > after)
        .order_by(decisions.c.seq)
        .limit(limit)
    )
    return list(c.execute(query))


def _runs(c: Connection, policy: str, after: int, limit: int) -> list[Row[Any]]:
    query = (
        sa.select(run_changes)
        .where(run_changes.c.policy == policy, run_changes.c.seq > after)
        .order_by(run_changes.c.seq)
        .limit(limit)
    )
    return list(c.execute(query))


def _version(row: Row[Any]) -> Notice:
    data = {
        "version": row.version,
        "from": row.from_state or None,
        "to": row.to_state,
        "actor": row.actor,
        "reason": row.reason,
        "parent": row.parent,
        "run": row.run,
        "digest": row.digest,
    }
    kind = row.to_state if row.from_state else "registered"
    return Notice(f"version-{row.seq}", f"version.{kind}", row.at, row.policy, data)


def _experiment(row: Row[Any]) -> Notice:
    data = {
        "experiment": row.experiment,
        "control": Arm(**json.loads(row.control)).name,
        "treatment": Arm(**json.loads(row.treatment)).name,
        "stage": row.stage,
        "actor": row.actor,
        "proposed": row.proposed,
        "reason": row.reason,
        "numbers": json.loads(row.numbers),
    }
    return Notice(f"experiment-{row.seq}", f"experiment.{row.kind}", row.at, row.policy, data)


def _run(row: Row[Any]) -> Notice:
    data = {
        "run": row.run,
        "from": row.from_state or None,
        "to": row.to_state,
        "step": row.step,
        "message": row.message,
    }
    kind = "resumed" if row.from_state == row.to_state else row.to_state
    return Notice(f"run-{row.seq}", f"run.{kind}", row.at, row.policy, data)
