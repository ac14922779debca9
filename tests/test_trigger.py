"""When a run starts, and what happens to one whose process died."""

from __future__ import annotations

import asyncio
import itertools
import math
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from prometheus_client import REGISTRY

from onlinerl import base, config
from onlinerl.config import Settings
from onlinerl.loop import run as launcher
from onlinerl.loop.trigger import RESTARTS, Trigger, Window, drift, due
from onlinerl.records import (
    Decision,
    DecisionKind,
    Event,
    ExperimentState,
    Feedback,
    Interaction,
    Run,
    RunState,
)
from onlinerl.store import charts, experiments, feedback, interactions, runs
from onlinerl.store.database import Database
from tests import boards
from tests.gateways import until
from tests.versions import settings_of

NOTHING = Window(0, 0)


def test_drift_by_hand() -> None:
    # 60 of 200 against 40 of 200: p = 0.25, z = 0.1 / sqrt(0.25 · 0.75 · (1/200 + 1/200)) = 2.3094
    assert drift(Window(200, 60), Window(200, 40)) == pytest.approx(2.3094, abs=1e-4)
    assert drift(Window(200, 40), Window(200, 60)) == pytest.approx(-2.3094, abs=1e-4)


def test_drift_with_unequal_windows_by_hand() -> None:
    # 30/100 against 20/200: p = 50/300, z = 0.2 / sqrt(5/36 · (1/100 + 1/200)) = 4.3818
    assert drift(Window(100, 30), Window(200, 20)) == pytest.approx(4.3818, abs=1e-4)


@pytest.mark.parametrize("accepted", [0, 200])
def test_drift_of_windows_without_variance_is_none(accepted: int) -> None:
    assert drift(Window(200, accepted), Window(200, accepted)) == 0
    assert drift(Window(200, accepted), NOTHING) == 0


@pytest.mark.parametrize(
    ("waiting", "recent", "before", "settings", "reason"),
    [
        (31, NOTHING, NOTHING, {"feedback": 32}, None),
        (32, NOTHING, NOTHING, {"feedback": 32}, "feedback"),
        (999, NOTHING, NOTHING, {}, None),
        (0, Window(200, 60), Window(200, 40), {"drift": 2.0}, None),
        (1, Window(200, 60), Window(200, 40), {"drift": 2.0}, "drift"),
        (1, Window(200, 40), Window(200, 60), {"drift": 2.0}, "drift"),
        (1, Window(200, 60), Window(200, 40), {"drift": 2.5}, None),
        (1, Window(200, 60), Window(199, 20), {"drift": 2.0}, None),
        (1, Window(50, 30), Window(50, 10), {"drift": 2.0, "window": 50}, "drift"),
        (64, Window(200, 60), Window(200, 40), {"drift": 2.0, "feedback": 64}, "feedback"),
    ],
)
def test_due(
    waiting: int, recent: Window, before: Window, settings: dict[str, float], reason: str | None
) -> None:
    assert due(waiting, recent, before, config.Trigger.model_validate(settings)) == reason


def test_the_command_names_policy_and_limits(tmp_path: Path) -> None:
    line = launcher.command("tab", max_steps=3, follow=True, run=7)
    assert line[0] == sys.executable
    wanted = ["-m", "onlinerl.learning", "--policy", "tab", "--max-steps", "3", "--follow", "--run", "7"]
    assert line[1:] == wanted
    settings = Settings(home=Path("somewhere"))
    given = Settings.model_validate_json(launcher.environment(settings)[launcher.SETTINGS_VARIABLE])
    assert given.home.is_absolute()
    assert given.policies == settings.policies


# ------------------------------------------------------------------------------------- the watch


