"""Feedback: every piece is kept, joined where it can be, and told what became of it.

A verdict replaces a weaker one (`records.VERDICT_STRENGTH`), so that the order in which a client's events
arrive does not matter: an accept beats the timeout that was reported before it, or after it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection, Row

from onlinerl.records import EVENT_VERDICTS, VERDICT_STRENGTH, Event, Feedback, FeedbackStatus, Verdict
from onlinerl.store import tallies
from onlinerl.store.schema import feedback as table
from onlinerl.store.schema import interactions

# Statements on the path of every request are built once: building one costs as much as running it.
_INSERT = table.insert()
_TARGET = sa.select(
    *[
        interactions.c[name]
        for name in (
            "seq", "policy", "version", "at", "completion", "untrainable", "displayed", "verdict",
            "retained_characters", "shown_at", "use",
        )
    ]
).where(
    interactions.c.id == sa.bindparam("of_id"),
    interactions.c.index == sa.bindparam("of_index"),
    interactions.c.project == sa.bindparam("of_project"),
)  # fmt: skip
_WAITING = (
    sa.select(table)
    .where(
        table.c.id == sa.bindparam("of_id"),
        table.c.index == sa.bindparam("of_index"),
        table.c.status == FeedbackStatus.UNMATCHED.value,
    )
    .order_by(table.c.seq)
)
_SUPERSEDE = (
    table.update()
    .where(
        table.c.interaction == sa.bindparam("of_seq"),
        table.c.status == FeedbackStatus.MATCHED.value,
        table.c.event.in_([event.value for event in EVENT_VERDICTS]),
    )
    .values(status=FeedbackStatus.SUPERSEDED.value)
)
_SAID = (
    sa.select(table.c.seq)
    .where(table.c.interaction == sa.bindparam("of_seq"), table.c.event == sa.bindparam("of_event"))
    .limit(1)
)


@cache
def _change(names: tuple[str, ...]) -> sa.Update:
    """The statement that sets these columns of one interaction."""
    new: dict[str, Any] = {name: sa.bindparam(f"new_{name}") for name in names}
    return interactions.update().where(interactions.c.seq == sa.bindparam("of_seq")).values(new)


@dataclass(frozen=True, slots=True)
class _Report:
    """What of a piece of feedback changes an interaction."""

    event: Event
    source: str
    at: float
    project: str
    displayed_text: str | None
    retained_characters: int | None
    score: float | None
    deadline: float


def record(
    c: Connection, feedback: Feedback, match: tuple[str, int] | None, *, deadline: float
) -> FeedbackStatus:
    """Keep a piece of feedback and let it act on the interaction it belongs to, in one transaction.

    `match` is the (id, index) that was found for it; None: the one that it names itself, if any. Either may
    be written later (`rejoin`). `deadline` is in seconds after the request. An interaction of another
    project is not found: names of interactions are no secret, and no right.
    """
    named = match
    if named is None and feedback.id is not None:
        named = (feedback.id, feedback.index)
    report = _Report(
        event=feedback.event,
        source=feedback.source,
        at=feedback.at,
        project=feedback.project,
        displayed_text=feedback.displayed_text,
        retained_characters=feedback.retained_characters,
        score=feedback.score,
        deadline=deadline,
    )
    target = None if named is None else _target(c, *named, feedback.project)
    status = FeedbackStatus.UNMATCHED if target is None else _apply(c, target, report)
    c.execute(
        _INSERT,
        {
            "at": feedback.at,
            "source": feedback.source,
            "event": feedback.event.value,
            "status": status.value,
            "project": feedback.project,
            "user": feedback.user,
            "id": None if named is None else named[0],
            "index": feedback.index if named is None else named[1],
            "interaction": None if target is None else target.seq,
            "deadline": deadline,
            "displayed_text": feedback.displayed_text,
            "accepted_text": feedback.accepted_text,
            "retained_characters": feedback.retained_characters,
            "score": feedback.score,
            "client_id": feedback.client_id,
            "cached": feedback.cached,
            "payload": json.dumps(dict(feedback.payload), default=str),
        },
    )
    return status


def rejoin(c: Connection, id: str, index: int) -> int:
    """Let the feedback that named an interaction before it was written act on it; returns how many."""
    waiting = c.execute(_WAITING, {"of_id": id, "of_index": index}).all()
    joined = 0
    for row in waiting:
        target = _target(c, id, index, row.project)
        if target is None:
            continue
        report = _Report(
            event=Event(row.event),
            source=row.source,
            at=row.at,
            project=row.project,
            displayed_text=row.displayed_text,
            retained_characters=row.retained_characters,
            score=row.score,
            deadline=row.deadline,
        )
        status = _apply(c, target, report)
        c.execute(
            table.update().where(table.c.seq == row.seq).values(status=status.value, interaction=target.seq)
        )
        joined += 1
    return joined


def matched_before(c: Connection, *, project: str, client_id: str) -> tuple[str, int] | None:
    """The interaction that earlier feedback with the client's own id was joined to; None: there is none.

    Ties a late accept to its timeout where the text alone would be ambiguous.
    """
    row = c.execute(
        sa.select(table.c.id, table.c.index)
        .where(table.c.project == project, table.c.client_id == client_id, table.c.interaction.is_not(None))
        .order_by(table.c.seq.desc())
        .limit(1)
    ).first()
    return None if row is None else (row[0], row[1])


def statuses(c: Connection, *, project: str | None = None) -> dict[FeedbackStatus, int]:
    """How many pieces of feedback stand in each status."""
    query = sa.select(table.c.status, sa.func.count()).group_by(table.c.status)
    if project is not None:
        query = query.where(table.c.project == project)
    return {FeedbackStatus(status): number for status, number in c.execute(query)}


def displayed_characters(completion: str, displayed_text: str | None) -> int | None:
    """How much of `completion` the displayed text shows, in characters; None: it is not its beginning.

    Continue strips a leading space before it displays; that space counts as displayed.
    """
    if not displayed_text:
        return None
    if completion.startswith(displayed_text):
        return len(displayed_text)
    spaces = len(completion) - len(completion.lstrip(" "))
    if completion[spaces:].startswith(displayed_text):
        return spaces + len(displayed_text)
    return None


def _target(c: Connection, id: str, index: int, project: str) -> Row[Any] | None:
    where = {"of_id": id, "of_index": index, "of_project": project}
    row: Row[Any] | None = c.execute(_TARGET, where).first()
    return row


def _apply(c: Connection, target: Row[Any], report: _Report) -> FeedbackStatus:
    """Change the interaction as the report says; returns what became of the report."""
    if report.at > target.at + report.deadline:
        return FeedbackStatus.LATE
    verdict = EVENT_VERDICTS.get(report.event)
    if verdict is None:
        status, changes = _without_verdict(target, report)
    else:
        status, changes = _with_verdict(c, target, report, verdict)
    # What was claimed is learned from as it was: later reports are kept in their own rows alone.
    if target.use == "claimed" or status is FeedbackStatus.SUPERSEDED:
        changes = {}
    elif status is not FeedbackStatus.LATE:
        changes |= _details(target, report)
    if changes:
        new = {f"new_{name}": value for name, value in changes.items()}
        c.execute(_change(tuple(sorted(changes))), {"of_seq": target.seq, **new})
    return status


def _without_verdict(target: Row[Any], report: _Report) -> tuple[FeedbackStatus, dict[str, Any]]:
    if report.event is Event.SHOWN:
        if target.shown_at is not None:
            return FeedbackStatus.DUPLICATE, {}
        return FeedbackStatus.MATCHED if target.use != "claimed" else FeedbackStatus.LATE, {
            "shown_at": report.at
        }
    if report.retained_characters == target.retained_characters:
        return FeedbackStatus.DUPLICATE, {}
    return FeedbackStatus.MATCHED if target.use != "claimed" else FeedbackStatus.LATE, {}


def _with_verdict(
    c: Connection, target: Row[Any], report: _Report, verdict: Verdict
) -> tuple[FeedbackStatus, dict[str, Any]]:
    current = None if target.verdict is None else Verdict(target.verdict)
    if verdict is current:
        return FeedbackStatus.DUPLICATE, {}
    if current is Verdict.SILENT:
        said = c.execute(_SAID, {"of_seq": target.seq, "of_event": report.event.value}).first()
        return FeedbackStatus.MATCHED if said is None else FeedbackStatus.DUPLICATE, {}
    if current is not None and VERDICT_STRENGTH[verdict] < VERDICT_STRENGTH[current]:
        return FeedbackStatus.SUPERSEDED, {}
    if target.use == "claimed":
        return FeedbackStatus.LATE, {}
    moved = {verdict.value: 1}
    if current is not None:
        c.execute(_SUPERSEDE, {"of_seq": target.seq})
        moved[current.value] = -1
    tallies.add(c, target.policy, target.version, **moved)
    changes: dict[str, Any] = {
        "verdict": verdict.value,
        "verdict_source": report.source,
        "verdict_at": report.at,
    }
    if target.use == "open" and not target.untrainable:
        changes["use"] = "labelled"
    return FeedbackStatus.MATCHED, changes


def _details(target: Row[Any], report: _Report) -> dict[str, Any]:
    """What a report says beside its verdict."""
    changes: dict[str, Any] = {}
    if report.score is not None:
        changes["score"] = report.score
    if report.retained_characters is not None:
        changes["retained_characters"] = report.retained_characters
    displayed = displayed_characters(target.completion, report.displayed_text)
    # What was displayed once was displayed: of several reports the longest counts, in whatever order.
    if displayed is not None and (target.displayed is None or displayed > target.displayed):
        changes["displayed"] = displayed
    return changes
