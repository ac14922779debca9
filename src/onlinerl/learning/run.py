"""A training run from its start to its end: the wiring, signals, and what is told to the store."""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from types import FrameType
from typing import Any

from onlinerl import base, config
from onlinerl.errors import OnlineRLError, RunBusy, SettingsError
from onlinerl.flow.channel import Channel
from onlinerl.flow.worker import WorkerGroup
from onlinerl.learning import cleaning
from onlinerl.learning.checkpoints import Checkpoint
from onlinerl.learning.control import Control
from onlinerl.learning.devices import threads_of
from onlinerl.learning.log import RunLog
from onlinerl.learning.receive import DataReceiver, newest
from onlinerl.learning.rewards import ComputeReward, RewardTable
from onlinerl.learning.trainer import Trainer, checkpoints_of, run_folder
from onlinerl.records import Run, RunState, Sample, Scored, VersionState
from onlinerl.store import interactions, runs, versions
from onlinerl.store.database import Database

LEFT_OUT = {
    "cold": "answers sampled below train.temperature_floor: let a share of the users explore "
    "(exploration.users), or have their client sample at temperature 1",
    "stale": "answers of versions that are too old (train.staleness)",
    "surplus": "silent answers beyond the share of shown ones that were rated",
    "crowd": "answers of users who had their share of a batch (trust.share)",
    "reward": "answers for which rewards.function failed",
    **cleaning.REASONS,
}
"""Why a row is dropped (`interactions.dropped`), for people. The reasons are an open set: others are told by
their own word."""

MIXED = "it went on with settings that are not those it began with"


def train(
    settings: config.Settings,
    policy: str,
    *,
    max_steps: int | None = None,
    follow: bool = False,
    id: int | None = None,
) -> Run:
    """Train `policy` until there is nothing left to learn from (see `Trainer`); returns the ended run.

    Registers the base model as version 0 where there is no version yet. Resumes a run whose process died,
    which goes on following, or ends at its last step, as it was started. `id` names the run that this
    process is for; no other is begun then.
    Raises RunBusy when a run is at work, GuardTripped when a step left its band, other errors of the tree;
    the run is marked as failed then, and the last good version stands.
    """
    if policy not in settings.policies:
        raise SettingsError(f"there is no policy {policy!r}; there are {', '.join(settings.policies)}")
    # A function that cannot be used is told before there is a run.
    table = RewardTable.of(settings.policies[policy].rewards, 0.0)
    database = Database.open(settings.database_url)
    try:
        base.ensure(settings, policy, database, same_model=False)
        with database.write() as c:
            run, resumed = runs.start(
                c,
                policy=policy,
                host=socket.gethostname(),
                pid=os.getpid(),
                settings=settings.policies[policy].model_dump_json(),
                tau_of=lambda c: interactions.tau(c, policy=policy, settings=settings.policies[policy]),
                now=time.time(),
                follow=follow,
                last_batch=max_steps,
                run=id,
            )
        control = Control(database, run)
        control.start()
        try:
            with RunLog(run_folder(settings, run.id), total=run.last_batch) as log, _signals(control):
                return _work(settings, policy, replace(table, tau=run.tau), control, log, resumed)
        finally:
            control.close()
    finally:
        database.close()


def outcome(settings: config.Settings, run: Run) -> list[str]:
    """What an ended run left, in sentences for the person who started it, and what can be done now."""
    database = Database.open(settings.database_url)
    try:
        with database.read() as c:
            made = [one for one in versions.list_(c, run.policy) if one.run == run.id]
            # A run that learned tells what it left out; one that found nothing, where everything went.
            dropped = interactions.dropped(c, policy=run.policy, run=run.id if run.step else None)
            waiting = interactions.counts(c, policy=run.policy).waiting
            live = versions.live(c, run.policy)
            others = changed(runs.settings(c, run.id), settings.policies[run.policy])
    finally:
        database.close()
    # They can differ only where the run was killed and went on.
    mixed = [f"{MIXED}: {'; '.join(others)}"] if others else []
    left_out = [
        f"left out{'' if run.step else ' so far'}: {number} "
        f"{LEFT_OUT.get(reason, f'answers dropped as {reason}')}"
        for reason, number in sorted(dropped.items())
    ]
    folder = run_folder(settings, run.id)
    numbers = (
        f"its numbers are in {folder / 'log.jsonl'}; `tensorboard --logdir {folder}` shows them, and "
        "docs/metrics.md tells what each says"
    )
    if made:
        last = made[-1]
        lines = [f"it made {', '.join(one.name for one in made)}"]
        if last.state is VersionState.CANDIDATE and settings.policies[run.policy].publish == "candidate":
            policy = f" --policy {run.policy}" if len(settings.policies) > 1 else ""
            lines.append(
                f"{last.name} is a candidate: `onlinerl versions promote {last.id}{policy}`, with the same "
                f"-c and --home, makes it live; until then runs start from {live.name}"
            )
        return [*lines, *mixed, *left_out, numbers]
    if run.step:
        return ["it made no version", *mixed, *left_out, numbers]
    lines = [
        "there was nothing to learn from: answers must be asked for and rated first (POST /v1/feedback, or "
        "`onlinerl simulate`)"
    ]
    if waiting:
        rest = settings.policies[run.policy].joins.rest
        lines = [f"{waiting} verdicts wait for the next run; a timeout rests {rest:g} s first (joins.rest)"]
    return [*lines, *mixed, *left_out]


