"""The ring closed by `serve` alone: feedback arrives, a run starts by itself, its version goes live."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from onlinerl.records import Run, RunState, VersionState
from onlinerl.store import runs, versions
from tests.servers import Served, alive, until

pytestmark = pytest.mark.slow

TRIGGERED = (
    "policies.tab.publish=immediately",
    "policies.tab.trigger.feedback=24",
    "policies.tab.train.batch=4",
    "policies.tab.train.version_every=2",
    "policies.tab.train.checkpoint_every=1",
    "policies.tab.train.holdout=0",
    "policies.tab.train.silence.floor=0",
    # Steps of four samples go far; which band they keep is not what is looked at here.
    "policies.tab.train.guards.kl=100",
    "policies.tab.train.lr=1e-6",
    "policies.tab.joins.rest=0",
)


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    one = Served(tmp_path / "home", *TRIGGERED).start()
    yield one
    one.stop()


def rate_some(served: Served, count: int) -> None:
    for number in range(count):
        answer = served.complete(f"def f{number}(x):\n    return ", temperature=1.0)
        assert answer.status_code == 200
        event = "accepted" if number % 2 else "rejected"
        assert served.rate(answer.json()["id"], event).json()["status"] == "matched"


def the_run(served: Served) -> Run | None:
    with served.database() as database, database.read() as c:
        found = runs.list_(c, "tab")
    assert len(found) <= 1
    return found[0] if found else None


def state(served: Served, wanted: RunState) -> bool:
    run = the_run(served)
    return run is not None and run.state is wanted


def test_feedback_becomes_a_live_version_although_the_run_is_killed_on_the_way(served: Served) -> None:
    rate_some(served, 48)
    until(lambda: (run := the_run(served)) is not None and run.step >= 1, 120, "a run has done a step")
    run = the_run(served)
    assert run is not None
    os.kill(run.pid, signal.SIGKILL)
    until(lambda: not alive(run.pid), 5, "the run's process is gone")
    assert served.complete().status_code == 200
    until(lambda: state(served, RunState.FINISHED), 120, "the run was taken up again and finished")
    ended = the_run(served)
    assert ended is not None
    assert ended.pid != run.pid
    until(lambda: served.version() > 0, 30, "its version serves")
    with served.database() as database, database.read() as c:
        live = versions.live(c, "tab")
    assert live.state is VersionState.LIVE
    assert live.run == run.id
