"""Training runs: one at a time for a policy, held by a lease, resumed after a crash.

A run that the controller asked for is pending until a process begins it; `loop.trigger` starts that process.

The process that trains owns its run by (host, pid). It must say that it lives (`heartbeat`) before LEASE is
over; then, or when its process is gone from this host, the next `start` gets the same run back. Whoever
lost a run is told by RunBusy at its next heartbeat and must not write anything more.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection, Row

from onlinerl.errors import Conflict, NotFound, RunBusy, SettingsError
from onlinerl.records import RUN_TRANSITIONS, Run, RunState, Step
from onlinerl.store import versions
from onlinerl.store.schema import run_changes
from onlinerl.store.schema import runs as table
from onlinerl.store.schema import steps as steps_table

LEASE = 15.0
"""Seconds after its last heartbeat in which nobody else may take a run."""
PATIENCE = 60.0
"""Seconds that a pending run waits for the process meant for it; then any other may begin it."""
_UNFINISHED = tuple(state.value for state, following in RUN_TRANSITIONS.items() if following)
_WISHES = ("", "stop", "pause")


def request(
    c: Connection,
    *,
    policy: str,
    host: str,
    settings: str,
    now: float,
    follow: bool = False,
    last_batch: int | None = None,
) -> Run:
    """Ask for a run from the live version: it is pending until a process begins it.

    Raises RunBusy naming the run that there is, also one that waits to be carried on after a crash;
    NotFound when the policy has no live version.
    """
    row = _active_row(c, policy)
    if row is not None:
        raise RunBusy(f"run {row.id} of {policy} is {row.state} (step {row.step}): wait for it or stop it")
    return _insert(
        c,
        policy=policy,
        state=RunState.PENDING,
        now=now,
        host=host,
        pid=0,
        pid_started="",
        tau=0.0,
        settings=settings,
        follow=follow,
        last_batch=last_batch,
    )


def start(
    c: Connection,
    *,
    policy: str,
    host: str,
    pid: int,
    settings: str,
    tau_of: Callable[[Connection], float],
    now: float,
    follow: bool = False,
    last_batch: int | None = None,
    run: int | None = None,
) -> tuple[Run, bool]:
    """Begin a run from the live version, or take over a crashed one: (run, whether it is resumed).

    A resumed run keeps its parent and its τ, and ends where it would have ended: `follow` adds to what it
    was started with, `last_batch` replaces it. A crashed run that was told to stop is closed, and a new one
    begins. `run` names the pending or crashed one that the process is for: no other is begun then.
    Raises RunBusy naming a run that lives, or when `run` is over; NotFound when the policy has no live
    version.
    """
    row = _active_row(c, policy)
    if run is not None and (row is None or row.id != run or row.wish == "stop"):
        raise RunBusy(f"run {run} of {policy} was stopped before its process was there")
    if row is not None and row.state == RunState.PENDING.value and row.wish != "stop":
        if run is None and now - row.created_at <= PATIENCE:
            raise RunBusy(f"run {row.id} of {policy} is about to start: wait for it or stop it first")
        _set(
            c,
            row.id,
            host=host,
            pid=pid,
            pid_started=_started(host, pid),
            heartbeat_at=now,
            tau=tau_of(c),
            settings=row.settings if run is not None else settings,
        )
        _move(c, row, RunState.RUNNING)
        return get(c, policy, row.id), False
    if row is not None:
        if alive(_run(row), now):
            raise RunBusy(
                f"run {row.id} of {policy} is {row.state} "
                f"(process {row.pid} on {row.host}, step {row.step}): wait for it or stop it first"
            )
        if row.wish != "stop":
            _set(
                c,
                row.id,
                host=host,
                pid=pid,
                pid_started=_started(host, pid),
                heartbeat_at=now,
                follow=row.follow or follow,
                last_batch=row.last_batch if last_batch is None else last_batch,
            )
            _move(c, row, RunState.RUNNING)
            return get(c, policy, row.id), True
        _close(c, row, RunState.STOPPED, "told to stop; its process had died")
    made = _insert(
        c,
        policy=policy,
        state=RunState.RUNNING,
        now=now,
        host=host,
        pid=pid,
        pid_started=_started(host, pid),
        tau=tau_of(c),
        settings=settings,
        follow=follow,
        last_batch=last_batch,
    )
    return made, False


def heartbeat(c: Connection, run: Run, *, step: int, now: float) -> str:
    """Say that the run lives and how many batches are done; returns the wish: "", "stop" or "pause".

    Raises RunBusy when another process has taken the run over, or somebody closed it.
    """
    _own(c, run)
    _set(c, run.id, heartbeat_at=now, step=step)
    return get(c, run.policy, run.id).wish


def check(c: Connection, run: Run) -> None:
    """Raises RunBusy unless the run goes on and is the process's that `run` names."""
    _own(c, run)


