"""What the store keeps of experiments: numbers by unit, ends, and what a person changes under them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sqlalchemy as sa
from sqlalchemy.engine import Connection

from onlinerl import config
from onlinerl.errors import Conflict, NotFound
from onlinerl.experiments.analysis import Observations
from onlinerl.experiments.assignment import CONTROL, TREATMENT, session
from onlinerl.learning.rewards import RewardTable
from onlinerl.records import (
    Arm,
    Decision,
    DecisionKind,
    Event,
    Experiment,
    ExperimentState,
    FinishReason,
    Sample,
    Verdict,
    VersionState,
)
from onlinerl.store import experiments, versions
from onlinerl.store.database import Database
from tests.store_helpers import opened, tell, undone, version
from tests.trials import HOUR, T0, answered, insert, lineage, served, start, users


@pytest.fixture(scope="module")
def database(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Database]:
    with opened(tmp_path_factory.mktemp("store")) as one:
        yield one


@pytest.fixture
def c(database: Database) -> Iterator[Connection]:
    with undone(database) as connection:
        yield connection


def seen(c: Connection, experiment: Experiment, now: float = T0 + 48 * HOUR) -> dict[str, Observations]:
    return dict(experiments.observations(c, experiment, now))


# ------------------------------------------------------------------------------------------ numbers


def test_a_unit_counts_what_it_did_in_its_window(c: Connection) -> None:
    lineage(c, 1)
    one = start(c, window_hours=1)
    (user,) = users(one, TREATMENT, 1)
    error: dict[str, Any] = {"completion": "", "completion_ids": (), "behavior_logprobs": (), "offsets": ()}
    insert(
        c,
        [
            answered(one, user, TREATMENT, T0 - 1, Verdict.ACCEPTED),  # before the stage
            answered(one, user, TREATMENT, T0 + 10, Verdict.ACCEPTED, retained_characters=8),
            answered(one, user, TREATMENT, T0 + 20, Verdict.ACCEPTED, retained_characters=3),
            answered(one, user, TREATMENT, T0 + 30, Verdict.REJECTED),
            answered(one, user, TREATMENT, T0 + 40, Verdict.TIMEOUT),
            answered(one, user, TREATMENT, T0 + 50),  # nobody said anything (yet)
            answered(one, user, TREATMENT, T0 + 60, finish=FinishReason.ERROR, **error),
            answered(one, user, TREATMENT, T0 + 10 + HOUR - 1, Verdict.ACCEPTED),
            answered(one, user, TREATMENT, T0 + 10 + HOUR, Verdict.ACCEPTED),  # its window is over
            answered(None, user, "live", T0 + 70, Verdict.ACCEPTED),  # not of the experiment
        ],
    )
    found = seen(c, one, T0 + 10 + HOUR)[TREATMENT]
    assert found.units == 1
    numbers = {name: getattr(found, name).tolist() for name in ("opportunities", "shown", "accepted")}
    assert numbers == {"opportunities": [7], "shown": [6], "accepted": [3]}
    assert found.reward.tolist() == pytest.approx([3 * 0.9 - 0.1 - 0.05])
    assert (found.errors.tolist(), found.characters.tolist()) == ([1], [6 * 8])
    assert (found.retained.tolist(), found.reverted.tolist(), found.kept.tolist()) == ([2], [1], [11])
    assert found.ended.tolist() == [True]
    assert seen(c, one, T0 + 9 + HOUR)[TREATMENT].ended.tolist() == [False]
    assert seen(c, one)[CONTROL].units == 0


def test_nothing_is_counted_before_both_arms_can_be_served(c: Connection) -> None:
    lineage(c, 1)
    one = start(c, begin=False)
    assert (one.begun, one.stage_at, one.describe()["stage_at"]) == (False, math.inf, None)
    insert(c, [answered(one, "u", CONTROL, T0 + 1)])
    assert {arm: found.units for arm, found in seen(c, one).items()} == {CONTROL: 0, TREATMENT: 0}
    begun = experiments.begin(c, one, T0 + 5)
    assert (begun.begun, begun.stage_at) == (True, T0 + 5)
    assert experiments.begin(c, begun, T0 + 9) == begun  # another server had seen to it


def test_each_stage_begins_anew_and_who_moved_counts_once(c: Connection) -> None:
    lineage(c, 1)
    one = start(c, stages=[0.2, 0.5])
    served(c, one, {CONTROL: 0.5, TREATMENT: 0.5}, units=5)
    assert seen(c, one)[TREATMENT].units == 5
    decision = Decision(DecisionKind.RAMP, "on", at=T0 + HOUR, stage=0)
    two = experiments.ramp(c, one, decision, T0 + HOUR)
    assert {arm: found.units for arm, found in seen(c, two).items()} == {CONTROL: 0, TREATMENT: 0}
    # A gateway that has not heard of it yet serves one last answer of the old stage.
    mover = next(user for user in users(two, TREATMENT, 50) if user in users(one, CONTROL, 50))
    insert(
        c,
        [
            answered(two, mover, CONTROL, T0 + HOUR + 0.05, Verdict.REJECTED),
            answered(two, mover, TREATMENT, T0 + HOUR + 60, Verdict.ACCEPTED),
        ],
    )
    found = seen(c, two)
    assert (found[CONTROL].units, found[TREATMENT].units) == (0, 1)
    assert found[TREATMENT].accepted.tolist() == [1]


def test_history_is_what_the_user_did_before_the_experiment_not_before_the_stage(c: Connection) -> None:
    lineage(c, 1)
    one = start(c, window_hours=2, stages=[0.2, 0.5])
    treated, fresh = users(one, TREATMENT, 2)
    insert(
        c,
        [
            answered(None, treated, "live", T0 - 3 * HOUR, Verdict.ACCEPTED),  # too long ago
            answered(None, treated, "live", T0 - HOUR, Verdict.ACCEPTED),
            answered(None, treated, "explore", T0 - HOUR + 5, Verdict.REJECTED),
            answered(None, treated, "live", T0 - HOUR + 9, Verdict.ACCEPTED, policy="other"),
            answered(one, treated, TREATMENT, T0 + 1, Verdict.ACCEPTED),
        ],
    )
    two = experiments.ramp(c, one, Decision(DecisionKind.RAMP, "on", at=T0 + HOUR), T0 + HOUR)
    insert(c, [answered(two, user, TREATMENT, T0 + HOUR + 1) for user in (treated, fresh)])
    found = seen(c, two)[TREATMENT]
    past = sorted(zip(found.before_opportunities.tolist(), found.before_reward.tolist(), strict=True))
    assert past == [(0, 0), (2, pytest.approx(0.8))]


def test_a_session_has_its_user_s_history(c: Connection) -> None:
    lineage(c, 1)
    one = start(c, unit="session")
    insert(
        c,
        [
            answered(None, "ann", "live", T0 - HOUR, Verdict.ACCEPTED),
            answered(one, "ann", CONTROL, T0 + 1, unit=session("ann", "a.py", T0)),
            answered(one, "ann", CONTROL, T0 + 2, unit=session("ann", "b.py", T0)),
        ],
    )
    found = seen(c, one)[CONTROL]
    assert (found.units, found.before_opportunities.tolist()) == (2, [1, 1])


def test_slow_is_beyond_what_the_control_took_before_the_stage(c: Connection) -> None:
    lineage(c, 1)
    one = start(c)
    quick = [answered(None, "x", "live", T0 - 1000 + n, took=0.1 + n / 1000) for n in range(200)]
    other = [answered(None, "y", "live", T0 - 600 + n, took=9.0, version=7) for n in range(200)]
    insert(c, [*quick, *other])
    insert(c, [answered(one, "a", TREATMENT, T0 + 1 + n, took=took) for n, took in enumerate((0.28, 0.295))])
    assert seen(c, one)[TREATMENT].slow.tolist() == [1]


def test_without_answers_before_it_slow_is_beyond_the_stage_s_own_control(c: Connection) -> None:
    lineage(c, 1)
    one = start(c)
    insert(c, [answered(one, f"u{n}", CONTROL, T0 + 1, took=(n + 1) / 100) for n in range(100)])
    assert sum(seen(c, one)[CONTROL].slow) == 5


REWARDS = [
    {},
    {"timeout_weight": 0.25, "retention_bonus": 0.3},
    {"weights": {"verdict": 2.0, "score": 0.5}},
    {"weights": {"score": 3.0, "retained": 0.5}, "retention_bonus": 0.2},
]


@pytest.mark.parametrize("rewards", REWARDS)
def test_rewards_are_those_that_runs_learn_with(c: Connection, rewards: dict[str, Any]) -> None:
    lineage(c, 1)
    one = start(c, rewards=rewards, tau=0.2)
    table = RewardTable.of(config.Rewards.model_validate(rewards), 0.2)
    rows, expected = [], []
    verdicts = [None, *Verdict]
    cases = itertools.product(verdicts, ("native", "continue"), (None, 0.7, -1.0), (None, 0, 5, 20))
    for number, (verdict, source, score, kept) in enumerate(cases):
        row = answered(one, f"u{number}", CONTROL, T0 + 1, score=score, retained_characters=kept)
        row = replace(row, verdict=verdict, verdict_source=source if verdict else "", verdict_at=T0 + 2)
        rows.append(row)
        # a verdict that is not there is worth as much as silence
        sample = Sample(
            **{name: getattr(row, name) for name in ("id", "index", "policy", "version", "project", "user")},
            **{name: getattr(row, name) for name in ("at", "prompt_ids", "completion_ids", "temperature")},
            **{name: getattr(row, name) for name in ("behavior_logprobs", "top_p", "language", "multiline")},
            **{name: getattr(row, name) for name in ("completion", "score", "retained_characters")},
            loss_mask=row.loss_mask(),
            verdict=verdict or Verdict.SILENT,
            verdict_source=source,
        )
        expected.append(sum(table.parts(sample).values()))
    insert(c, rows)
    found = seen(c, one)[CONTROL]
    assert np.sort(found.reward) == pytest.approx(np.sort(expected))
    assert len(set(np.round(expected, 6))) > 4


def test_what_is_said_later_counts_at_the_next_look(c: Connection) -> None:
    lineage(c, 1)
    one = start(c)
    row = answered(one, "u", CONTROL, T0 + 1)
    insert(c, [row])
    assert seen(c, one)[CONTROL].accepted.tolist() == [0]
    tell(c, row.id, Event.ACCEPTED, at=T0 + 5)
    assert seen(c, one)[CONTROL].accepted.tolist() == [1]


def test_a_look_reads_one_index_and_no_answer(c: Connection) -> None:
    lineage(c, 1)
    one = start(c)
    served(c, one, {CONTROL: 0.5, TREATMENT: 0.5}, units=3)
    statements: list[tuple[str, Any]] = []

    def keep(_connection: Any, _cursor: Any, statement: str, parameters: Any, *_: Any) -> None:
        statements.append((statement, parameters))

    sa.event.listen(c.engine, "before_cursor_execute", keep)
    try:
        seen(c, one)
    finally:
        sa.event.remove(c.engine, "before_cursor_execute", keep)
    (units,) = [(text, values) for text, values in statements if "json_array" in text]
    steps = [row[3] for row in c.exec_driver_sql(f"EXPLAIN QUERY PLAN {units[0]}", units[1])]
    reads = [step for step in steps if "interactions" in step]
    assert len(reads) == 2
    assert all("USING COVERING INDEX interactions_experiment" in step for step in reads), steps
    assert not any("TEMP B-TREE" in step for step in steps), steps


# -------------------------------------------------------------------------------- starting and ending


def test_a_candidate_becomes_the_canary_and_one_experiment_runs_at_a_time(c: Connection) -> None:
    lineage(c, 1, 2)
    one = start(c, 1)
    assert versions.get(c, "tab", 1).state is VersionState.CANARY
    with pytest.raises(Conflict, match="experiment 1 of tab is running: stop it first"):
        start(c, 2)
    assert experiments.running(c, "tab") == one
    assert [each.id for each in experiments.open_(c)] == [one.id]
    assert versions.get(c, "tab", 2).state is VersionState.CANDIDATE


@pytest.mark.parametrize(
    ("arms", "said"),
    [
        ((Arm("tab", 0), Arm("tab", 0)), "both arms are tab@0"),
        ((Arm("tab", 0), Arm("tab", 2)), "tab@2 cannot take part: it was rejected"),
        ((Arm("tab", 0), Arm("tab", None, "large")), "upstream:large cannot take part: .*not routed to yet"),
        ((Arm("tab", None, "large"), Arm("tab", 1)), "upstream:large cannot take part"),
        ((Arm("tab", 0), Arm("tab", 9)), "no version 9"),
        ((Arm("tab", 0), Arm("other", 0)), "no version 0"),
    ],
)
def test_arms_that_cannot_be(c: Connection, arms: tuple[Arm, Arm], said: str) -> None:
    lineage(c, 1, 2)
    versions.reject(c, "tab", 2, actor="test", reason="bad")
    with pytest.raises((Conflict, NotFound), match=said):
        start(c, arms[1], control=arms[0])
    assert experiments.list_(c, "tab") == []
    assert versions.get(c, "tab", 1).state is VersionState.CANDIDATE


@pytest.mark.parametrize(
    ("end", "state"),
    [
        (ExperimentState.PROMOTED, VersionState.LIVE),
        (ExperimentState.FUTILE, VersionState.REJECTED),
        (ExperimentState.ABORTED, VersionState.REJECTED),
        (ExperimentState.STOPPED, VersionState.REJECTED),
    ],
)
def test_the_ends_and_what_they_mean_for_the_treatment(
    c: Connection, end: ExperimentState, state: VersionState
) -> None:
    lineage(c, 1)
    one = start(c)
    ended = experiments.finish(c, one, end, Decision(DecisionKind.STOP, "why", at=T0 + 9), T0 + 9)
    assert (ended.state, ended.ended_at, ended.message) == (end, T0 + 9, "why")
    assert versions.get(c, "tab", 1).state is state
    assert versions.live(c, "tab").id == (1 if end is ExperimentState.PROMOTED else 0)
    kinds = [one.kind for one in experiments.decisions(c, one.id)]
    assert kinds == [DecisionKind.START, DecisionKind.CONTINUE, DecisionKind.STOP]
    with pytest.raises(Conflict, match="has moved"):
        experiments.finish(c, one, ExperimentState.STOPPED, Decision(DecisionKind.STOP, "again"), T0 + 10)


# ---------------------------------------------------------------- what a person changes underneath


def _promote_treatment(c: Connection) -> None:
    versions.promote(c, "tab", 3, actor="ann")


def _promote_another(c: Connection) -> None:
    versions.promote(c, "tab", 4, actor="ann")


def _roll_back(c: Connection) -> None:
    versions.rollback(c, "tab", actor="ann")


def _reject_treatment(c: Connection) -> None:
    versions.reject(c, "tab", 3, actor="ann", reason="ugly")


@pytest.mark.parametrize(
    ("change", "live", "treatment", "said"),
    [
        (_promote_treatment, 3, VersionState.LIVE, "tab@3, one of its arms, became live"),
        (_promote_another, 4, VersionState.REJECTED, "tab@2, one of its arms, became retired"),
        (_roll_back, 0, VersionState.REJECTED, "tab@2, one of its arms, became retired"),
        (_reject_treatment, 2, VersionState.REJECTED, "tab@3, one of its arms, became rejected"),
    ],
)
def test_who_changes_an_arm_ends_the_experiment_in_the_same_transaction(
    c: Connection, change: Any, live: int, treatment: VersionState, said: str
) -> None:
    lineage(c, 2)
    versions.promote(c, "tab", 2, actor="test")
    for id in (3, 4):
        versions.register(c, version(id, parent=2))
    one = start(c, 3, control=2)
    change(c)
    ended = experiments.get(c, "tab", one.id)
    assert (ended.state, ended.message) == (ExperimentState.STOPPED, said)
    assert ended.ended_at is not None
    last = experiments.last(c, one.id)
    assert (last.kind, last.actor, last.reason) == (DecisionKind.STOP, "ann", said)
    assert versions.live(c, "tab").id == live
    assert versions.get(c, "tab", 3).state is treatment
    assert experiments.running(c, "tab") is None


def test_a_change_that_fails_ends_nothing(database: Database) -> None:
    with undone(database) as c:
        lineage(c, 1)
        one = start(c)
        savepoint = c.begin_nested()
        versions.reject(c, "tab", 1, actor="ann", reason="ugly")
        savepoint.rollback()
        assert experiments.get(c, "tab", one.id).state is ExperimentState.RUNNING
        with pytest.raises(Conflict):
            versions.rollback(c, "tab", actor="ann")  # nothing to go back to
        assert experiments.get(c, "tab", one.id).state is ExperimentState.RUNNING


def test_what_does_not_touch_an_arm_lets_it_run(c: Connection) -> None:
    lineage(c, 1, 2, 3)
    one = start(c)
    versions.reject(c, "tab", 2, actor="ann", reason="ugly")
    versions.register(c, version(4, parent=0))
    assert experiments.get(c, "tab", one.id) == one


def test_another_policy_s_version_goes_on_serving_until_it_is_rejected(c: Connection) -> None:
    lineage(c, 1)
    versions.register(c, version(0, VersionState.LIVE, policy="big"))
    versions.register(c, version(1, policy="big", parent=0))
    one = start(c, Arm("big", 1))
    assert versions.get(c, "big", 1).state is VersionState.CANDIDATE  # its own policy's business
    assert 1 in versions.keep(c, "big")
    versions.promote(c, "big", 1, actor="ann")
    versions.rollback(c, "big", actor="ann")
    assert experiments.get(c, "tab", one.id) == one
    two = experiments.finish(c, one, ExperimentState.PROMOTED, Decision(DecisionKind.PROMOTE, "good"), T0)
    assert (two.state, versions.live(c, "big").id) == (ExperimentState.PROMOTED, 0)
    versions.register(c, version(2, policy="big", parent=0))
    three = start(c, Arm("big", 2))
    versions.reject(c, "big", 2, actor="ann", reason="ugly")
    assert experiments.get(c, "tab", three.id).state is ExperimentState.STOPPED


def test_gc_keeps_the_arms_of_what_runs(c: Connection) -> None:
    lineage(c, 1, 2, 3, 4)
    for id in (1, 2, 3):
        versions.promote(c, "tab", id, actor="test")
    assert 1 not in versions.keep(c, "tab")  # live 3, before it 2
    one = start(c, 4, control=1)
    assert {1, 4} <= versions.keep(c, "tab")
    experiments.finish(c, one, ExperimentState.STOPPED, Decision(DecisionKind.STOP, "enough"), T0 + 1)
    assert not {1, 4} & versions.keep(c, "tab")


def test_a_mark_for_every_decision(c: Connection) -> None:
    lineage(c, 1)
    marks = [versions.mark(c)]
    one = start(c, begin=False)
    marks.append(versions.mark(c))
    one = experiments.begin(c, one, T0)
    marks.append(versions.mark(c))
    experiments.wait(c, one, Decision(DecisionKind.FUTILE, "no", at=T0, proposed=True))
    marks.append(versions.mark(c))
    assert len(set(marks)) == 4


def test_the_proposal_is_kept_and_found(c: Connection) -> None:
    lineage(c, 1)
    one = start(c)
    with pytest.raises(Conflict, match="is running: it proposes nothing"):
        experiments.proposal(c, one)
    asked = experiments.wait(
        c, one, Decision(DecisionKind.PROMOTE, "better", {"low": 0.1}, T0, proposed=True)
    )
    assert asked.state is ExperimentState.WAITING
    experiments.record(c, one.id, Decision(DecisionKind.CONTINUE, "a person has been asked", at=T0 + 1))
    found = experiments.proposal(c, asked)
    assert (found.kind, found.reason, dict(found.numbers)) == (DecisionKind.PROMOTE, "better", {"low": 0.1})


def test_an_id_is_never_given_twice(tmp_path: Path) -> None:
    """Interactions point to it."""
    with opened(tmp_path) as database, database.write() as c:
        lineage(c, 1)
        assert start(c).id == 1
        c.exec_driver_sql("DELETE FROM experiments")
        assert start(c).id == 2
