"""When a policy learns: the watch that starts runs, those that were asked for and those that are due, and
starts those again whose process died."""

from __future__ import annotations

import asyncio
import math
import subprocess
import time
from dataclasses import dataclass

from sqlalchemy.engine import Connection

from onlinerl import config
from onlinerl.config import Settings
from onlinerl.errors import RunError, StoreError
from onlinerl.loop import run as launcher
from onlinerl.observe import ANSWERS, DIFFERENCE, LEFT_OUT, RUN_BATCHES, RUNNING, RUNS, logger
from onlinerl.records import Run, RunState
from onlinerl.store import charts, experiments, interactions, runs, tallies
from onlinerl.store.database import Database

RESTARTS = 5
"""A run whose process dies so often without getting one step further is given up."""
FIRST_DELAY = 1.0
"""Seconds before the first restart; doubled each time, up to LONGEST_DELAY."""
LONGEST_DELAY = 60.0
RECOUNT = 10.0
"""Seconds between two looks at what is counted for metrics alone."""

log = logger(component="trigger")


@dataclass(frozen=True, slots=True)
class Window:
    """Verdicts of one stretch of time."""

    verdicts: int
    accepted: int


def drift(recent: Window, before: Window) -> float:
    """The two-proportion z statistic of `recent` against `before`, pooled variance; 0 where it is undefined.

    z = (p₁ − p₂) / √(p(1−p)(1/n₁ + 1/n₂)), p the accept rate of both together.
    """
    if not recent.verdicts or not before.verdicts:
        return 0.0
    pooled = (recent.accepted + before.accepted) / (recent.verdicts + before.verdicts)
    variance = pooled * (1 - pooled) * (1 / recent.verdicts + 1 / before.verdicts)
    if variance == 0:
        return 0.0
    gap = recent.accepted / recent.verdicts - before.accepted / before.verdicts
    return gap / math.sqrt(variance)


def due(waiting: int, recent: Window, before: Window, settings: config.Trigger) -> str | None:
    """Why a run should start now, "feedback" or "drift"; None: it should not.

    `waiting` counts the samples that a run could claim. Drift needs both windows full.
    """
    if not waiting:
        return None
    if settings.feedback is not None and waiting >= settings.feedback:
        return "feedback"
    full = min(recent.verdicts, before.verdicts) >= settings.window
    if settings.drift is not None and full and abs(drift(recent, before)) >= settings.drift:
        return "drift"
    return None


