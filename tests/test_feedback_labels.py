"""Feedback: every piece gets a row and a status, and the strongest verdict wins in any order."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sqlalchemy.engine import Connection, Row

from onlinerl.records import EVENT_VERDICTS, VERDICT_STRENGTH, Event, FeedbackStatus, Interaction, Verdict
from onlinerl.store import feedback, interactions
from onlinerl.store.database import Database
from onlinerl.store.schema import feedback as table
from tests.store_helpers import DAY, claim, event, opened, shown, silent, tell, undone

S = FeedbackStatus


@pytest.fixture
def database(tmp_path: Path) -> Iterator[Database]:
    with opened(tmp_path) as database:
        yield database


@pytest.fixture
def c(database: Database) -> Iterator[Connection]:
    with database.write() as connection:
        interactions.insert(connection, [shown("x")])
        yield connection


def rows(c: Connection) -> list[Row[Any]]:
    return list(c.execute(sa.select(table).order_by(table.c.seq)).all())


def statuses(c: Connection) -> list[str]:
    return [row.status for row in rows(c)]


def now(c: Connection, id: str = "x") -> Interaction:
    one = interactions.get(c, id)
    assert one is not None
    return one


@pytest.mark.parametrize(
    ("events", "answers", "stand", "verdict"),
    [
        ([Event.ACCEPTED], [S.MATCHED], ["matched"], Verdict.ACCEPTED),
        ([Event.EDITED], [S.MATCHED], ["matched"], Verdict.ACCEPTED),
        ([Event.REJECTED], [S.MATCHED], ["matched"], Verdict.REJECTED),
        ([Event.IGNORED], [S.MATCHED], ["matched"], Verdict.TIMEOUT),
        ([Event.SHOWN], [S.MATCHED], ["matched"], None),
        ([Event.ACCEPTED] * 2, [S.MATCHED, S.DUPLICATE], ["matched", "duplicate"], Verdict.ACCEPTED),
        # the late accept after a timeout, as Continue reports it
        ([Event.IGNORED, Event.ACCEPTED], [S.MATCHED] * 2, ["superseded", "matched"], Verdict.ACCEPTED),
        ([Event.REJECTED, Event.ACCEPTED], [S.MATCHED] * 2, ["superseded", "matched"], Verdict.ACCEPTED),
        ([Event.ACCEPTED, Event.IGNORED], [S.MATCHED, S.SUPERSEDED], ["matched", "superseded"],
         Verdict.ACCEPTED),
        ([Event.ACCEPTED, Event.EDITED], [S.MATCHED, S.DUPLICATE], ["matched", "duplicate"],
         Verdict.ACCEPTED),
        # what carries no verdict is not superseded by one
        ([Event.SHOWN, Event.IGNORED, Event.REJECTED], [S.MATCHED] * 3, ["matched", "superseded", "matched"],
         Verdict.REJECTED),
        ([Event.SHOWN] * 2, [S.MATCHED, S.DUPLICATE], ["matched", "duplicate"], None),
    ],
)  # fmt: skip
def test_the_rules(
    c: Connection, events: list[Event], answers: list[S], stand: list[str], verdict: Verdict | None
) -> None:
    assert [tell(c, "x", kind) for kind in events] == answers
    assert statuses(c) == stand
    assert now(c).verdict is verdict


kinds = st.lists(st.sampled_from([*EVENT_VERDICTS, Event.SHOWN]), min_size=1, max_size=6)
texts = st.sampled_from([None, "ret", "return", "return x", "something else"])


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    kinds=kinds, displayed=st.lists(texts, min_size=6, max_size=6), early=st.integers(0, 6), data=st.data()
)
def test_any_order_ends_in_the_same(
    database: Database, kinds: list[Event], displayed: list[str | None], early: int, data: st.DataObject
) -> None:
    """Events shuffled, and the first few of them before the interaction is written at all."""
    reports = list(zip(kinds, displayed, strict=False))
    order = data.draw(st.permutations(reports))
    verdicts = [EVENT_VERDICTS[kind] for kind in kinds if kind in EVENT_VERDICTS]
    with undone(database) as c:
        for kind, text in order[:early]:
            assert tell(c, "y", kind, displayed_text=text) is S.UNMATCHED
        interactions.insert(c, [shown("y")])
        for kind, text in order[early:]:
            tell(c, "y", kind, displayed_text=text)
        one = now(c, "y")
        assert one.verdict == max(verdicts, key=VERDICT_STRENGTH.__getitem__, default=None)
        assert (one.shown_at is not None) == (Event.SHOWN in kinds)
        stand = Counter(statuses(c))
        assert stand.total() == len(reports)
        assert stand["unmatched"] == 0
        # exactly one report stands for the verdict, and one for the showing
        assert stand["matched"] == bool(verdicts) + (Event.SHOWN in kinds)
        counts = interactions.counts(c, policy="tab")
        assert counts.accepted + counts.rejected + counts.timeout == bool(verdicts)
        assert len(claim(c, now=1e6)) == bool(verdicts)


def test_displayed_is_the_longest_in_any_order(database: Database) -> None:
    for order in itertools.permutations([("ret", 3), ("return", 6), (None, 0)]):
        with undone(database) as c:
            interactions.insert(c, [shown("y")])
            for kind, (text, _) in zip((Event.SHOWN, Event.IGNORED, Event.ACCEPTED), order, strict=True):
                tell(c, "y", kind, displayed_text=text)
            assert now(c, "y").displayed == 6


@pytest.mark.parametrize(
    ("completion", "displayed", "characters"),
    [
        ("return x", "retu", 4),
        ("return x", "return x", 8),
        (" return x", "return", 7),  # Continue strips the leading space
        (" return x", " return", 7),
        ("  return x", "return x", 10),
        ("return x", "turn", None),
        ("return x", "return xy", None),
        ("return x", "", None),
        ("return x", None, None),
        ("", "a", None),
    ],
)
def test_displayed_characters(completion: str, displayed: str | None, characters: int | None) -> None:
    assert feedback.displayed_characters(completion, displayed) == characters


def test_feedback_that_comes_first_joins_when_the_interaction_is_written(c: Connection) -> None:
    assert tell(c, "y", Event.IGNORED) is S.UNMATCHED
    assert tell(c, "y", Event.ACCEPTED, displayed_text="return") is S.UNMATCHED
    assert tell(c, "z", Event.ACCEPTED) is S.UNMATCHED
    assert tell(c, "y", Event.ACCEPTED, index=1) is S.UNMATCHED
    interactions.insert(c, [shown("y")])
    assert statuses(c) == ["superseded", "matched", "unmatched", "unmatched"]
    assert (now(c, "y").verdict, now(c, "y").displayed) == (Verdict.ACCEPTED, 6)
    assert [sample.id for sample in claim(c)] == ["y"]


def test_the_match_of_the_gateway_counts_not_the_name(c: Connection) -> None:
    status = feedback.record(c, event(None, Event.ACCEPTED), ("x", 0), deadline=DAY)
    assert status is S.MATCHED
    assert now(c).verdict is Verdict.ACCEPTED
    assert feedback.record(c, event(None, Event.ACCEPTED), None, deadline=DAY) is S.UNMATCHED


def test_another_projects_interaction_is_not_found(c: Connection) -> None:
    interactions.insert(c, [shown("theirs", project="theirs")])
    assert tell(c, "theirs", Event.ACCEPTED) is S.UNMATCHED
    assert feedback.record(c, event(None, Event.ACCEPTED), ("theirs", 0), deadline=DAY) is S.UNMATCHED
    tell(c, "theirs-later", Event.ACCEPTED)
    interactions.insert(c, [shown("theirs-later", project="theirs")])
    assert now(c, "theirs").verdict is None
    assert now(c, "theirs-later").verdict is None
    assert statuses(c) == ["unmatched"] * 3


def test_feedback_on_what_was_claimed_is_late(c: Connection) -> None:
    tell(c, "x", Event.REJECTED)
    (before,) = claim(c)
    assert tell(c, "x", Event.ACCEPTED, displayed_text="r", score=1.0) is S.LATE
    assert tell(c, "x", Event.REJECTED, displayed_text="r", score=1.0) is S.DUPLICATE
    assert tell(c, "x", Event.IGNORED) is S.SUPERSEDED
    assert tell(c, "x", Event.RETAINED, retained_characters=3) is S.LATE
    assert (now(c).verdict, now(c).displayed, now(c).score) == (Verdict.REJECTED, None, None)
    interactions.release(c, run=1, after_batch=0)
    assert claim(c) == [before]


def test_feedback_past_the_deadline_is_late(c: Connection) -> None:
    late = event("x", Event.ACCEPTED, at=1000.0 + 60.1)
    assert feedback.record(c, late, None, deadline=60.0) is S.LATE
    assert now(c).verdict is None
    in_time = event("x", Event.ACCEPTED, at=1000.0 + 60.0)
    assert feedback.record(c, in_time, None, deadline=60.0) is S.MATCHED


def test_retention_and_score(c: Connection) -> None:
    assert tell(c, "x", Event.ACCEPTED, score=0.5) is S.MATCHED
    assert tell(c, "x", Event.RETAINED, retained_characters=8) is S.MATCHED
    assert tell(c, "x", Event.RETAINED, retained_characters=8) is S.DUPLICATE
    assert tell(c, "x", Event.RETAINED, retained_characters=5) is S.MATCHED
    assert tell(c, "x", Event.IGNORED, score=0.1) is S.SUPERSEDED
    assert (now(c).retained_characters, now(c).score) == (5, 0.5)
    (sample,) = claim(c)
    assert (sample.retained_characters, sample.score) == (5, 0.5)


def test_a_score_alone_is_kept_and_labels_nothing(c: Connection) -> None:
    assert tell(c, "x", Event.SHOWN, score=0.7) is S.MATCHED
    assert (now(c).score, now(c).verdict) == (0.7, None)
    assert claim(c) == []


def test_a_verdict_on_an_untrainable_answer_is_recorded_and_counted(c: Connection) -> None:
    interactions.insert(c, [shown("u", untrainable="no log-probabilities")])
    assert tell(c, "u", Event.ACCEPTED) is S.MATCHED
    assert now(c, "u").verdict is Verdict.ACCEPTED
    counts = interactions.counts(c, policy="tab")
    assert (counts.accepted, counts.waiting) == (1, 0)


def test_a_verdict_on_silence_is_recorded(c: Connection) -> None:
    interactions.insert(c, [silent("s")])
    assert tell(c, "s", Event.REJECTED) is S.MATCHED
    assert tell(c, "s", Event.REJECTED) is S.DUPLICATE
    assert now(c, "s").verdict is Verdict.REJECTED


def test_everything_received_is_kept(c: Connection) -> None:
    payload = {"unknown": [1, {"deep": "\ud800 ü"}], "accepted": True}
    tell(c, "x", Event.ACCEPTED, client_id="c1", accepted_text="return", payload=payload, user="u\ud800")
    (row,) = rows(c)
    assert json.loads(row.payload) == payload
    assert (row.client_id, row.accepted_text, row.source, row.event) == ("c1", "return", "native", "accepted")


def test_a_clients_own_id_finds_the_earlier_match(c: Connection) -> None:
    assert feedback.matched_before(c, project="default", client_id="c1") is None
    tell(c, "x", Event.IGNORED, client_id="c1")
    tell(c, "nowhere", Event.IGNORED, client_id="c2")
    assert feedback.matched_before(c, project="default", client_id="c1") == ("x", 0)
    assert feedback.matched_before(c, project="other", client_id="c1") is None
    assert feedback.matched_before(c, project="default", client_id="c2") is None


def test_statuses_are_counted(c: Connection) -> None:
    tell(c, "x", Event.ACCEPTED)
    tell(c, "x", Event.ACCEPTED)
    tell(c, "nowhere", Event.ACCEPTED)
    assert feedback.statuses(c) == {S.MATCHED: 1, S.DUPLICATE: 1, S.UNMATCHED: 1}
    assert feedback.statuses(c, project="other") == {}