def move(c: Connection, run: Run, to: RunState) -> Run:
    """Running ⇄ paused, by the process that owns it. Raises RunBusy as `heartbeat` does, Conflict."""
    row = _own(c, run)
    _allow(row, to)
    _move(c, row, to)
    return get(c, run.policy, run.id)


def finish(c: Connection, run: Run, state: RunState, message: str) -> Run:
    """End a run as finished, stopped or failed; what no surviving version learned from is given back.

    `run` is as it was read: if another process has taken it over since, RunBusy is raised. Register the
    run's last version first.
    """
    row = _own(c, run)
    _close(c, row, state, message)
    return get(c, run.policy, run.id)


def wish(c: Connection, policy: str, run: int, wish: str) -> Run:
    """Ask a run to stop or to pause, or ("") take that back. Raises NotFound, Conflict for an ended run.

    One that no process has begun yet stops here and now.
    """
    if wish not in _WISHES:
        raise SettingsError(f"a run can be asked to 'stop' or 'pause', not {wish!r}")
    current = get(c, policy, run)
    if not RUN_TRANSITIONS[current.state]:
        raise Conflict(f"run {run} of {policy} has ended: it is {current.state}")
    if current.wish == "stop" and wish != "stop":
        raise Conflict(f"run {run} of {policy} is stopping")
    _set(c, run, wish=wish)
    if wish == "stop" and current.state is RunState.PENDING:
        row = _active_row(c, policy)
        assert row is not None
        _close(c, row, RunState.STOPPED, "stopped before it began")
    return get(c, policy, run)


def get(c: Connection, policy: str, run: int) -> Run:
    """One run. Raises NotFound."""
    row = c.execute(sa.select(table).where(table.c.policy == policy, table.c.id == run)).first()
    if row is None:
        raise NotFound(f"the policy {policy} has no run {run}")
    return _run(row)


def settings(c: Connection, run: int) -> str:
    """The settings that the run was started with, as JSON. Raises NotFound."""
    text = c.execute(sa.select(table.c.settings).where(table.c.id == run)).scalar()
    if text is None:
        raise NotFound(f"there is no run {run}")
    return str(text)


def list_(c: Connection, policy: str | None = None) -> list[Run]:
    """All runs, or those of one policy, by id."""
    query = sa.select(table).order_by(table.c.id)
    if policy is not None:
        query = query.where(table.c.policy == policy)
    return [_run(row) for row in c.execute(query)]


def active(c: Connection, policy: str) -> Run | None:
    """The run that has not ended, also when its process died (`alive` tells); None: there is none."""
    row = _active_row(c, policy)
    return None if row is None else _run(row)


def add_step(c: Connection, *, run: int, batch: int, at: float, numbers: Mapping[str, float]) -> None:
    """Keep what a batch measured. A resumed run repeats batches: the later numbers replace the earlier."""
    key = (steps_table.c.run == run) & (steps_table.c.batch == batch)
    values = {"at": at, "numbers": json.dumps(dict(numbers))}
    if c.execute(steps_table.update().where(key).values(values)).rowcount == 0:
        c.execute(steps_table.insert().values(run=run, batch=batch, **values))


def forget_steps(c: Connection, *, run: int, after_batch: int) -> None:
    """Take back the numbers of batches beyond `after_batch`: a resumed run may never come to them again."""
    c.execute(steps_table.delete().where(steps_table.c.run == run, steps_table.c.batch > after_batch))


def steps(c: Connection, run: int) -> list[Step]:
    """What the batches of a run measured, by batch; empty where there is no such run."""
    query = sa.select(steps_table).where(steps_table.c.run == run).order_by(steps_table.c.batch)
    return [
        Step(run=row.run, batch=row.batch, at=row.at, numbers=json.loads(row.numbers))
        for row in c.execute(query)
    ]