class Trigger:
    """Watches one policy: `run()` until cancelled, or `tick()` by hand."""

    def __init__(self, policy: str, settings: Settings, database: Database) -> None:
        self.policy = policy
        self._settings = settings
        self._trigger = settings.policies[policy].trigger
        self._database = database
        self._child: subprocess.Popen[bytes] | None = None
        self._not_before = 0.0
        self._failures = 0
        self._waiting_at_start = 0
        self._drifted_at = 0
        """Verdicts that there were when drift last started a run."""
        self._crash = (-1, -1)
        """Run and step at which the watched run was last found dead."""
        self._restarts = 0
        self._restart_at = 0.0
        self._recount_at = 0.0
        self._wake = asyncio.Event()

    def wake(self) -> None:
        """Look now: somebody asked for a run."""
        self._wake.set()

    async def run(self) -> None:
        """Look every `trigger.interval` seconds, and when woken."""
        while True:
            self._wake.clear()
            try:
                await self.tick(time.time())
            except (StoreError, RunError) as error:  # isolated: the next look may find the disk free again
                log.warning("trigger failed", policy=self.policy, error=str(error))
            try:
                async with asyncio.timeout(self._trigger.interval):
                    await self._wake.wait()
            except TimeoutError:
                pass

    async def tick(self, now: float) -> None:
        """One look at time `now`: start a run again whose process died, or start one that is due."""
        await asyncio.to_thread(self._look, now)

    def _tell(self, c: Connection) -> None:
        """What only the store knows, as metrics: other processes write it."""
        for one in interactions.report(c, policy=self.policy):
            for outcome in tallies.NAMES:
                ANSWERS.labels(self.policy, str(one.version), outcome).set(getattr(one, outcome))
        newest = charts.recent_runs(c, policy=self.policy, limit=1)
        RUN_BATCHES.labels(self.policy).set(newest[0].step if newest else 0)
        experiment = experiments.running(c, self.policy)
        reading = None if experiment is None else charts.last_reading(c, experiment.id)
        for bound in ("low", "estimate", "high"):
            DIFFERENCE.labels(self.policy, bound).set(reading.numbers[bound] if reading else math.nan)

    def _look(self, now: float) -> None:
        if now >= self._recount_at:
            self._recount_at = now + RECOUNT
            with self._database.read() as c:
                left_out = interactions.dropped(c, policy=self.policy)
                self._tell(c)
            for why, number in left_out.items():
                LEFT_OUT.labels(self.policy, why).set(number)
        code = None
        if self._child is not None:
            code = self._child.poll()
            if code is None:
                return
            self._child = None
        with self._database.read() as c:
            active = runs.active(c, self.policy)
            counts = interactions.counts(c, policy=self.policy)
            windows = ((0, 0), (0, 0))
            if self._trigger.drift is not None:
                windows = interactions.accept_window(c, policy=self.policy, window=self._trigger.window)
        if code is not None and active is None:
            self._ended(code, counts.waiting, now)
        RUNNING.labels(self.policy).set(active is not None)
        if active is not None:
            if active.state is RunState.PENDING or not runs.alive(active, now):
                self._carry_on(active, now)
            return
        verdicts = counts.accepted + counts.rejected + counts.timeout
        recent, before = (Window(*window) for window in windows)
        if verdicts - self._drifted_at < self._trigger.window:
            before = Window(0, 0)  # that drift has had its run; wait for windows that are new
        reason = due(counts.waiting, recent, before, self._trigger)
        if reason is None or now < self._not_before:
            return
        if reason == "drift":
            self._drifted_at = verdicts
        self._waiting_at_start = counts.waiting
        self._launch(reason, self._settings, follow=self._trigger.follow, waiting=counts.waiting)

    def _ended(self, code: int, waiting: int, now: float) -> None:
        # A run that fails, or that leaves all the feedback where it was, must not be started every second.
        fruitless = code != 0 or waiting >= self._waiting_at_start
        self._failures = self._failures + 1 if fruitless else 0
        delay = max(self._trigger.cooldown, _delay(self._failures) if fruitless else 0.0)
        self._not_before = now + delay
        log.info("run ended", policy=self.policy, code=code, next_in=round(delay, 1))

    def _carry_on(self, dead: Run, now: float) -> None:
        """Start the process of a run that has none: it was asked for, or its process died."""
        if dead.wish == "stop":
            self._finish(dead, RunState.STOPPED, "asked to stop; it had no process")
            return
        asked = dead.state is RunState.PENDING
        if self._crash != (dead.id, dead.step):
            self._crash = (dead.id, dead.step)
            self._restarts = -1 if asked else 0  # of one that was asked for the first is no restart
            self._restart_at = now
        if now < self._restart_at:
            return
        if self._restarts >= RESTARTS:
            self._finish(
                dead,
                RunState.FAILED,
                f"its process died {RESTARTS + 1} times at step {dead.step}; see its log",
            )
            return
        self._restarts += 1
        self._restart_at = now + _delay(self._restarts)
        # It follows if it should: the run itself knows.
        reason = "asked" if asked else "crash"
        self._launch(reason, self._as_started(dead), follow=False, run=dead.id, step=dead.step)

    def _as_started(self, run: Run) -> Settings:
        """The settings with the policy's as they were when the run began: it goes on as it was."""
        with self._database.read() as c:
            policy = config.Policy.model_validate_json(runs.settings(c, run.id))
        policies = {**self._settings.policies, self.policy: policy}
        return self._settings.model_copy(update={"policies": policies})

    def _launch(
        self, reason: str, settings: Settings, *, follow: bool, run: int | None = None, **details: int
    ) -> None:
        self._child = launcher.start(settings, self.policy, follow=follow, run=run)
        RUNS.labels(self.policy, reason).inc()
        RUNNING.labels(self.policy).set(1)
        log.info("run started", policy=self.policy, reason=reason, pid=self._child.pid, run=run, **details)

    def _finish(self, run: Run, state: RunState, message: str) -> None:
        with self._database.write() as c:
            runs.finish(c, run, state, message)
        log.warning("run closed", policy=self.policy, run=run.id, state=state.value, message=message)


def _delay(attempt: int) -> float:
    """Seconds before the next attempt: doubling, bounded."""
    return min(FIRST_DELAY * 2.0 ** (attempt - 1), LONGEST_DELAY)
