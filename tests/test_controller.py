"""A controller at work on a real `serve`: runs on demand, webhooks, versions fetched; nothing when idle."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from onlinerl.client import Client, ControllerError
from onlinerl.interface import Feedback
from onlinerl.weights import directory
from tests.controllers import pushed
from tests.receivers import Receiver, receiving
from tests.servers import Served, alive, until

SECRET = "of-the-controller"
QUICK = {
    "train.batch": 4,
    "train.version_every": 1,
    "train.checkpoint_every": 1,
    "train.holdout": 0,
    "train.silence.floor": 0,
    # Steps of four samples go far; which band they keep is not what is looked at here.
    "train.guards.kl": 100,
    "train.lr": 1e-6,
    "policies.tab.joins.rest": 0,
}


@pytest.fixture(scope="module")
def receiver() -> Iterator[Receiver]:
    with receiving(SECRET) as one:
        yield one


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, receiver: Receiver) -> Iterator[Served]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CONTROLLER_KEY", SECRET)
        hook = f'webhooks=[{{url: "{receiver.url}", secret: CONTROLLER_KEY}}]'
        one = Served(tmp_path_factory.mktemp("controlled") / "home", hook).start()
    yield one
    one.stop()


@pytest.fixture
def controller(served: Served) -> Iterator[Client]:
    with Client(served.url, (served.home / "admin.key").read_text().strip()) as one:
        yield one


def trainers(served: Served) -> dict[int, int]:
    """Process id → resident bytes of every training process of this home."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it ended meanwhile
            if b"onlinerl.learning" not in (folder / "cmdline").read_bytes():
                continue
            if str(served.home).encode() in (folder / "environ").read_bytes():
                pages = int((folder / "statm").read_text().split()[1])
                found[int(folder.name)] = pages * os.sysconf("SC_PAGE_SIZE")
    return {pid: size for pid, size in found.items() if alive(pid)}


@pytest.mark.slow  # real runs start and end, three quarters of a minute
def test_runs_on_demand_and_no_training_process_when_idle(
    served: Served, controller: Client, receiver: Receiver, tmp_path: Path
) -> None:
    assert trainers(served) == {}
    ids = [served.complete(f"def f{n}(x):\n    return ", temperature=1.0).json()["id"] for n in range(8)]
    rated: list[Feedback] = [
        {"id": id, "event": "accepted" if n % 2 else "rejected"} for n, id in enumerate(ids)
    ]
    assert {one["status"] for one in controller.feedback(rated)} == {"matched"}

    run = controller.start_run("tab", QUICK, follow=True)["id"]
    until(lambda: trainers(served), 60, "the run has a process")
    with pytest.raises(ControllerError, match=f"409: run {run} of tab is") as refused:
        controller.start_run("tab")
    assert refused.value.status == 409

    def state() -> str:
        return controller.run("tab", run)["state"]

    until(lambda: controller.run("tab", run)["versions"] == [1, 2], 120, "it has made two versions")
    controller.pause_run("tab", run)
    until(lambda: state() == "paused", 60, "it is paused")
    largest = max(trainers(served).values())
    controller.resume_run("tab", run)
    until(lambda: state() == "running", 30, "it goes on")
    controller.stop_run("tab", run)
    until(lambda: state() == "stopped", 60, "it has stopped")
    until(lambda: not trainers(served), 20, "its process is gone")
    assert sum(trainers(served).values()) == 0
    assert largest > 100 << 20  # torch alone: what an idle trainer would cost
    done = controller.run("tab", run)
    assert (done["step"], done["alive"], done["metrics"]["samples"]) == (2, False, 4)

    # Its version is fetched, checked, made live.
    (version,) = [one for one in controller.versions("tab") if one["id"] == 2]
    copy = controller.download("tab", 2, tmp_path / "copy", digest=version["digest"])
    directory.verify(str(copy), version["digest"])
    assert controller.promote("tab", 2)["state"] == "live"
    until(lambda: served.version() == 2, 30, "the new version serves")

    # What was served elsewhere counts as what was served here.
    (taken,) = controller.push("tab", [pushed("elsewhere", version=2)])  # type: ignore[list-item]
    assert (taken["status"], taken["reason"]) == ("recorded", "")

    # And the webhook heard it all, in order, over the real server.
    until(lambda: len(receiver.taken) == 9, 20, "the last event")
    assert [notice["type"] for notice in receiver.taken] == [
        "run.pending",
        "run.running",
        "version.registered",
        "version.registered",
        "run.paused",
        "run.running",
        "run.stopped",
        "version.retired",
        "version.live",
    ]
    (told,) = controller.webhooks()
    assert (told["host"], told["policies"][0]["dropped"]) == ("127.0.0.1", 0)
    assert SECRET not in served.log()


@pytest.mark.slow
def test_a_run_that_is_stopped_before_it_began_leaves_no_process(served: Served, controller: Client) -> None:
    run = controller.start_run("tab")["id"]
    controller.stop_run("tab", run)
    until(lambda: controller.run("tab", run)["state"] == "stopped", 60, "it has stopped")
    until(lambda: not trainers(served), 60, "no process is left")
    assert controller.run("tab", run)["step"] == 0
