"""Interactions: what goes in comes out, and who may learn from what."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sqlalchemy.engine import Connection

from onlinerl.records import Event, FinishReason, Interaction, Sample, Verdict, text_hash
from onlinerl.store import interactions
from onlinerl.store.database import Database
from tests.store_helpers import claim, opened, shown, silent, tell, undone, url


@pytest.fixture
def database(tmp_path: Path) -> Iterator[Database]:
    with opened(tmp_path) as database:
        yield database


@pytest.fixture
def c(database: Database) -> Iterator[Connection]:
    with database.write() as connection:
        yield connection


def ids(rows: Sequence[Interaction] | Sequence[Sample]) -> list[str]:
    return [row.id for row in rows]


# -------------------------------------------------------------------------------- write and read

tokens = st.lists(
    st.tuples(st.integers(0, 2**31 - 1), st.floats(-60, 0), st.integers(0, 1000)), min_size=1, max_size=50
)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(tokens=tokens, prompt=st.text(max_size=50), completion=st.text(max_size=30))
def test_what_goes_in_comes_out(
    database: Database, tokens: list[tuple[int, float, int]], prompt: str, completion: str
) -> None:
    one = shown(
        "x",
        prompt=prompt,
        completion=completion,
        prompt_ids=tuple(token[0] for token in tokens),
        completion_ids=tuple(token[0] for token in tokens),
        behavior_logprobs=tuple(token[1] for token in tokens),
        offsets=tuple(token[2] for token in tokens),
        finish=FinishReason.LENGTH,
        suffix_hash=text_hash("suffix"),
        multiline=True,
        label="a label",
        version_end=1,
        propensity=0.25,
    )
    with undone(database) as c:
        interactions.insert(c, [one])
        back = interactions.get(c, "x")
        assert back is not None
        assert back.behavior_logprobs == pytest.approx(one.behavior_logprobs, abs=1e-6, rel=1e-6)
        assert replace(back, behavior_logprobs=()) == replace(one, behavior_logprobs=())


def test_lone_surrogates_are_stored(c: Connection) -> None:
    interactions.insert(c, [shown("x", prompt="a\ud800b", user="\udfff", completion="\ud83d\ude00")])
    back = interactions.get(c, "x")
    assert back is not None
    assert (back.prompt, back.user, back.completion) == ("a\ufffdb", "\ufffd", "\U0001f600")


def test_inserting_again_changes_nothing(c: Connection) -> None:
    interactions.insert(c, [shown("x")])
    tell(c, "x", Event.ACCEPTED)
    interactions.insert(c, [shown("x", completion="other"), shown("x", index=1)])
    first = interactions.get(c, "x")
    assert first is not None
    assert (first.completion, first.verdict) == ("return x", Verdict.ACCEPTED)
    assert interactions.get(c, "x", 1) is not None
    assert interactions.get(c, "x", 2) is None
    assert interactions.counts(c, policy="tab").opportunities == 2


def test_silence_is_labelled_by_the_server(c: Connection) -> None:
    interactions.insert(c, [silent("s")])
    back = interactions.get(c, "s")
    assert back is not None
    assert (back.verdict, back.verdict_source, back.verdict_at) == (Verdict.SILENT, "server", 1000.2)


def test_candidates_are_the_projects_newest_by_text(c: Connection) -> None:
    rows = [
        shown("old", at=10.0),
        shown("a", at=100.0, prompt="p1", suffix_hash=text_hash("s")),
        shown("b", at=101.0, prompt="p2", suffix_hash=text_hash("s")),
        shown("c", at=102.0, prompt="p1"),
        shown("foreign", at=103.0, prompt="p1", project="other"),
    ]
    interactions.insert(c, rows)

    def found(**where: object) -> list[str]:
        return ids(interactions.candidates(c, project="default", since=50.0, **where))  # type: ignore[arg-type]

    assert found() == ["c", "b", "a"]
    assert found(limit=2) == ["c", "b"]
    assert found(prompt_hash=text_hash("p1")) == ["c", "a"]
    assert found(suffix_hash=text_hash("s")) == ["b", "a"]


# ---------------------------------------------------------------------------------------- claiming


def accepted(c: Connection, *rows: Interaction) -> None:
    interactions.insert(c, rows)
    for row in rows:
        tell(c, row.id, Event.ACCEPTED)


def test_claim_takes_the_oldest_labelled_once(c: Connection) -> None:
    accepted(c, *(shown(f"n{i}") for i in range(5)))
    interactions.insert(c, [shown("unlabelled")])
    assert ids(claim(c, limit=2)) == ["n0", "n1"]
    assert ids(claim(c, batch=2)) == ["n2", "n3", "n4"]
    assert claim(c, batch=3) == []
    assert interactions.counts(c, policy="tab").waiting == 0


def test_a_sample_carries_what_the_trainer_needs(c: Connection) -> None:
    interactions.insert(c, [shown("x")])
    tell(c, "x", Event.ACCEPTED, displayed_text="retu", score=0.25)
    (sample,) = claim(c)
    assert sample.loss_mask == (True, False, False)
    assert (sample.verdict, sample.verdict_source, sample.score) == (Verdict.ACCEPTED, "native", 0.25)
    assert sample.completion_ids == Interaction.example().completion_ids
    assert sample.behavior_logprobs == pytest.approx(Interaction.example().behavior_logprobs, abs=1e-6)
    assert (sample.prompt, sample.arm) == (Interaction.example().prompt, "live")


@pytest.mark.parametrize(
    "changes",
    [
        {"untrainable": "no log-probabilities"},
        {"finish": FinishReason.ERROR},
        {"finish": FinishReason.ABORT, "completion_ids": (), "behavior_logprobs": (), "offsets": ()},
        {"behavior_logprobs": (-0.1,)},
        {"policy": "other"},
    ],
)
def test_what_cannot_be_learned_from_is_never_claimed(c: Connection, changes: dict[str, object]) -> None:
    accepted(c, shown("bad", **changes), shown("good"))
    assert ids(claim(c)) == ["good"]
    assert interactions.counts(c, policy=str(changes.get("policy", "tab"))).opportunities >= 1


def test_temperature_below_the_floor_is_dropped_and_no_longer_waits(c: Connection) -> None:
    accepted(c, shown("cold", temperature=0.1), shown("warm", temperature=0.3))
    assert interactions.counts(c, policy="tab").waiting == 2
    assert ids(claim(c)) == ["warm"]
    assert interactions.counts(c, policy="tab").waiting == 0
    assert interactions.dropped(c, policy="tab") == {"cold": 1}


def test_timeouts_rest_before_they_are_claimed(c: Connection) -> None:
    interactions.insert(c, [shown("t"), shown("r")])
    tell(c, "t", Event.IGNORED, at=1990.0)
    tell(c, "r", Event.REJECTED, at=1990.0)
    assert ids(claim(c, now=2000.0, rest=30.0)) == ["r"]
    tell(c, "t", Event.ACCEPTED, at=2005.0)
    (sample,) = claim(c, now=2010.0, rest=30.0)
    assert sample.verdict is Verdict.ACCEPTED


def test_a_timeout_is_claimed_once_it_has_rested(c: Connection) -> None:
    interactions.insert(c, [shown("t")])
    tell(c, "t", Event.IGNORED, at=1970.0)
    assert claim(c, now=1999.9) == []
    assert ids(claim(c, now=2000.0)) == ["t"]


def test_stale_versions_are_left_and_then_dropped(c: Connection) -> None:
    accepted(c, shown("v0", version=0), shown("v2", version=2))
    assert ids(claim(c, min_version=1)) == ["v2"]
    assert interactions.drop_stale(c, policy="tab", run=1, min_version=1, now=2000.0) == 1
    assert interactions.drop_stale(c, policy="tab", run=1, min_version=1, now=2000.0) == 0
    assert claim(c, min_version=0) == []
    assert interactions.dropped(c, policy="tab") == {"stale": 1}


def test_release_gives_back_the_later_batches(c: Connection) -> None:
    accepted(c, *(shown(f"n{i}") for i in range(6)))
    for batch in (1, 2, 3):
        claim(c, run=7, batch=batch, limit=2)
    assert interactions.release(c, run=8, after_batch=0) == 0
    assert interactions.release(c, run=7, after_batch=1) == 4
    assert ids(claim(c, run=9)) == ["n2", "n3", "n4", "n5"]


def test_dropped_samples_stay_out_whatever_is_released(c: Connection) -> None:
    accepted(c, *(shown(f"n{i}") for i in range(4)))
    interactions.insert(c, [shown("unlabelled")])
    claim(c, run=7)
    interactions.keep_rewards(c, [("n1", 0, 0.5, {"accepted": 0.5})])
    keys = [("n1", 0), ("n2", 0), ("unlabelled", 0), ("nobody", 0)]
    interactions.drop(c, keys, reason="duplicate", run=8, now=2000.0)
    assert interactions.dropped(c, policy="tab") == {}  # run 8 holds none of them
    interactions.drop(c, keys, reason="duplicate", run=7, now=2000.0)
    interactions.drop(c, [], reason="burst", run=7, now=2000.0)
    assert interactions.dropped(c, policy="tab") == {"duplicate": 2}
    assert interactions.dropped(c, policy="tab", run=7) == {"duplicate": 2}
    assert interactions.dropped(c, policy="tab", run=8) == interactions.dropped(c, policy="other") == {}
    assert interactions.rewards(c, run=7) == []  # what was dropped was not trained on
    assert interactions.release(c, run=7, after_batch=0) == 2
    assert ids(claim(c, run=9)) == ["n0", "n3"]
    assert interactions.counts(c, policy="tab").accepted == 4
    tell(c, "unlabelled", Event.ACCEPTED)
    assert ids(claim(c, run=9)) == ["unlabelled"]


def test_drops_are_counted_from_an_index_alone(database: Database) -> None:
    """A run counts them at every step, and may have dropped many thousands."""
    asked: list[tuple[str, Any]] = []

    @sa.event.listens_for(database._readers, "before_cursor_execute")
    def _note(_c: Connection, _cursor: Any, statement: str, parameters: Any, *_: Any) -> None:
        asked.append((statement, parameters))

    with database.read() as c:
        interactions.dropped(c, policy="tab", run=1)
        interactions.dropped(c, policy="tab")
        for statement, parameters in list(asked):
            plan = c.exec_driver_sql(f"EXPLAIN QUERY PLAN {statement}", parameters).all()
            assert "USING COVERING INDEX interactions_dropped" in str(plan[0])


@pytest.mark.parametrize("reason", ["", "x" * 17])
def test_a_reason_that_does_not_fit_its_column_is_refused(c: Connection, reason: str) -> None:
    with pytest.raises(ValueError, match="1 to 16 characters"):
        interactions.drop(c, [("x", 0)], reason=reason, run=1, now=2000.0)


def test_rewards_are_kept_with_their_samples_until_these_are_released(c: Connection) -> None:
    accepted(c, shown("a"), shown("b"), shown("b", index=1))
    tell(c, "b", Event.ACCEPTED, index=1)
    interactions.keep_rewards(c, [("a", 0, 9.0, {})])
    assert interactions.rewards(c, run=7) == []  # nobody holds it yet
    claim(c, run=7, batch=1, limit=2)
    claim(c, run=7, batch=2)
    interactions.keep_rewards(c, [])
    interactions.keep_rewards(c, [("a", 0, 1.0, {"accepted": 1.0}), ("b", 1, -0.2, {"timeout": -0.2})])
    interactions.keep_rewards(c, [("a", 0, 0.8, {"accepted": 0.7, "retained": 0.1})])
    first = interactions.Reward("a", 0, 1, 0.8, {"accepted": 0.7, "retained": 0.1})
    assert interactions.rewards(c, run=7) == [
        first,
        interactions.Reward("b", 1, 2, -0.2, {"timeout": -0.2}),
    ]
    interactions.release(c, run=7, after_batch=1)
    claim(c, run=7, batch=2)
    assert interactions.rewards(c, run=7) == [first]


def test_the_held_back_share_is_never_claimed(c: Connection) -> None:
    rows = [shown(f"n{i}") for i in range(400)]
    accepted(c, *rows)
    taken = set(ids(claim(c, limit=1000, holdout=0.25)))
    kept = ids(interactions.held(c, policy="tab", limit=1000))
    assert 60 <= len(kept) <= 140  # 100 expected, 4.6 standard deviations
    assert not taken & set(kept)
    assert taken | set(kept) == {row.id for row in rows}
    assert kept == sorted(kept, key=lambda id: -int(id[1:]))  # newest first
    assert interactions.held(c, policy="tab", limit=3) == interactions.held(c, policy="tab", limit=1000)[:3]
    # Later runs may hold back less: what was held stays out of training.
    assert claim(c, run=2, holdout=0.0) == []


def test_the_held_back_share_depends_on_the_id_alone(tmp_path: Path) -> None:
    kept = []
    for folder in ("a", "b"):
        with opened(tmp_path / folder) as database, database.write() as c:
            order = range(100) if folder == "a" else range(99, -1, -1)
            accepted(c, *(shown(f"n{i}") for i in order))
            claim(c, limit=1000, holdout=0.3)
            kept.append(set(ids(interactions.held(c, policy="tab", limit=1000))))
    assert kept[0] == kept[1]


# ----------------------------------------------------------------------------------------- silence


def test_silence_is_sampled_at_the_label_rate_of_the_shown(c: Connection) -> None:
    interactions.insert(c, [shown(f"n{i}") for i in range(200)])
    for i in range(50):
        tell(c, f"n{i}", Event.ACCEPTED)
    interactions.insert(c, [silent(f"s{i}") for i in range(400)])
    assert interactions.label_rate(c, policy="tab", now=2000.0, rest=30.0) == 0.25
    taken = claim(c, limit=1000)
    silence = [sample for sample in taken if sample.silent]
    assert len(taken) - len(silence) == 50
    assert 65 <= len(silence) <= 140  # 100 expected, 4 standard deviations
    assert interactions.dropped(c, policy="tab") == {"surplus": 400 - len(silence)}
    assert claim(c, batch=2) == []


def test_silence_waits_while_nothing_that_was_shown_is_labelled(c: Connection) -> None:
    interactions.insert(c, [silent("s0"), shown("n0")])
    assert claim(c) == []
    assert interactions.counts(c, policy="tab").waiting == 0
    tell(c, "n0", Event.REJECTED)
    assert ids(claim(c)) == ["s0", "n0"]


def test_answers_too_young_to_be_judged_do_not_lower_the_label_rate(c: Connection) -> None:
    interactions.insert(c, [shown(f"old{i}", at=1000.0) for i in range(4)])
    for i in range(2):
        tell(c, f"old{i}", Event.ACCEPTED)
    interactions.insert(c, [shown(f"new{i}", at=1999.0) for i in range(20)])
    assert interactions.label_rate(c, policy="tab", now=2000.0, rest=30.0) == 0.5


# ---------------------------------------------------------------------------------------- counting


def test_counts_and_report(c: Connection) -> None:
    interactions.insert(c, [shown(f"n{i}", version=i % 2) for i in range(6)])
    interactions.insert(c, [silent("s", version=1)])
    gone = {"finish": FinishReason.ABORT, "completion": "", "completion_ids": (), "behavior_logprobs": ()}
    interactions.insert(c, [shown("gone", offsets=(), **gone)])
    for name, kind in (
        ("n0", Event.ACCEPTED),
        ("n1", Event.IGNORED),
        ("n2", Event.REJECTED),
        ("n1", Event.EDITED),
    ):
        tell(c, name, kind)
    counts = interactions.counts(c, policy="tab")
    assert counts == interactions.InteractionCounts(
        opportunities=8, shown=6, silent=1, accepted=2, rejected=1, timeout=0, waiting=3
    )
    assert interactions.report(c, policy="tab") == [
        interactions.VersionCounts(0, opportunities=4, shown=3, silent=0, accepted=1, rejected=1, timeout=0),
        interactions.VersionCounts(1, opportunities=4, shown=3, silent=1, accepted=1, rejected=0, timeout=0),
    ]
    assert interactions.counts(c, policy="nobody").opportunities == 0


def test_accept_windows(c: Connection) -> None:
    interactions.insert(c, [shown(f"n{i}") for i in range(10)])
    for i in range(10):
        tell(c, f"n{i}", Event.ACCEPTED if i < 5 or i == 9 else Event.IGNORED, at=1010.0 + i)
    interactions.insert(c, [silent("s")])
    assert interactions.accept_window(c, policy="tab", window=4) == ((4, 1), (4, 3))
    assert interactions.accept_window(c, policy="tab", window=7) == ((7, 3), (3, 3))


# -------------------------------------------------------------------------------- several processes

CLAIMING = """
import sys, time
from onlinerl.store.database import Database
from tests.store_helpers import claim
database = Database.open(sys.argv[1])
print("ready", flush=True)
sys.stdin.readline()
batch = 0
while True:
    batch += 1
    with database.write() as c:
        taken = claim(c, run=int(sys.argv[2]), batch=batch, limit=3)
    if not taken:
        break
    print(*(sample.id for sample in taken), flush=True)
    time.sleep(0.001)  # the lock is not fair: without a gap one process takes all
database.close()
"""


def test_two_processes_claiming_at_once_never_share_a_sample(tmp_path: Path) -> None:
    with opened(tmp_path) as database, database.write() as c:
        accepted(c, *(shown(f"n{i}") for i in range(300)))
    root = Path(__file__).parent.parent
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(root / "src"), str(root)))}
    children = [
        subprocess.Popen(
            [sys.executable, "-c", CLAIMING, url(tmp_path), str(run)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for run in (1, 2)
    ]
    for child in children:
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
    for child in children:
        assert child.stdin is not None
        child.stdin.write("\n")
        child.stdin.flush()
    first, second = (child.communicate(timeout=60)[0].split() for child in children)
    assert first
    assert second
    assert not set(first) & set(second)
    assert sorted(first + second) == sorted(f"n{i}" for i in range(300))