class Watch:
    """A trigger whose runs are a command of the test's choice."""

    def __init__(self, home: Path, monkeypatch: pytest.MonkeyPatch, *overrides: str) -> None:
        self.settings = settings_of(home, *overrides)
        self.database = Database.open(self.settings.database_url)
        base.ensure(self.settings, "tab", self.database)
        self.trigger = Trigger("tab", self.settings, self.database)
        self.started: list[bool] = []
        """Whether each run was told to follow."""
        self.runs: list[int | None] = []
        """The run that each process was for; None: any."""
        self.script = "pass"

        def command(
            policy: str, *, max_steps: int | None = None, follow: bool = False, run: int | None = None
        ) -> list[str]:
            self.started.append(follow)
            self.runs.append(run)
            return [sys.executable, "-S", "-c", self.script]

        monkeypatch.setattr(launcher, "command", command)

    def verdicts(self, count: int, event: Event = Event.ACCEPTED) -> None:
        now = time.time()
        with self.database.write() as c:
            for _ in range(count):
                id = f"cmpl-{os.urandom(6).hex()}"
                interactions.insert(c, [replace(Interaction.example(), id=id, at=now, finished_at=now)])
                given = Feedback(source="native", event=event, at=now, project="default", id=id)
                feedback.record(c, given, None, deadline=1e9)

    def dead_run(self, settings: str = "{}") -> Run:
        """A run whose process is gone."""
        process = subprocess.Popen([sys.executable, "-S", "-c", "pass"])
        with self.database.write() as c:
            made, _ = runs.start(
                c,
                policy="tab",
                host=os.uname().nodename,
                pid=process.pid,
                settings=settings,
                tau_of=lambda _: 0.1,
                now=time.time(),
            )
        process.wait()
        return made

    def asked_for(self, settings: str | None = None) -> Run:
        """A run that the controller asked for."""
        with self.database.write() as c:
            return runs.request(
                c,
                policy="tab",
                host=os.uname().nodename,
                settings=settings or self.settings.policies["tab"].model_dump_json(),
                now=time.time(),
            )

    def run(self, id: int) -> Run:
        with self.database.read() as c:
            return runs.get(c, "tab", id)

    async def tick(self, now: float) -> None:
        await self.trigger.tick(now)

    async def settle(self) -> None:
        """Wait until the process that the trigger started has ended."""
        child = self.trigger._child
        if child is not None:
            await asyncio.to_thread(child.wait)


@pytest.fixture
def watches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Watch]]:
    made: list[Watch] = []
    yield made
    for watch in made:
        child = watch.trigger._child
        if child is not None:
            child.kill()
            child.wait()
        watch.database.close()


@pytest.fixture
def watch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, watches: list[Watch]) -> Watch:
    overrides = ["policies.tab.trigger.feedback=8", "policies.tab.trigger.cooldown=5"]
    watches.append(Watch(tmp_path / "home", monkeypatch, *overrides))
    return watches[0]


async def test_a_run_starts_when_enough_feedback_waits_and_only_one(watch: Watch) -> None:
    watch.script = "import time; time.sleep(60)"
    watch.verdicts(7)
    await watch.tick(1000.0)
    assert watch.started == []
    watch.verdicts(1)
    await watch.tick(1001.0)
    assert watch.started == [False]
    await watch.tick(1002.0)
    assert watch.started == [False]
    assert list((watch.settings.home / "runs").glob("start-tab-*.log"))
    assert REGISTRY.get_sample_value("onlinerl_run_active", {"policy": "tab"}) == 1


async def test_what_runs_left_out_is_counted_by_its_reason(watch: Watch) -> None:
    watch.verdicts(3)
    with watch.database.write() as c:
        taken = interactions.claim(
            c, policy="tab", run=1, batch=1, limit=3, now=time.time(), rest=0.0, min_version=0,
            temperature_floor=0.3, holdout=0.0,
        )  # fmt: skip
        keys = [(one.id, one.index) for one in taken]
        interactions.drop(c, keys, reason="near_duplicate", run=1, now=time.time())

    def counted() -> float | None:
        labels = {"policy": "tab", "reason": "near_duplicate"}
        return REGISTRY.get_sample_value("onlinerl_left_out", labels)

    await watch.tick(1000.0)
    assert counted() == 3
    watch.script = "import time; time.sleep(60)"
    watch.verdicts(8)
    with watch.database.write() as c:
        (one,) = interactions.claim(
            c, policy="tab", run=1, batch=2, limit=1, now=time.time(), rest=0.0, min_version=0,
            temperature_floor=0.3, holdout=0.0,
        )  # fmt: skip
        interactions.drop(c, [(one.id, one.index)], reason="near_duplicate", run=1, now=time.time())
    await watch.tick(1001.0)
    assert counted() == 3, "counted now and then, not at every look"
    await watch.tick(1011.0)
    assert counted() == 4