def _work(
    settings: config.Settings,
    policy: str,
    table: RewardTable,
    control: Control,
    log: RunLog,
    resumed: bool,
) -> Run:
    mine = settings.policies[policy]
    run = control.run
    trainer = Trainer(control, settings, policy, table, log, threads=threads_of(mine.train))
    try:
        checkpoint = _resume(settings, control, trainer) if resumed else None
        trainer.prepare(checkpoint)
        with control.write() as c:
            interactions.release(c, run=run.id, after_batch=trainer.batch)
            runs.forget_steps(c, run=run.id, after_batch=trainer.batch)
        log.event(
            "resume" if resumed else "start",
            run=run.id,
            batch=trainer.batch,
            parent=run.parent,
            tau=run.tau,
            settings=mine.train.model_dump(mode="json"),
        )
        if resumed:
            with control.database.read() as c:
                others = changed(runs.settings(c, run.id), mine)
            if others:
                log.event("warning", batch=trainer.batch, text=f"{MIXED}: {'; '.join(others)}")
        receiver = DataReceiver(
            control,
            policy,
            mine,
            first_batch=trainer.batch + 1,
            last_batch=run.last_batch,
            follow=run.follow,
        )

        samples: Channel[Sample] = Channel.create("samples", capacity=mine.train.batch, item=Sample)
        scored: Channel[Scored] = Channel.create("scored", capacity=mine.train.batch, item=Scored)
        group = [
            receiver.start(output=samples),
            ComputeReward(table).start(input=samples, output=scored),
            trainer.start(input=scored),
        ]
        _wait(group, control)
    except RunBusy:
        raise  # another process has the run: its state is not ours to write
    except BaseException as error:  # goes on up; the store must know first that the run is over
        control.stop("failed")
        message = str(error) if isinstance(error, OnlineRLError) else f"{type(error).__name__}: {error}"
        _end(control, log, trainer, RunState.FAILED, message)
        raise
    if control.stopping:
        return _end(control, log, trainer, RunState.STOPPED, control.reason)
    message = trainer.message or _exhausted(control, trainer.batch)
    return _end(control, log, trainer, RunState.FINISHED, message)


def _exhausted(control: Control, done: int) -> str:
    """Why a run ended that nothing stopped."""
    last = control.run.last_batch
    if last is not None and done >= last:
        return f"step {done} was to be its last"
    with control.database.read() as c:
        waiting = interactions.counts(c, policy=control.run.policy).waiting
    if waiting:
        return f"no feedback is left that it may claim now; verdicts that wait: {waiting}"
    return "no feedback is left"


def changed(before: str, now: config.Policy) -> list[str]:
    """The settings of a policy (as JSON when its run began) that are others now, "name: old, now new".

    Those that one of the two versions of this program does not know were changed by nobody.
    """
    found: list[str] = []

    def compare(path: str, old: Mapping[str, Any], node: config.Node, new: Mapping[str, Any]) -> None:
        for name in type(node).model_fields:
            if name not in old:
                continue
            if isinstance(branch := getattr(node, name), config.Node):
                compare(f"{path}{name}.", old[name], branch, new[name])
            elif old[name] != new[name]:
                found.append(f"{path}{name}: {json.dumps(old[name])}, now {json.dumps(new[name])}")

    compare("", json.loads(before), now, now.model_dump(mode="json"))
    return found


def _resume(settings: config.Settings, control: Control, trainer: Trainer) -> Checkpoint | None:
    """Where to go on: the last checkpoint, or the run's last version if that is further."""
    run = control.run
    checkpoint = checkpoints_of(settings, run.id).latest()
    with control.database.read() as c:
        last = newest(c, run.policy, run.id, run.parent)
    if last.run == run.id and last.step > (checkpoint.batch if checkpoint else 0):
        trainer.resume_at(last)
        return None
    return checkpoint


def _wait(group: list[WorkerGroup], control: Control) -> None:
    """Until all have ended; raises the first failure, seen from the far end of the channels."""
    for stage in reversed(group):
        while not stage.wait(0.2):  # short, so that the main thread gets to see signals
            pass
    control.check()


def _end(control: Control, log: RunLog, trainer: Trainer, state: RunState, message: str) -> Run:
    with control.write() as c:
        runs.heartbeat(c, control.run, step=trainer.batch, now=time.time())
        ended = runs.finish(c, control.run, state, message)
    log.event("end", state=state.value, batch=trainer.batch, message=message)
    trainer.forget()
    return ended


@contextmanager
def _signals(control: Control) -> Iterator[None]:
    """The first SIGTERM or SIGINT asks the run to end after its step; a second one kills as ever."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def ask(number: int, _frame: FrameType | None) -> None:
        control.stop(f"{signal.Signals(number).name} received")
        signal.signal(number, before[signal.Signals(number)])

    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    for number in before:
        signal.signal(number, ask)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
