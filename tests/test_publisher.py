"""What is live, and when: the real store and real version folders, doubles as engines."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path

import pytest

from onlinerl import base, config
from onlinerl.config import Settings
from onlinerl.engines.pool import Pool
from onlinerl.errors import Conflict, EngineUnavailable, NotFound
from onlinerl.loop import publisher
from onlinerl.loop.publisher import Publisher
from onlinerl.observe import LOAD_FAILURES
from onlinerl.records import (
    Arm,
    Decision,
    DecisionKind,
    Experiment,
    ExperimentState,
    Finish,
    Generation,
    VersionState,
)
from onlinerl.store import experiments, versions
from onlinerl.store.database import Database
from onlinerl.weights import directory
from tests.doubles import DoubleEngine
from tests.versions import make_version, settings_of


class Stage:
    """A policy `tab` with version 0, its store, its pool and its publisher."""

    def __init__(self, home: Path, engines: int = 1, *overrides: str) -> None:
        self.settings: Settings = settings_of(home, *overrides)
        self.database = Database.open(self.settings.database_url)
        base.ensure(self.settings, "tab", self.database)
        self.pool = Pool("tab", patience=0.2)
        self.engines = [DoubleEngine(f"double-{number}", versions=()) for number in range(engines)]
        for engine in self.engines:
            self.pool.add(engine)
        self.publisher = self.another()

    def another(self) -> Publisher:
        """A publisher that knows nothing yet, as after a restart."""
        return Publisher("tab", self.settings.policies["tab"], self.database, self.pool)

    def make(self, parent: int = 0, run: int | None = None) -> int:
        return make_version(self.settings, self.database, parent=parent, run=run).id

    def promote(self, version: int) -> None:
        with self.database.write() as c:
            versions.promote(c, "tab", version, actor="test")

    def rollback(self) -> None:
        with self.database.write() as c:
            versions.rollback(c, "tab", actor="test")

    def states(self) -> dict[int, str]:
        with self.database.read() as c:
            return {version.id: version.state.value for version in versions.list_(c, "tab")}

    def break_weights(self, version: int) -> None:
        file = directory.folder(self.settings.weights_url, "tab", version) / "model.safetensors"
        data = bytearray(file.read_bytes())
        data[-1] ^= 1
        file.write_bytes(data)


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Callable[..., Stage]]:
    made: list[Stage] = []

    def make(engines: int = 1, *overrides: str) -> Stage:
        made.append(Stage(tmp_path / "home", engines, *overrides))
        return made[-1]

    yield make
    for one in made:
        one.database.close()


@asynccontextmanager
async def following(one: Publisher) -> AsyncIterator[None]:
    task = asyncio.create_task(one.run())
    try:
        yield
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


async def until(condition: Callable[[], bool], limit: float = 5.0) -> float:
    """Seconds until the condition holds."""
    started = time.monotonic()
    while not condition():
        assert time.monotonic() - started < limit, "it did not happen in time"
        await asyncio.sleep(0.005)
    return time.monotonic() - started


async def test_version_0_is_loaded_and_then_live(stage: Callable[..., Stage]) -> None:
    s = stage(2)
    assert s.publisher.live is None
    await s.publisher.tick()
    assert s.publisher.live == 0
    assert s.publisher.ready
    assert [sorted(engine.versions) for engine in s.engines] == [[0], [0]]


async def test_nothing_is_live_while_no_engine_answers(stage: Callable[..., Stage]) -> None:
    s = stage()
    s.engines[0].down = True
    await s.publisher.tick()
    assert s.publisher.live is None
    s.engines[0].down = False
    await s.publisher.tick()
    assert s.publisher.live == 0


async def test_a_version_goes_live_when_all_engines_hold_it_and_no_request_notices(
    stage: Callable[..., Stage],
) -> None:
    s = stage(2)
    s.engines[1].load_time = 0.4
    for engine in s.engines:
        engine.gap = 0.002
    served: list[int] = []
    done = asyncio.Event()

    async def client(number: int) -> None:
        while not done.is_set():
            version = s.publisher.live
            assert version is not None
            request = Generation(f"r{number}", "tab", version, (1, 2), max_tokens=6)
            async for item in s.pool.generate(request):
                if not isinstance(item, Finish):
                    assert item.version == version
            served.append(version)

    async with following(s.publisher):
        await until(lambda: s.publisher.live == 0)
        await until(lambda: all(0 in engine.versions for engine in s.engines))
        clients = [asyncio.create_task(client(number)) for number in range(8)]
        await asyncio.sleep(0.1)
        one = s.make()
        s.promote(one)
        await until(lambda: one in s.engines[0].versions)
        assert one not in s.engines[1].versions
        assert s.publisher.live == 0
        await until(lambda: s.publisher.live == one)
        assert all(one in engine.versions for engine in s.engines)
        await until(lambda: served[-1] == one)
        done.set()
        await asyncio.gather(*clients)
    assert {0, one} == set(served)
    assert served.index(one) > 8


async def test_a_straggler_does_not_hold_a_version_back_for_ever(
    stage: Callable[..., Stage], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publisher, "STRAGGLER", 0.3)
    s = stage(2)
    async with following(s.publisher):
        await until(lambda: all(0 in engine.versions for engine in s.engines))
        s.engines[1].load_time = 60.0
        s.promote(s.make())
        assert await until(lambda: s.publisher.live == 1) > 0.25


async def test_rollback_takes_under_a_second_while_an_engine_is_busy_loading(
    stage: Callable[..., Stage],
) -> None:
    s = stage()
    async with following(s.publisher):
        await until(lambda: s.publisher.live == 0)
        one = s.make()
        s.promote(one)
        await until(lambda: s.publisher.live == one)
        s.engines[0].load_time = 60.0
        two = s.make(parent=one)
        s.promote(two)
        await asyncio.sleep(0.3)
        assert s.publisher.live == one
        with s.database.write() as c:
            versions.rollback(c, "tab", to=0, actor="test")
        assert await until(lambda: s.publisher.live == 0) < 1.0


async def test_candidates_wait_unless_they_may_go_live_at_once(stage: Callable[..., Stage]) -> None:
    s = stage()
    s.make()
    await s.publisher.tick()
    await s.publisher.tick()
    assert s.publisher.live == 0
    assert s.states() == {0: "live", 1: "candidate"}


async def test_the_newest_candidate_goes_live_at_once_and_skipped_ones_wait(
    stage: Callable[..., Stage],
) -> None:
    s = stage(1, "policies.tab.publish=immediately")
    await s.publisher.tick()
    one = s.make()
    two = s.make(parent=one)
    await s.publisher.tick()
    assert s.publisher.live == two
    assert s.states() == {0: "retired", one: "candidate", two: "live"}
    assert one not in {version.id for version in s.engines[0].loads}
    three = s.make(parent=two)
    await s.publisher.tick()
    assert s.publisher.live == three


async def test_after_a_rollback_nothing_that_was_skipped_or_descends_goes_live(
    stage: Callable[..., Stage],
) -> None:
    s = stage(1, "policies.tab.publish=immediately")
    await s.publisher.tick()
    one = s.make()
    two = s.make(parent=one)
    await s.publisher.tick()
    three = s.make(parent=two)
    s.rollback()
    await s.publisher.tick()
    assert s.publisher.live == 0
    assert s.states() == {0: "live", one: "candidate", two: "retired", three: "rejected"}
    # written by a run that had not yet heard of the rollback
    late = s.make(parent=two)
    await s.publisher.tick()
    assert s.publisher.live == 0
    assert s.states()[late] == "candidate"
    # a run that starts from what is live now
    fresh = s.make(parent=0)
    await s.publisher.tick()
    assert s.publisher.live == fresh


async def test_an_engine_that_comes_back_gets_its_versions_before_it_is_used(
    stage: Callable[..., Stage],
) -> None:
    s = stage(2)
    async with following(s.publisher):
        await until(lambda: s.publisher.live == 0)
        await until(lambda: s.pool.resident() == {0})
        dead = s.engines[0]
        dead.down = True
        dead.versions.clear()
        s.publisher.lost(dead.name)
        dead.down, dead.load_time = False, 0.3
        s.publisher.wake(dead.name)
        for number in range(20):
            async for _ in s.pool.generate(Generation(f"r{number}", "tab", 0, (1,), max_tokens=2)):
                pass
        assert not dead.requests
        await until(lambda: 0 in dead.versions)
        assert s.publisher.live == 0


async def test_a_load_that_fails_is_counted_and_tried_again_and_the_old_version_serves(
    stage: Callable[..., Stage], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publisher, "RETRY", 0.1)
    s = stage(1, "policies.tab.publish=immediately")
    await s.publisher.tick()
    counter = LOAD_FAILURES.labels("tab")
    before = counter._value.get()
    s.engines[0].load_error = "no memory left"
    one = s.make()
    await s.publisher.tick()
    assert s.publisher.live == 0
    assert s.states()[one] == "candidate"
    assert counter._value.get() > before
    s.engines[0].load_error = ""
    await asyncio.sleep(0.15)
    await s.publisher.tick()
    assert s.publisher.live == one


async def test_a_candidate_with_broken_weights_is_rejected_with_the_reason(
    stage: Callable[..., Stage],
) -> None:
    s = stage(1, "policies.tab.publish=immediately")
    await s.publisher.tick()
    one = s.make()
    s.break_weights(one)
    s.engines[0].load_error = "the files are not those of the manifest"
    await s.publisher.tick()
    assert s.publisher.live == 0
    assert s.states()[one] == "rejected"
    with s.database.read() as c:
        last = versions.history(c, "tab", one)[-1]
    assert last.actor == "publisher"
    assert "model.safetensors" in last.reason
    with pytest.raises(Conflict, match=r"model\.safetensors"):
        await s.publisher.ensure(one)


async def test_a_live_version_with_broken_weights_leaves_the_one_before_it_serving(
    stage: Callable[..., Stage],
) -> None:
    s = stage()
    one = s.make()
    s.promote(one)
    s.break_weights(one)
    real = s.engines[0].load

    async def load(version: object) -> None:
        s.engines[0].load_error = "broken" if getattr(version, "id", None) == one else ""
        await real(version)  # type: ignore[arg-type]

    s.engines[0].load = load  # type: ignore[method-assign]
    await s.publisher.tick()
    await s.publisher.tick()
    assert s.publisher.live == 0
    assert s.states() == {0: "retired", one: "live"}


async def test_pinned_versions_are_loaded_on_demand(stage: Callable[..., Stage]) -> None:
    s = stage()
    one = s.make()
    async with following(s.publisher):
        await until(lambda: s.publisher.live == 0)
        assert one not in s.engines[0].versions
        await asyncio.wait_for(s.publisher.ensure(one), 2)
        assert one in s.engines[0].versions
        assert s.publisher.live == 0
        assert s.publisher.exists(one)
        assert not s.publisher.exists(7)
        with pytest.raises(NotFound, match="no version 7"):
            await s.publisher.ensure(7)


async def test_pins_cannot_crowd_an_engine(stage: Callable[..., Stage]) -> None:
    s = stage(1, "policies.tab.engine.resident=2")
    made = [s.make() for _ in range(2)]
    async with following(s.publisher):
        await until(lambda: s.publisher.live == 0)
        await s.publisher.ensure(made[0])
        with pytest.raises(EngineUnavailable, match="pinned"):
            await s.publisher.ensure(made[1])
        assert s.engines[0].versions == {0, made[0]}


async def test_what_nobody_wants_is_unloaded_and_never_what_is_live(stage: Callable[..., Stage]) -> None:
    s = stage(1, "policies.tab.engine.resident=2")
    await s.publisher.tick()
    parent = 0
    for _ in range(3):
        parent = s.make(parent=parent)
        s.promote(parent)
        await s.publisher.tick()
        assert s.publisher.live == parent
        assert s.publisher.live in s.engines[0].versions
        assert len(s.engines[0].versions) <= 2
    assert s.engines[0].versions == {3, 2}
    assert s.engines[0].unloads == [0, 1]


async def test_a_restarted_publisher_serves_what_the_store_says(stage: Callable[..., Stage]) -> None:
    s = stage()
    s.promote(s.make())
    await s.publisher.tick()
    again = s.another()
    await again.tick()
    assert again.live == 1
    assert s.states() == {0: VersionState.RETIRED, 1: VersionState.LIVE}


# --------------------------------------------------------------------------------------- experiments


def experiment_on(s: Stage, treatment: int, control: int = 0, **plan: object) -> Experiment:
    with s.database.write() as c:
        return experiments.start(
            c,
            policy="tab",
            control=Arm("tab", control),
            treatment=Arm("tab", treatment),
            plan=config.Experiments.model_validate(plan).model_dump(mode="json"),
            rewards={},
            tau=0.1,
            alpha=0.03,
            actor="test",
            now=time.time(),
        )


async def test_arms_are_loaded_and_kept_before_pins_and_for_a_moment_after_the_end(
    stage: Callable[..., Stage], monkeypatch: pytest.MonkeyPatch
) -> None:
    s = stage(1, "policies.tab.engine.resident=2")
    old, live, tried = s.make(), s.make(), s.make()
    for version in (old, live):
        s.promote(version)
    await s.publisher.tick()
    one = experiment_on(s, tried, control=old)
    await s.publisher.tick()
    (engine,) = s.engines
    assert engine.versions == {old, live, tried}  # beyond its room, since requests will name them
    assert s.publisher.experiment is None  # nobody is assigned before it begins
    with s.database.write() as c:
        begun = experiments.begin(c, one, time.time())
    await s.publisher.tick()
    assert s.publisher.experiment == begun
    await s.publisher.ensure(tried)
    assert s.publisher.live == live
    decision = Decision(DecisionKind.STOP, "enough")
    with s.database.write() as c:
        experiments.finish(c, begun, ExperimentState.STOPPED, decision, time.time())
    await s.publisher.tick()
    assert s.publisher.experiment is None
    assert engine.versions >= {old, live, tried}  # a request may just have been given that version
    monkeypatch.setattr(publisher, "PIN_REST", 0.0)
    await s.publisher.tick()
    assert tried not in engine.versions


async def test_the_hold_out_s_version_stays_loaded(stage: Callable[..., Stage]) -> None:
    s = stage(1, "policies.tab.engine.resident=2", "policies.tab.experiments.holdout=0.1")
    for _ in range(3):
        s.promote(s.make())
        await s.publisher.tick()
    assert {0, 3} <= s.engines[0].versions


async def test_versions_of_other_policies_experiments_are_loaded(stage: Callable[..., Stage]) -> None:
    s = stage(1)
    other = s.make()
    await s.publisher.tick()
    with s.database.write() as c:
        versions.register(c, replace(versions.get(c, "tab", 0), policy="other"))
        experiments.start(
            c,
            policy="other",
            control=Arm("other", 0),
            treatment=Arm("tab", other),
            plan=config.Experiments().model_dump(mode="json"),
            rewards={},
            tau=0.1,
            alpha=0.03,
            actor="test",
            now=time.time(),
        )
    await s.publisher.tick()
    assert other in s.engines[0].versions
    assert s.publisher.experiment is None  # it is not ours


async def test_what_goes_live_by_itself_waits_for_the_end_of_an_experiment(
    stage: Callable[..., Stage],
) -> None:
    s = stage(1, "policies.tab.publish=immediately")
    tried = s.make()
    one = experiment_on(s, tried)
    newer = s.make()
    for _ in range(3):
        await s.publisher.tick()
    assert s.publisher.live == 0
    assert newer not in s.engines[0].versions
    with s.database.write() as c:
        decision = Decision(DecisionKind.STOP, "enough")
        experiments.finish(c, one, ExperimentState.STOPPED, decision, time.time())
    await s.publisher.tick()
    await s.publisher.tick()
    assert s.publisher.live == newer


async def test_a_canary_whose_files_are_broken_is_rejected_and_its_experiment_ends(
    stage: Callable[..., Stage],
) -> None:
    s = stage(1)
    tried = s.make()
    await s.publisher.tick()
    s.break_weights(tried)
    s.engines[0].load_error = "a tensor is not what its digest says"
    one = experiment_on(s, tried)
    await s.publisher.tick()
    assert s.states()[tried] == VersionState.REJECTED.value
    assert s.publisher.fault(tried) is not None
    with s.database.read() as c:
        assert experiments.get(c, "tab", one.id).state is ExperimentState.STOPPED
    assert s.publisher.live == 0