def last_step(c: Connection, run: int) -> Step | None:
    """What the newest batch of a run measured; None: it has done none."""
    newest = sa.select(steps_table).where(steps_table.c.run == run).order_by(steps_table.c.batch.desc())
    row = c.execute(newest.limit(1)).first()
    if row is None:
        return None
    return Step(run=row.run, batch=row.batch, at=row.at, numbers=json.loads(row.numbers))


def alive(run: Run, now: float) -> bool:
    """Whether the run's process lives, as far as can be seen from this host."""
    if not RUN_TRANSITIONS[run.state] or now - run.heartbeat_at > LEASE:
        return False
    if run.host != socket.gethostname():
        return True  # cannot be seen from here: the lease alone tells
    started = _started(run.host, run.pid)
    if started == "gone":
        return False
    # A pid is given to another process one day; the time at which it was started tells the two apart.
    return not (started and run.pid_started and started != run.pid_started)


# ------------------------------------------------------------------------------------------- helpers


def _active_row(c: Connection, policy: str) -> Row[Any] | None:
    row: Row[Any] | None = c.execute(
        sa.select(table).where(table.c.policy == policy, table.c.state.in_(_UNFINISHED))
    ).first()
    return row


def _own(c: Connection, run: Run) -> Row[Any]:
    row = _active_row(c, run.policy)
    if row is None or row.id != run.id:
        raise RunBusy(f"run {run.id} of {run.policy} was closed by somebody else")
    if (row.host, row.pid) != (run.host, run.pid):
        raise RunBusy(f"run {run.id} of {run.policy} was taken over by process {row.pid} on {row.host}")
    return row


def _allow(row: Row[Any], to: RunState) -> None:
    if to not in RUN_TRANSITIONS[RunState(row.state)]:
        raise Conflict(f"run {row.id} of {row.policy} is {row.state} and cannot become {to}")


def _close(c: Connection, row: Row[Any], state: RunState, message: str) -> None:
    _allow(row, state)
    if RUN_TRANSITIONS[state]:
        raise Conflict(f"{state} is not an end of run {row.id}")
    _move(c, row, state, message)
    versions.release_unlearned(c, row.id)


def _insert(c: Connection, *, policy: str, state: RunState, now: float, **values: object) -> Run:
    parent = versions.live(c, policy).id
    result = c.execute(
        table.insert().values(
            policy=policy,
            state=state.value,
            parent=parent,
            created_at=now,
            heartbeat_at=now,
            step=0,
            wish="",
            message="",
            **values,
        )
    )
    key = result.inserted_primary_key
    if key is None:
        raise AssertionError("the database gave the run no id")
    made = get(c, policy, key[0])
    _note(c, made, "", state, "")
    return made


def _move(c: Connection, row: Row[Any], to: RunState, message: str = "") -> None:
    """Into another state, with the row of history that webhooks are told from; `row` is as it was before."""
    _set(c, row.id, state=to.value, message=message or row.message)
    _note(c, get(c, row.policy, row.id), row.state, to, message)


def _note(c: Connection, run: Run, before: str, after: RunState, message: str) -> None:
    c.execute(
        run_changes.insert().values(
            at=time.time(),
            policy=run.policy,
            run=run.id,
            from_state=before,
            to_state=after.value,
            step=run.step,
            message=message,
        )
    )


def _set(c: Connection, run: int, **values: object) -> None:
    c.execute(table.update().where(table.c.id == run).values(**values))


def _started(host: str, pid: int) -> str:
    """When that process was started, in the kernel's words; "gone" if it is, "" where nobody can tell."""
    if host != socket.gethostname():
        return ""
    if Path("/proc/self/stat").exists():
        try:
            # The second field is the program's name in brackets and may hold anything; count behind it.
            fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            return "gone"
        return "gone" if fields[0] in ("Z", "X") else fields[19]
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return "gone"
    except PermissionError:
        pass  # it lives, as another user
    return ""


def _run(row: Row[Any]) -> Run:
    return Run(
        policy=row.policy,
        id=row.id,
        state=RunState(row.state),
        parent=row.parent,
        created_at=row.created_at,
        heartbeat_at=row.heartbeat_at,
        host=row.host,
        pid=row.pid,
        pid_started=row.pid_started,
        step=row.step,
        tau=row.tau,
        wish=row.wish,
        message=row.message,
        follow=row.follow,
        last_batch=row.last_batch,
    )
