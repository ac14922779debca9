"""Rows for the store's tests."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from sqlalchemy.engine import Connection

from onlinerl.records import (
    Event,
    Feedback,
    FeedbackStatus,
    FinishReason,
    Interaction,
    Sample,
    Version,
    VersionState,
)
from onlinerl.store import feedback, interactions, versions
from onlinerl.store.database import Database

DAY = 86_400.0


def url(folder: Path) -> str:
    return f"sqlite:///{folder / 'onlinerl.db'}"


@contextmanager
def opened(folder: Path) -> Iterator[Database]:
    database = Database.open(url(folder))
    try:
        yield database
    finally:
        database.close()


@contextmanager
def undone(database: Database) -> Iterator[Connection]:
    """A transaction that is rolled back, so that the next one finds the database as it was."""
    with suppress(InterruptedError), database.write() as connection:
        yield connection
        raise InterruptedError


def shown(id: str, **changes: Any) -> Interaction:
    return replace(Interaction.example(), id=id, **changes)


def silent(id: str, **changes: Any) -> Interaction:
    return replace(
        Interaction.example(),
        id=id,
        completion="",
        completion_ids=(8183,),
        behavior_logprobs=(-0.9,),
        offsets=(0,),
        finish=FinishReason.STOP,
        **changes,
    )


def event(id: str | None, kind: Event, *, at: float = 1010.0, **changes: Any) -> Feedback:
    return Feedback(source="native", event=kind, at=at, project="default", id=id, **changes)


def tell(c: Connection, id: str, kind: Event, *, at: float = 1010.0, **changes: Any) -> FeedbackStatus:
    return feedback.record(c, event(id, kind, at=at, **changes), None, deadline=DAY)


def claim(c: Connection, **changes: Any) -> list[Sample]:
    arguments: dict[str, Any] = {
        "policy": "tab",
        "run": 1,
        "batch": 1,
        "limit": 32,
        "now": 2000.0,
        "rest": 30.0,
        "min_version": 0,
        "temperature_floor": 0.3,
        "holdout": 0.0,
    }
    return interactions.claim(c, **(arguments | changes))


def version(id: int, state: VersionState = VersionState.CANDIDATE, **changes: Any) -> Version:
    fields: dict[str, Any] = {
        "policy": "tab",
        "id": id,
        "state": state,
        "parent": id - 1 if id else None,
        "run": None,
        "created_at": 1000.0 + id,
        "url": f"/weights/tab/{id:06d}",
        "digest": f"{id:064x}",
    }
    return Version(**(fields | changes))


def base(c: Connection) -> None:
    """Version 0, live."""
    versions.register(c, version(0, VersionState.LIVE))
