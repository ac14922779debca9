"""Runs: one at a time, held by a lease, resumed after a crash."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy.engine import Connection

from onlinerl.errors import Conflict, NotFound, RunBusy, SettingsError
from onlinerl.records import RUN_TRANSITIONS, Event, Run, RunState, Step
from onlinerl.store import interactions, runs, versions
from onlinerl.store.database import Database
from tests.store_helpers import base, claim, opened, shown, tell, version

HOST = socket.gethostname()


@pytest.fixture
def database(tmp_path: Path) -> Iterator[Database]:
    with opened(tmp_path) as database:
        yield database


@pytest.fixture
def c(database: Database) -> Iterator[Connection]:
    with database.write() as connection:
        base(connection)
        yield connection


def start(
    c: Connection, *, host: str = HOST, pid: int = os.getpid(), now: float = 1000.0, tau: float = 0.2
) -> tuple[Run, bool]:
    return runs.start(c, policy="tab", host=host, pid=pid, settings='{"a": 1}', tau_of=lambda c: tau, now=now)


def dead_pid() -> int:
    """The pid of a process that is no more."""
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait(30)
    return child.pid


def test_a_run_starts_from_the_live_version_and_holds_its_tau(c: Connection) -> None:
    versions.register(c, version(1))
    versions.promote(c, "tab", 1, actor="me")
    run, resumed = start(c)
    assert not resumed
    assert (run.state, run.parent, run.tau, run.pid, run.host) == (
        RunState.RUNNING,
        1,
        0.2,
        os.getpid(),
        HOST,
    )
    assert runs.settings(c, run.id) == '{"a": 1}'
    assert runs.active(c, "tab") == run
    assert runs.list_(c) == [run]


def test_no_live_version_no_run(c: Connection) -> None:
    with pytest.raises(NotFound, match="no live version"):
        runs.start(c, policy="other", host=HOST, pid=1, settings="", tau_of=lambda c: 0.0, now=0.0)


def test_a_second_start_names_the_running_one(c: Connection) -> None:
    run, _ = start(c)
    with pytest.raises(RunBusy, match=rf"run {run.id} of tab is running \(process {os.getpid()} on {HOST}"):
        start(c, now=1010.0)
    assert len(runs.list_(c, "tab")) == 1


def test_a_run_whose_process_is_gone_is_resumed_at_once(c: Connection) -> None:
    run, _ = start(c, pid=dead_pid())
    assert not runs.alive(run, 1000.5)
    again, resumed = start(c, now=1000.5, tau=0.9)
    assert resumed
    assert (again.id, again.parent, again.tau, again.pid) == (run.id, run.parent, 0.2, os.getpid())
    assert runs.alive(again, 1001.0)


def test_a_killed_child_is_noticed_even_before_it_is_waited_for(c: Connection) -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    run, _ = start(c, pid=child.pid)
    assert runs.alive(run, 1001.0)
    child.send_signal(signal.SIGKILL)
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # it is a zombie now
    assert not runs.alive(run, 1001.0)
    child.communicate(timeout=10)


def test_a_pid_that_belongs_to_another_process_now_is_a_crash(c: Connection) -> None:
    run, _ = start(c)
    if not run.pid_started:
        pytest.skip("this system does not tell when a process was started")
    assert runs.alive(run, 1001.0)
    assert not runs.alive(replace(run, pid_started="1"), 1001.0)


def test_a_run_on_another_host_is_resumed_when_its_lease_is_over(c: Connection) -> None:
    run, _ = start(c, host="elsewhere", pid=1)
    with pytest.raises(RunBusy, match="elsewhere"):
        start(c, now=1000.0 + runs.LEASE)
    again, resumed = start(c, now=1000.0 + runs.LEASE + 0.1)
    assert resumed
    assert again.id == run.id
    # the old owner comes back, and learns that the run is no longer its own
    for touch in (
        lambda: runs.heartbeat(c, run, step=5, now=1020.0),
        lambda: runs.finish(c, run, RunState.FINISHED, ""),
        lambda: runs.move(c, run, RunState.PAUSED),
    ):
        with pytest.raises(RunBusy, match="taken over"):
            touch()
    assert runs.get(c, "tab", run.id) == again


def test_heartbeats_keep_the_lease_and_bring_the_wish(c: Connection) -> None:
    run, _ = start(c, host="elsewhere")
    assert runs.heartbeat(c, run, step=3, now=1014.0) == ""
    with pytest.raises(RunBusy, match="step 3"):
        start(c, now=1020.0)
    runs.wish(c, "tab", run.id, "pause")
    assert runs.heartbeat(c, run, step=4, now=1016.0) == "pause"
    runs.move(c, run, RunState.PAUSED)
    runs.wish(c, "tab", run.id, "")
    assert runs.move(c, run, RunState.RUNNING).state is RunState.RUNNING
    runs.wish(c, "tab", run.id, "stop")
    with pytest.raises(Conflict, match="is stopping"):
        runs.wish(c, "tab", run.id, "pause")
    assert runs.heartbeat(c, run, step=5, now=1017.0) == "stop"
    with pytest.raises(SettingsError):
        runs.wish(c, "tab", run.id, "dance")


def test_a_crashed_run_that_should_stop_is_closed_and_a_new_one_begins(c: Connection) -> None:
    run, _ = start(c, pid=dead_pid())
    runs.wish(c, "tab", run.id, "stop")
    new, resumed = start(c)
    assert not resumed
    assert new.id == run.id + 1
    assert runs.get(c, "tab", run.id).state is RunState.STOPPED


@pytest.mark.parametrize("end", [RunState.FINISHED, RunState.STOPPED, RunState.FAILED])
def test_an_ended_run_stays_ended(c: Connection, end: RunState) -> None:
    run, _ = start(c)
    ended = runs.finish(c, run, end, "because")
    assert (ended.state, ended.message) == (end, "because")
    assert not RUN_TRANSITIONS[end]
    assert runs.active(c, "tab") is None
    with pytest.raises(RunBusy, match="closed"):
        runs.heartbeat(c, run, step=9, now=1001.0)
    with pytest.raises(Conflict, match="has ended"):
        runs.wish(c, "tab", run.id, "stop")
    assert start(c)[0].id == run.id + 1


def test_finish_wants_an_end(c: Connection) -> None:
    run, _ = start(c)
    with pytest.raises(Conflict):
        runs.finish(c, run, RunState.PAUSED, "")
    assert runs.get(c, "tab", run.id).state is RunState.RUNNING


def test_what_no_version_learned_from_goes_back_when_a_run_ends(c: Connection) -> None:
    for batch in (1, 2, 3):
        interactions.insert(c, [shown(f"n{batch}")])
        tell(c, f"n{batch}", Event.ACCEPTED)
    run, _ = start(c)
    for batch in (1, 2, 3):
        claim(c, run=run.id, batch=batch, limit=1)
    versions.register(c, version(1, parent=0, run=run.id, step=1))
    runs.finish(c, run, RunState.FAILED, "a guard tripped")
    assert [sample.id for sample in claim(c, run=99)] == ["n2", "n3"]


def test_a_version_that_does_not_say_its_step_keeps_all_samples_of_its_run(c: Connection) -> None:
    interactions.insert(c, [shown("n")])
    tell(c, "n", Event.ACCEPTED)
    run, _ = start(c)
    claim(c, run=run.id)
    versions.register(c, version(1, parent=0, run=run.id, step=0))
    runs.finish(c, run, RunState.FINISHED, "")
    assert claim(c, run=99) == []


def test_of_many_that_start_at_once_one_wins(database: Database) -> None:
    with database.write() as c:
        base(c)
    won: list[int] = []
    lost: list[str] = []

    def one() -> None:
        try:
            with database.write() as c:
                won.append(start(c)[0].id)
        except RunBusy as error:
            lost.append(str(error))

    threads = [threading.Thread(target=one) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(won) == 1
    assert len(lost) == 7
    assert all(f"run {won[0]} of tab" in text for text in lost)


def test_a_resumed_run_ends_where_it_would_have_ended(c: Connection) -> None:
    def again(**asked: Any) -> Run:
        return runs.start(
            c, policy="tab", host=HOST, pid=dead_pid(), settings="", tau_of=lambda _: 0.1, now=1000.0, **asked
        )[0]

    run = again(follow=True, last_batch=7)
    assert (run.follow, run.last_batch) == (True, 7)
    taken = again()
    assert (taken.id, taken.follow, taken.last_batch) == (run.id, True, 7)
    more = again(last_batch=9)
    assert (more.id, more.follow, more.last_batch) == (run.id, True, 9)


def test_steps_are_kept_by_batch_and_a_repeated_batch_replaces_its_numbers(c: Connection) -> None:
    run, _ = start(c)
    runs.add_step(c, run=run.id, batch=2, at=1002.0, numbers={"reward": 0.5})
    runs.add_step(c, run=run.id, batch=1, at=1001.0, numbers={"reward": 0.25, "kl": 1e-3})
    runs.add_step(c, run=run.id + 1, batch=1, at=1001.0, numbers={})
    runs.add_step(c, run=run.id, batch=2, at=1005.0, numbers={"reward": -0.5})
    assert runs.steps(c, run.id) == [
        Step(run.id, 1, 1001.0, {"reward": 0.25, "kl": 1e-3}),
        Step(run.id, 2, 1005.0, {"reward": -0.5}),
    ]
    assert runs.steps(c, run.id + 2) == []
    runs.forget_steps(c, run=run.id, after_batch=1)
    assert [step.batch for step in runs.steps(c, run.id)] == [1]
    assert len(runs.steps(c, run.id + 1)) == 1


def ask(c: Connection, now: float = 1000.0, **changes: Any) -> Run:
    return runs.request(c, policy="tab", host=HOST, settings='{"b": 2}', now=now, **changes)


def test_a_run_that_was_asked_for_waits_for_the_process_that_is_meant_for_it(c: Connection) -> None:
    asked = ask(c, follow=True, last_batch=7)
    assert (asked.state, asked.pid, asked.parent, asked.follow) == (RunState.PENDING, 0, 0, True)
    assert not runs.alive(asked, 1000.1)
    with pytest.raises(RunBusy, match=f"run {asked.id} of tab is pending"):
        ask(c)
    with pytest.raises(RunBusy, match="about to start"):
        start(c, now=1001.0)
    begun, resumed = runs.start(
        c,
        policy="tab",
        host=HOST,
        pid=os.getpid(),
        settings="",
        tau_of=lambda c: 0.3,
        now=1002.0,
        run=asked.id,
    )
    assert not resumed
    assert (begun.id, begun.state, begun.tau, begun.pid) == (asked.id, RunState.RUNNING, 0.3, os.getpid())
    assert (begun.follow, begun.last_batch) == (True, 7)
    assert runs.settings(c, asked.id) == '{"b": 2}'
    with pytest.raises(RunBusy, match="is running"):
        ask(c, 1003.0)


def test_one_that_nobody_begins_is_taken_by_the_next_process(c: Connection) -> None:
    asked = ask(c)
    begun, _ = start(c, now=1000.1 + runs.PATIENCE)
    assert begun.id == asked.id
    assert runs.settings(c, asked.id) == '{"a": 1}'


def test_one_that_is_stopped_before_it_began_is_over_and_its_process_begins_no_other(c: Connection) -> None:
    asked = ask(c)
    assert runs.wish(c, "tab", asked.id, "stop").state is RunState.STOPPED
    with pytest.raises(RunBusy, match="was stopped before"):
        runs.start(
            c, policy="tab", host=HOST, pid=1, settings="", tau_of=lambda c: 0.0, now=1001.0, run=asked.id
        )
    assert [run.id for run in runs.list_(c)] == [asked.id]
    assert ask(c).id > asked.id


def test_the_newest_step(c: Connection) -> None:
    run, _ = start(c)
    assert runs.last_step(c, run.id) is None
    for batch in (2, 1):
        runs.add_step(c, run=run.id, batch=batch, at=1.0, numbers={"reward": float(batch)})
    assert runs.last_step(c, run.id) == Step(run=run.id, batch=2, at=1.0, numbers={"reward": 2.0})
