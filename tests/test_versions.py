"""Versions: states, promotion, rollback, rejection, what gc may take."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest
import sqlalchemy as sa
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sqlalchemy.engine import Connection
from sqlalchemy.exc import IntegrityError

from onlinerl.errors import Conflict, NotFound
from onlinerl.records import VERSION_TRANSITIONS, Event, Run, RunState, VersionState
from onlinerl.store import interactions, runs, versions
from onlinerl.store.database import Database
from onlinerl.store.schema import versions as table
from tests.store_helpers import base, claim, opened, shown, tell, undone, version

V = VersionState


@pytest.fixture
def database(tmp_path: Path) -> Iterator[Database]:
    with opened(tmp_path) as database:
        yield database


@pytest.fixture
def c(database: Database) -> Iterator[Connection]:
    with database.write() as connection:
        base(connection)
        yield connection


def states(c: Connection) -> list[str]:
    return [one.state.value for one in versions.list_(c, "tab")]


def running(c: Connection) -> Run:
    return runs.start(c, policy="tab", host="elsewhere", pid=1, settings="{}", tau_of=lambda c: 0.1, now=1e9)[
        0
    ]


def batches(c: Connection, run: int, number: int) -> None:
    """Claim one sample for each of so many batches."""
    for batch in range(1, number + 1):
        name = f"r{run}b{batch}"
        interactions.insert(c, [shown(name)])
        tell(c, name, Event.ACCEPTED)
        assert len(claim(c, run=run, batch=batch)) == 1


def test_ids_are_given_out_once(c: Connection) -> None:
    assert [versions.next_id(c, "tab") for _ in range(3)] == [1, 2, 3]
    assert versions.next_id(c, "other") == 1
    versions.register(c, version(7, parent=0))
    assert versions.next_id(c, "tab") == 8


def test_registering_again_changes_nothing_and_another_one_is_refused(c: Connection) -> None:
    versions.register(c, version(0, V.LIVE))
    with pytest.raises(Conflict, match="not the same"):
        versions.register(c, version(0, V.LIVE, digest="f" * 64))
    with pytest.raises(Conflict, match="version 0 is"):
        versions.register(c, version(1, V.LIVE))
    with pytest.raises(NotFound):
        versions.register(c, version(9, parent=8))
    assert states(c) == ["live"]
    assert versions.get(c, "tab", 0).live_at is not None


def test_what_is_registered_comes_back(c: Connection) -> None:
    one = version(1, run=None, metrics={"reward": 0.5}, step=8)
    versions.register(c, one)
    assert versions.get(c, "tab", 1) == one
    assert versions.find(c, "tab", 2) is None
    with pytest.raises(NotFound):
        versions.get(c, "tab", 2)
    with pytest.raises(NotFound, match="no live version yet"):
        versions.live(c, "other")


@pytest.mark.parametrize(("start", "to"), list(itertools.product(V, V)))
def test_exactly_the_transitions_of_the_table(c: Connection, start: V, to: V) -> None:
    id = 0 if start is V.LIVE else 1
    versions.register(c, version(1))
    path = {
        V.LIVE: [], V.CANDIDATE: [], V.CANARY: [(1, V.CANARY)], V.REJECTED: [(1, V.REJECTED)],
        V.RETIRED: [(1, V.LIVE), (0, V.LIVE)],
    }[start]  # fmt: skip
    for step, state in path:
        versions.transition(c, "tab", step, state, actor="t", reason="")
    before = versions.history(c, "tab")
    assert versions.get(c, "tab", id).state is start
    if to in VERSION_TRANSITIONS[start]:
        assert versions.transition(c, "tab", id, to, actor="me", reason="why").state is to
        last = versions.history(c, "tab", id)[-1]
        assert (last.actor, last.reason, last.before, last.after) == ("me", "why", start, to)
    else:
        with pytest.raises(Conflict, match=f"is {start} and cannot become {to}"):
            versions.transition(c, "tab", id, to, actor="me", reason="why")
        assert versions.history(c, "tab") == before


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(moves=st.lists(st.tuples(st.integers(0, 4), st.sampled_from(V)), max_size=12))
def test_one_version_is_live_whatever_is_tried(database: Database, moves: list[tuple[int, V]]) -> None:
    with undone(database) as c:
        base(c)
        for id in range(1, 5):
            versions.register(c, version(id, parent=0))
        for id, to in moves:
            try:
                versions.transition(c, "tab", id, to, actor="t", reason="")
            except Conflict:
                continue
        assert states(c).count("live") <= 1
        # none only if somebody retired it by hand
        assert states(c).count("live") == 1 or any(to is V.RETIRED for _, to in moves)


def test_the_database_itself_refuses_a_second_live_version(c: Connection) -> None:
    versions.register(c, version(1))
    with pytest.raises(IntegrityError):
        c.execute(table.update().values(state="live"))


def test_promote_and_roll_back(c: Connection) -> None:
    for id in (1, 2):
        versions.register(c, version(id))
        versions.promote(c, "tab", id, actor="me")
    assert states(c) == ["retired", "retired", "live"]
    assert versions.rollback(c, "tab", actor="me").id == 1
    # once more goes further back, not forth to what was taken back
    before = versions.previous(c, "tab")
    assert before is not None
    assert before.id == 0
    assert versions.rollback(c, "tab", actor="me").id == 0
    with pytest.raises(Conflict, match="nothing to go back to"):
        versions.rollback(c, "tab", actor="me")
    assert versions.rollback(c, "tab", to=2, actor="me").id == 2
    assert states(c) == ["retired", "retired", "live"]
    with pytest.raises(Conflict, match="was not live before"):
        versions.rollback(c, "tab", to=2, actor="me")
    with pytest.raises(Conflict, match="is live and cannot become live"):
        versions.promote(c, "tab", 2, actor="me")


def test_rollback_rejects_the_descendants_and_stops_the_run(c: Connection) -> None:
    versions.register(c, version(1, parent=0))
    versions.promote(c, "tab", 1, actor="me")
    run = running(c)
    versions.register(c, version(2, parent=1))
    versions.register(c, version(3, parent=2))
    versions.register(c, version(4, parent=0))
    versions.transition(c, "tab", 3, V.CANARY, actor="t", reason="")
    assert versions.rollback(c, "tab", actor="me", reason="worse").id == 0
    assert states(c) == ["live", "retired", "rejected", "rejected", "candidate"]
    assert runs.get(c, "tab", run.id).wish == "stop"
    assert "worse" in versions.history(c, "tab", 3)[-1].reason


def test_promotion_stops_the_run_unless_it_made_the_version(c: Connection) -> None:
    run = running(c)
    versions.register(c, version(1, parent=0, run=run.id, step=1))
    versions.promote(c, "tab", 1, actor="publisher")
    assert runs.get(c, "tab", run.id).wish == ""
    versions.register(c, version(2, parent=0))
    versions.promote(c, "tab", 2, actor="me")
    assert runs.get(c, "tab", run.id).wish == "stop"


def test_rejection_gives_back_what_no_surviving_version_learned(c: Connection) -> None:
    run = running(c)
    batches(c, run.id, 6)
    interactions.drop(c, [("r1b4", 0)], reason="burst", run=run.id, now=2000.0)
    versions.register(c, version(1, parent=0, run=run.id, step=2))
    versions.promote(c, "tab", 1, actor="publisher")
    versions.register(c, version(2, parent=1, run=run.id, step=4))
    versions.reject(c, "tab", 2, actor="me", reason="worse")
    assert runs.get(c, "tab", run.id).wish == "stop"
    back = [sample.id for sample in claim(c, run=99)]
    assert back == ["r1b3", "r1b5", "r1b6"]  # what cleaning dropped is not learned from, whoever asks
    # neither a child of it nor a later version of its run may bring its samples in again
    with pytest.raises(Conflict, match="which was rejected"):
        versions.register(c, version(3, parent=2))
    with pytest.raises(Conflict, match="a version of its run 1 was rejected"):
        versions.register(c, version(3, parent=1, run=run.id, step=5))


def test_rejection_keeps_what_a_later_version_of_the_run_learned_too(c: Connection) -> None:
    run = running(c)
    batches(c, run.id, 4)
    versions.register(c, version(1, parent=0, run=run.id, step=2))
    versions.register(c, version(2, parent=1, run=run.id, step=4))
    versions.reject(c, "tab", 1, actor="me", reason="")
    assert claim(c, run=99) == []


def test_gc_keeps_what_may_be_needed(c: Connection) -> None:
    for id in range(1, 5):
        versions.register(c, version(id))
        versions.promote(c, "tab", id, actor="me")
    for id in (5, 6, 7):
        versions.register(c, version(id, parent=4))
    versions.transition(c, "tab", 6, V.CANARY, actor="t", reason="")
    versions.reject(c, "tab", 7, actor="t", reason="")
    assert versions.keep(c, "tab") == {0, 3, 4, 5, 6}
    run = running(c)
    versions.promote(c, "tab", 5, actor="me")
    assert runs.get(c, "tab", run.id).parent == 4
    versions.rollback(c, "tab", to=2, actor="me")
    # 5 was live until now: one may want to look again
    assert versions.keep(c, "tab") == {0, 1, 2, 4, 5, 6}
    assert versions.collect(c, "tab") == ({0, 1, 2, 4, 5, 6}, {3, 7})
    assert versions.get(c, "tab", 3).collected_at is not None
    with pytest.raises(Conflict, match="collected by gc"):
        versions.rollback(c, "tab", to=3, actor="me")
    assert versions.live(c, "tab").id == 2


def test_rollback_steps_over_collected_versions(c: Connection) -> None:
    for id in (1, 2):
        versions.register(c, version(id))
        versions.promote(c, "tab", id, actor="me")
    c.execute(sa.update(table).where(table.c.id == 1).values(collected_at=1.0))
    assert versions.rollback(c, "tab", actor="me").id == 0


def test_state_after_a_finished_run(c: Connection) -> None:
    run = running(c)
    versions.register(c, version(1, parent=0, run=run.id, step=1))
    runs.finish(c, run, RunState.FINISHED, "done")
    assert versions.keep(c, "tab") == {0, 1}
    versions.promote(c, "tab", 1, actor="me")
    assert runs.get(c, "tab", run.id).wish == ""