async def test_a_run_that_somebody_else_started_is_left_alone(watch: Watch) -> None:
    watch.verdicts(20)
    with watch.database.write() as c:
        runs.start(
            c,
            policy="tab",
            host=os.uname().nodename,
            pid=os.getpid(),
            settings="{}",
            tau_of=lambda _: 0.1,
            now=time.time(),
        )
    await watch.tick(time.time())
    assert watch.started == []


async def test_runs_that_leave_the_feedback_where_it_was_start_ever_more_rarely(watch: Watch) -> None:
    watch.verdicts(8)
    now, starts = 1000.0, []
    while now < 1100.0:
        before = len(watch.started)
        await watch.tick(now)
        await watch.settle()
        if len(watch.started) > before:
            starts.append(now)
        now += 1.0
    gaps = [later - earlier for earlier, later in itertools.pairwise(starts)]
    assert gaps[0] >= 5
    assert gaps[-1] > 2 * gaps[0]


async def test_drift_starts_one_run_for_one_drift(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, watches: list[Watch]
) -> None:
    drifting = ["policies.tab.trigger.drift=2.5", "policies.tab.trigger.window=20"]
    watch = Watch(tmp_path / "home", monkeypatch, *drifting)
    watches.append(watch)
    watch.verdicts(20, Event.ACCEPTED)
    watch.verdicts(19, Event.REJECTED)
    await watch.tick(1000.0)
    assert watch.started == []
    watch.verdicts(1, Event.REJECTED)
    await watch.tick(1010.0)
    assert watch.started == [False]
    await watch.settle()
    watch.verdicts(5, Event.REJECTED)
    await watch.tick(2000.0)
    await watch.tick(3000.0)
    assert watch.started == [False]


async def test_a_run_whose_process_died_is_started_again_with_back_off_and_in_the_end_given_up(
    watch: Watch,
) -> None:
    dead = watch.dead_run()
    now = time.time()
    starts = []
    for second in range(400):
        before = len(watch.started)
        await watch.tick(now + second / 10)
        await watch.settle()
        if len(watch.started) > before:
            starts.append(second / 10)
        if watch.run(dead.id).state is not RunState.RUNNING:
            break
    assert starts[0] == 0
    assert starts[1] >= 1
    assert starts[2] - starts[1] >= 2
    assert len(starts) == RESTARTS
    ended = watch.run(dead.id)
    assert ended.state is RunState.FAILED
    assert "died" in ended.message


async def test_a_run_goes_on_with_the_settings_that_it_began_with(watch: Watch) -> None:
    watch.script = "import os; print(os.environ['ONLINERL_SETTINGS'])"
    began = watch.settings.policies["tab"].model_copy(update={"train": config.Train(lr=7e-7)})
    watch.dead_run(began.model_dump_json())
    await watch.tick(time.time())
    await watch.settle()
    (log,) = (watch.settings.home / "runs").glob("start-tab-*.log")
    assert Settings.model_validate_json(log.read_text()).policies["tab"].train.lr == 7e-7


async def test_a_run_that_got_further_is_started_again_as_often_as_it_takes(watch: Watch) -> None:
    dead = watch.dead_run()
    now = time.time()
    for step in range(1, RESTARTS + 3):
        await watch.tick(now + step)
        await watch.settle()
        with watch.database.write() as c:
            runs.heartbeat(c, dead, step=step, now=time.time())
    assert len(watch.started) == RESTARTS + 2
    assert watch.run(dead.id).state is RunState.RUNNING


