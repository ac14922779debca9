"""How an experiment goes on by itself, with the real store, and what waits for a person."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from onlinerl.config import Settings, load_settings
from onlinerl.errors import Conflict, RequestError, StoreError
from onlinerl.experiments.analysis import spend
from onlinerl.experiments.assignment import CONTROL, TREATMENT
from onlinerl.loop import promotion
from onlinerl.loop.promotion import LOADING, Promotion
from onlinerl.records import Arm, Decision, DecisionKind, Experiment, ExperimentState, VersionState
from onlinerl.store import experiments, versions
from onlinerl.store.database import Database
from tests.store_helpers import version
from tests.trials import HOUR, T0, lineage, served, start

LATER = T0 + 48 * HOUR
"""When every window of a stage that began at T0 is over."""


class Trial:
    """A store, a policy, and its promotion."""

    def __init__(self, home: Path, *overrides: str) -> None:
        self.settings: Settings = load_settings(overrides=overrides, home=home)
        self.database = Database.open(self.settings.database_url)
        self.held: set[Arm] = {Arm("tab", 0), Arm("tab", 1)}
        self.faults: dict[Arm, str] = {}
        self.promotion = self.another()

    def another(self) -> Promotion:
        return Promotion(
            "tab", self.settings, self.database, holds=self.held.__contains__, fault=self.faults.get
        )

    def write(self, work: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        with self.database.write() as c:
            return work(c, *arguments, **options)

    @property
    def experiment(self) -> Experiment:
        """The newest."""
        with self.database.read() as c:
            return experiments.list_(c, "tab")[-1]

    def decisions(self) -> list[Decision]:
        with self.database.read() as c:
            return experiments.decisions(c, self.experiment.id)

    def kinds(self) -> list[str]:
        return [one.kind.value for one in self.decisions()]

    def state(self, id: int) -> VersionState:
        with self.database.read() as c:
            return versions.get(c, "tab", id).state


@pytest.fixture
def trial(tmp_path: Path) -> Iterator[Callable[..., Trial]]:
    made: list[Trial] = []

    def make(*overrides: str) -> Trial:
        made.append(Trial(tmp_path, *overrides))
        made[-1].write(lineage, 1)
        return made[-1]

    yield make
    for one in made:
        one.database.close()


def filled(trial: Trial, control: float, treatment: float, units: int = 60, **plan: Any) -> Experiment:
    plan = {"tuned": 40, "least_units": 20, "least_hours": 0, "stage_hours": 0, "stages": [0.5], **plan}

    def fill(c: Any) -> Experiment:
        one = start(c, **plan)
        served(c, one, {CONTROL: control, TREATMENT: treatment}, units=units)
        return one

    found: Experiment = trial.write(fill)
    return found


# ------------------------------------------------------------------------------------- it decides


async def test_a_better_version_is_promoted_and_its_numbers_are_kept(trial: Callable[..., Trial]) -> None:
    t = trial()
    filled(t, 0.3, 0.8)
    await t.promotion.tick(LATER)
    one = t.experiment
    assert (one.state, t.state(1), t.state(0)) == (
        ExperimentState.PROMOTED,
        VersionState.LIVE,
        VersionState.RETIRED,
    )
    last = t.decisions()[-1]
    assert (last.kind, last.actor, last.at, last.reason) == (
        DecisionKind.PROMOTE,
        "experiment",
        LATER,
        one.message,
    )
    assert 0.3 < last.numbers["low"] < 0.5 < last.numbers["high"] < 0.7
    assert (last.numbers["units/control"], last.numbers["units/treatment"]) == (60, 60)


async def test_a_worse_version_is_taken_back_while_all_windows_are_open(trial: Callable[..., Trial]) -> None:
    t = trial()
    filled(t, 0.7, 0.1)
    await t.promotion.tick(T0 + 10)
    assert (t.experiment.state, t.state(1)) == (ExperimentState.ABORTED, VersionState.REJECTED)
    assert "v1 is worse" in t.experiment.message


async def test_arms_that_cannot_be_compared_end_it(trial: Callable[..., Trial]) -> None:
    t = trial()
    filled(t, 0.5, 0.5, stages=[0.2, 0.5])  # as many users in both arms, where one in five was to be treated
    await t.promotion.tick(T0 + 10)
    assert (t.experiment.state, t.state(1)) == (ExperimentState.ABORTED, VersionState.REJECTED)
    assert "cannot be compared" in t.experiment.message


async def test_within_seconds_all_that_it_may_do_is_abort(trial: Callable[..., Trial]) -> None:
    t = trial()
    t.write(lambda c: served(c, start(c), {CONTROL: 0.2, TREATMENT: 0.9}, units=100))
    for seconds in (10, 60, 600):
        await t.promotion.tick(T0 + seconds)
    assert set(t.kinds()) == {"start", "continue"}
    assert t.experiment.state is ExperimentState.RUNNING


async def test_an_early_stage_gives_way_to_the_next_and_is_not_counted_there(
    trial: Callable[..., Trial],
) -> None:
    t = trial()
    filled(t, 0.5, 0.5, stages=[0.49, 0.5])
    await t.promotion.tick(LATER)
    one = t.experiment
    assert (one.stage, one.stage_at, t.kinds()[-1]) == (1, LATER, "ramp")
    assert t.decisions()[-1].stage == 0
    await t.promotion.tick(LATER + 10)
    assert t.decisions()[-1].kind is DecisionKind.CONTINUE
    assert t.decisions()[-1].numbers["reward/units/treatment"] == 0


async def test_no_answer_in_time_is_given_up_and_missing_data_triggers_nothing(
    trial: Callable[..., Trial],
) -> None:
    t = trial()
    filled(t, 0.5, 0.5, most_hours=50)
    await t.promotion.tick(T0 + 51 * HOUR)
    assert (t.experiment.state, t.state(1)) == (ExperimentState.FUTILE, VersionState.REJECTED)
    t.write(lambda c: versions.register(c, version(2, parent=0)))
    t.write(lambda c: start(c, 2, most_hours=50))
    await t.promotion.tick(T0 + 500 * HOUR)
    assert t.experiment.state is ExperimentState.RUNNING


async def test_with_ask_a_person_confirms_and_only_an_abort_is_not_asked(trial: Callable[..., Trial]) -> None:
    t = trial()
    filled(t, 0.3, 0.8, decide="ask")
    for seconds in (0, 1, 10_000):
        await t.promotion.tick(LATER + seconds)
    waiting = t.experiment
    assert (waiting.state, t.state(1)) == (ExperimentState.WAITING, VersionState.CANARY)
    assert [one.kind for one in t.decisions() if one.proposed] == [DecisionKind.PROMOTE]
    with t.database.write() as c:
        with pytest.raises(Conflict, match="proposes to promote, not to futile"):
            promotion.confirm(c, "tab", waiting.id, actor="ann", now=LATER, expect="futile")
        ended = promotion.confirm(c, "tab", waiting.id, actor="ann", now=LATER + 9, expect="promote")
    assert (ended.state, t.state(1)) == (ExperimentState.PROMOTED, VersionState.LIVE)
    last = t.decisions()[-1]
    assert (last.kind, last.actor, last.proposed, last.at) == (DecisionKind.PROMOTE, "ann", False, LATER + 9)
    assert last.numbers["low"] > 0


async def test_what_waits_is_still_watched(trial: Callable[..., Trial]) -> None:
    t = trial()
    one = filled(t, 0.3, 0.8, decide="ask")
    await t.promotion.tick(LATER)
    assert t.experiment.state is ExperimentState.WAITING
    t.write(lambda c: served(c, one, {TREATMENT: 0.0}, units=60, requests=20, at=T0 + 5000))
    await t.promotion.tick(LATER + 10)
    assert (t.experiment.state, t.state(1)) == (ExperimentState.ABORTED, VersionState.REJECTED)


async def test_looks_that_change_nothing_are_kept_now_and_then(trial: Callable[..., Trial]) -> None:
    t = trial()
    filled(t, 0.5, 0.5, units=25, interval=1)
    for number in range(50):
        looking = t.promotion if number % 2 else t.another()  # one that was started again knows no better
        await looking.tick(T0 + 1000 + 5 * number)
    kept = [one.at - T0 for one in t.decisions() if one.numbers and one.kind is DecisionKind.CONTINUE]
    gaps = [later - earlier for earlier, later in itertools.pairwise(kept)]
    assert set(gaps) == {25.0}  # just over a fiftieth of the age of the stage


async def test_two_servers_of_one_store_decide_once(trial: Callable[..., Trial]) -> None:
    t = trial()
    filled(t, 0.3, 0.8)
    other = t.another()
    done = await asyncio.gather(t.promotion.tick(LATER), other.tick(LATER), return_exceptions=True)
    assert all(one is None or isinstance(one, Conflict) for one in done)
    assert t.kinds().count("promote") == 1
    assert t.state(1) is VersionState.LIVE


async def test_a_fault_is_isolated_and_the_next_look_comes(
    trial: Callable[..., Trial], monkeypatch: pytest.MonkeyPatch
) -> None:
    t = trial()
    filled(t, 0.3, 0.8, interval=0.01)
    real, failed = t.promotion._look, asyncio.Event()

    def fails_once(now: float) -> None:
        if not failed.is_set():
            failed.set()
            raise StoreError("the disk is full")
        real(LATER)

    monkeypatch.setattr(t.promotion, "_look", fails_once)
    monkeypatch.setattr(t.promotion, "_pause", 0.01)
    task = asyncio.create_task(t.promotion.run())
    async with asyncio.timeout(20):
        while t.experiment.state is ExperimentState.RUNNING:  # noqa: ASYNC110  another process could do it
            await asyncio.sleep(0.01)
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task
    assert t.experiment.state is ExperimentState.PROMOTED


# -------------------------------------------------------------------------------------- it begins


async def test_the_clock_starts_when_both_arms_can_be_served(trial: Callable[..., Trial]) -> None:
    t = trial()
    t.write(start, begin=False)
    t.held.clear()
    for arms in ({Arm("tab", 0)}, {Arm("tab", 1)}):
        t.held |= arms
        if len(t.held) < 2:
            await t.promotion.tick(T0 + 50)
            assert not t.experiment.begun
    await t.promotion.tick(T0 + 70)
    assert (t.experiment.begun, t.experiment.stage_at) == (True, T0 + 70)
    assert "50 % get tab@1" in t.decisions()[-1].reason


async def test_a_version_that_engines_do_not_take_is_given_up_but_not_where_none_answers(
    trial: Callable[..., Trial],
) -> None:
    t = trial()
    t.write(start, begin=False)
    t.held.clear()
    await t.promotion.tick(T0 + LOADING + 1)
    assert t.experiment.state is ExperimentState.RUNNING
    t.held.add(Arm("tab", 0))
    await t.promotion.tick(T0 + LOADING - 1)
    assert t.experiment.state is ExperimentState.RUNNING
    await t.promotion.tick(T0 + LOADING + 1)
    assert (t.experiment.state, t.state(1)) == (ExperimentState.ABORTED, VersionState.REJECTED)
    assert "tab@1 could not be loaded" in t.experiment.message


@pytest.mark.parametrize("begin", [False, True])
async def test_an_arm_whose_weights_are_broken_ends_it(trial: Callable[..., Trial], begin: bool) -> None:
    t = trial()
    t.write(start, begin=begin)
    t.faults[Arm("tab", 1)] = "a byte has changed"
    await t.promotion.tick(T0 + 1)
    assert t.experiment.state is ExperimentState.ABORTED
    assert t.experiment.message == "tab@1 cannot be served: a byte has changed"


async def test_with_publish_experiment_the_newest_candidate_is_tried(trial: Callable[..., Trial]) -> None:
    t = trial("policies.tab.publish=experiment", "policies.tab.rewards.tau=0.2")
    for id in (2, 3):
        t.write(lambda c, id=id: versions.register(c, version(id, parent=0)))
    await t.promotion.tick(T0)
    one = t.experiment
    assert (one.control, one.treatment) == (Arm("tab", 0), Arm("tab", 3))
    assert (one.actor, one.tau, one.alpha) == ("promotion", 0.2, spend(0.05, 1))
    assert t.state(3) is VersionState.CANARY
    t.write(lambda c: versions.register(c, version(4, parent=0)))
    await t.promotion.tick(T0 + 5)
    assert t.experiment == one  # one at a time
    stopped = Decision(DecisionKind.STOP, "enough", at=T0 + 6)
    t.write(lambda c: experiments.finish(c, one, ExperimentState.STOPPED, stopped, T0 + 6))
    await t.promotion.tick(T0 + 7)
    assert (t.experiment.treatment, t.experiment.alpha) == (Arm("tab", 4), spend(0.05, 2))


async def test_nothing_is_tried_that_was_not_asked_for(trial: Callable[..., Trial]) -> None:
    t = trial()
    await t.promotion.tick(T0)
    assert t.write(lambda c: experiments.list_(c, "tab")) == []


async def test_what_was_passed_over_by_a_rollback_is_not_tried(trial: Callable[..., Trial]) -> None:
    t = trial("policies.tab.publish=experiment")
    t.write(lambda c: versions.register(c, version(2, parent=0)))
    t.write(lambda c: versions.promote(c, "tab", 2, actor="ann"))
    t.write(lambda c: versions.rollback(c, "tab", actor="ann"))
    await t.promotion.tick(T0)
    assert t.write(lambda c: experiments.list_(c, "tab")) == []
    t.write(lambda c: versions.register(c, version(3, parent=0)))
    t.faults[Arm("tab", 3)] = "its files are gone"
    await t.promotion.tick(T0)
    assert t.write(lambda c: experiments.list_(c, "tab")) == []
    t.faults.clear()
    await t.promotion.tick(T0)
    assert t.experiment.treatment == Arm("tab", 3)


# ------------------------------------------------------------------------------- what people name


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"alpah": 0.1}, "plan.alpah: is no setting of an experiment"),
        ({"alpha": 0.9}, "plan.alpha: .*less than 0.5"),
        ({"stages": [0.5, 0.1]}, "plan.stages: .*each stage must be larger"),
        ({"guardrails": {"speed": 1}}, "plan.guardrails.speed: is no setting"),
        ({"guardrails": 3}, "plan.guardrails: "),
        ({"holdout": 0.1}, "holdout is a setting of the policy"),
        ({"function": "os:system"}, "plan.function: is no setting"),
    ],
)
def test_plans_that_cannot_be(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    with pytest.raises(RequestError, match=said):
        promotion.planned(load_settings(home=tmp_path), "tab", changes)


def test_a_plan_is_the_policy_s_with_what_was_changed(tmp_path: Path) -> None:
    settings = load_settings(overrides=["policies.tab.experiments.alpha=0.02"], home=tmp_path)
    plan = promotion.planned(settings, "tab", {"stages": [0.5], "guardrails": {"errors": 0.1}})
    mine = settings.policies["tab"].experiments
    assert (plan.alpha, plan.stages) == (0.02, (0.5,))
    assert plan.guardrails == mine.guardrails.model_copy(update={"errors": 0.1})


@pytest.mark.parametrize(
    ("name", "arm"), [(3, Arm("tab", 3)), ("3", Arm("tab", 3)), ("tab@3", Arm("tab", 3))]
)
def test_names_of_arms(tmp_path: Path, name: str | int, arm: Arm) -> None:
    assert promotion.arm(load_settings(home=tmp_path), "tab", name) == arm


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("upstream:large", "not routed to yet"),
        ("", "is no arm"),
        (-1, "is no arm"),
        ("tab@x", "is no arm"),
        ("9" * 40, "is no arm"),
        ("other@1", "there is no policy 'other'"),
    ],
)
def test_names_that_are_no_arms(tmp_path: Path, name: str | int, said: str) -> None:
    with pytest.raises(RequestError, match=said):
        promotion.arm(load_settings(home=tmp_path), "tab", name)
