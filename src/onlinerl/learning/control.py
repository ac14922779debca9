"""What the threads of a run tell each other: that it lives, what somebody wants of it, that it must end."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from sqlalchemy.engine import Connection

from onlinerl.errors import RunBusy, StoreError
from onlinerl.records import Run
from onlinerl.store import runs
from onlinerl.store.database import Database

BEAT = 1.0
"""Seconds between two heartbeats: a rollback's wish to stop is seen within it."""


class Control:
    """Stop, pause, and the run's lease. One thread beats; the others ask."""

    def __init__(self, database: Database, run: Run) -> None:
        self.database = database
        self.run = run
        self.step = run.step
        self._stop = threading.Event()
        self._reason = ""
        self._paused = False
        self._lost: RunBusy | None = None
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="heartbeat", daemon=True)

    def start(self) -> None:
        """Begin to beat."""
        self._thread.start()

    def close(self) -> None:
        """Stop beating."""
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join(BEAT + 20.0)

    def stop(self, reason: str) -> None:
        """Ask the run to end after its current step; the first reason stays."""
        if not self._stop.is_set():
            self._reason = reason
            self._stop.set()

    @property
    def stopping(self) -> bool:
        """True once somebody asked to stop, or the run was lost to another process."""
        return self._stop.is_set()

    @property
    def reason(self) -> str:
        """Why it stops."""
        return self._reason

    @property
    def paused(self) -> bool:
        """True while somebody wants the run to pause."""
        return self._paused and not self.stopping

    def check(self) -> None:
        """Raises RunBusy when another process has the run: nothing may be written any more."""
        if self._lost is not None:
            raise self._lost

    @contextmanager
    def write(self) -> Iterator[Connection]:
        """A transaction in which the run is surely this process's and not ended; all its writes go through
        here. Raises RunBusy otherwise: a thread that was slow to hear of the end changes nothing after it."""
        with self.database.write() as c:
            runs.check(c, self.run)
            yield c

    def sleep(self, seconds: float) -> None:
        """Wait, but no longer than until somebody asks to stop."""
        self._stop.wait(seconds)

    def _beat(self) -> None:
        while not self._ended.wait(BEAT):
            try:
                with self.database.write() as c:
                    wish = runs.heartbeat(c, self.run, step=self.step, now=time.time())
            except RunBusy as error:
                self._lost = error
                self.stop(str(error))
                return
            except StoreError:
                continue  # a full disk or a long transaction of others: the next beat may get through
            self._paused = wish == "pause"
            if wish == "stop":
                self.stop("asked to stop")