async def test_a_run_that_was_told_to_stop_is_closed_when_its_process_died(watch: Watch) -> None:
    dead = watch.dead_run()
    with watch.database.write() as c:
        runs.wish(c, "tab", dead.id, "stop")
    await watch.tick(time.time())
    assert watch.started == []
    assert watch.run(dead.id).state is RunState.STOPPED


async def test_a_crashed_run_follows_only_if_it_did_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, watches: list[Watch]
) -> None:
    """The run knows itself; what the trigger would do with its own runs does not matter."""
    watch = Watch(tmp_path / "home", monkeypatch, "policies.tab.trigger.follow=true")
    watches.append(watch)
    watch.dead_run()
    await watch.tick(time.time())
    assert watch.started == [False]


async def test_a_run_that_was_asked_for_is_started_with_its_own_settings(watch: Watch) -> None:
    watch.script = "import os; print(os.environ['ONLINERL_SETTINGS'])"
    chosen = watch.settings.policies["tab"].model_copy(update={"train": config.Train(lr=7e-7)})
    asked = watch.asked_for(chosen.model_dump_json())
    await watch.tick(time.time())
    await watch.settle()
    assert (watch.started, watch.runs) == ([False], [asked.id])
    (log,) = (watch.settings.home / "runs").glob("start-tab-*.log")
    assert Settings.model_validate_json(log.read_text()).policies["tab"].train.lr == 7e-7


async def test_one_that_was_asked_for_is_started_the_moment_it_is(watch: Watch) -> None:
    slow = watch.settings.policies["tab"].trigger.model_copy(update={"interval": 3600.0})
    watch.trigger._trigger = slow
    running = asyncio.create_task(watch.trigger.run())
    await until(lambda: watch.trigger._recount_at)  # its first look is over, the next one an hour away
    watch.asked_for()
    watch.trigger.wake()
    await until(lambda: watch.started)
    running.cancel()
    await watch.settle()


async def test_one_whose_process_never_begins_it_is_given_up(watch: Watch) -> None:
    asked = watch.asked_for()
    now = time.time()
    for second in range(400):
        await watch.tick(now + second / 10)
        await watch.settle()
    assert len(watch.started) == RESTARTS + 1
    assert set(watch.runs) == {asked.id}
    assert watch.run(asked.id).state is RunState.FAILED


async def test_one_that_lost_its_ground_before_it_began_is_closed(watch: Watch) -> None:
    asked = watch.asked_for()
    with watch.database.write() as c:
        c.exec_driver_sql("UPDATE runs SET wish = 'stop'")  # as a rollback does
    await watch.tick(time.time())
    assert watch.started == []
    assert watch.run(asked.id).state is RunState.STOPPED


async def test_what_only_the_store_knows_is_told_as_metrics(tmp_path: Path) -> None:
    settings = settings_of(tmp_path)
    database = Database.open(settings.database_url)
    try:
        now = boards.everything(settings, database, 400, weights=False)
        await Trigger("tab", settings, database).tick(now)
        with database.read() as c:
            (five,) = [one for one in interactions.report(c, policy="tab") if one.version == 5]
            reading = charts.last_reading(c, 1)

        def value(name: str, **labels: str) -> float | None:
            return REGISTRY.get_sample_value(name, {"policy": "tab", **labels})

        assert five.shown > 20
        assert value("onlinerl_answers", version="5", outcome="shown") == five.shown
        assert value("onlinerl_answers", version="5", outcome="accepted") == five.accepted
        assert value("onlinerl_run_batches") == 48
        assert reading is not None
        assert value("onlinerl_experiment_difference", bound="low") == reading.numbers["low"]
        with database.write() as c:
            one = experiments.running(c, "tab")
            assert one is not None
            experiments.finish(c, one, ExperimentState.STOPPED, Decision(DecisionKind.STOP, "enough"), now)
        await Trigger("tab", settings, database).tick(now)
        low = value("onlinerl_experiment_difference", bound="low")
        assert low is not None
        assert math.isnan(low)
    finally:
        database.close()
