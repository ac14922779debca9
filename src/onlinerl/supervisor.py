"""Keeps the replicas running: `serve` has one supervisor for each."""

from __future__ import annotations

import asyncio
import os
import secrets
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from onlinerl import config
from onlinerl.engines.embedded import EmbeddedEngine
from onlinerl.errors import EngineError
from onlinerl.loop.run import SETTINGS_VARIABLE, child_environment
from onlinerl.observe import REPLICA_RESTARTS, REPLICAS, logger

SOCKET_LENGTH = 100
"""Longest path of a Unix socket; the kernel's own limit is 108 bytes."""
HEALTH = 2.0
"""Seconds between two questions to a replica whether it is well."""
SILENT = 60.0
"""Seconds without an answer after which a replica that answered before is killed."""
START = 300.0
"""Seconds that a replica may take until its first answer."""
STEADY = 30.0
"""A replica that lived so long starts again at once; one that died sooner waits longer each time."""
LONGEST_DELAY = 30.0
"""Most seconds before a replica is started again."""

log = logger(component="serve")


@contextmanager
def socket_folder() -> Iterator[Path]:
    """A folder that only this user can enter, with a path short enough for Unix sockets."""
    folder = Path(tempfile.mkdtemp(prefix="onlinerl-"))
    if len(os.fsencode(folder)) > SOCKET_LENGTH - 40:
        folder.rmdir()
        folder = Path(tempfile.mkdtemp(prefix="onlinerl-", dir="/tmp"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


class Supervisor:
    """Keeps one replica process running: starts it, asks how it is, kills it when mute, starts it again."""

    def __init__(
        self,
        policy: str,
        number: int,
        settings: config.Engine,
        *,
        sockets: Path,
        logs: Path,
        on_up: Callable[[str], None],
        on_down: Callable[[str], None],
    ) -> None:
        self.name = f"{policy}-{number}"
        self.policy = policy
        # a policy's name may be as long as a whole path may be
        self.socket = sockets / f"{secrets.token_hex(4)}.sock"
        self.log = logs / f"replica-{self.name}.log"
        self.engine = EmbeddedEngine(self.name, self.socket)
        self.pid: int | None = None
        self.up = False
        """Whether it has answered since its process started."""
        self._settings = settings
        self._on_up = on_up
        self._on_down = on_down

    async def run(self) -> None:
        """Until cancelled; then the process is asked to end, and made to."""
        died_soon = 0
        while True:
            started = time.monotonic()
            code = await self._live()
            self._on_down(self.name)
            died_soon = 0 if time.monotonic() - started > STEADY else died_soon + 1
            delay = min(0.1 * 2.0**died_soon, LONGEST_DELAY) if died_soon else 0.1
            REPLICA_RESTARTS.labels(self.policy).inc()
            log.warning(
                "replica ended", replica=self.name, code=code, again_in=round(delay, 1), log=str(self.log)
            )
            await asyncio.sleep(delay)

    async def _live(self) -> int:
        """One process, from its start to its end; its exit code."""
        self.socket.unlink(missing_ok=True)
        with self.log.open("ab") as output:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                *("-m", "onlinerl.replica", "--socket", str(self.socket), "--policy", self.policy),
                stdin=asyncio.subprocess.PIPE,  # never written to: its end tells the replica that we died
                stdout=output,
                stderr=output,
                env=child_environment({SETTINGS_VARIABLE: self._settings.model_dump_json()}),
                start_new_session=True,  # Ctrl-C is for us; answers must not be cut before they are drained
            )
        self.pid = process.pid
        watch = asyncio.create_task(self._watch(process))
        try:
            return await process.wait()
        finally:
            watch.cancel()
            if self.up:
                self.up = False
                REPLICAS.labels(self.policy).dec()
            if process.returncode is None:
                await _end(process)
            self.pid = None

    async def _watch(self, process: asyncio.subprocess.Process) -> None:
        """Report the first answer; kill the process when it has been mute for long."""
        heard = time.monotonic()
        while True:
            try:
                await self.engine.status()
            except EngineError:
                mute = time.monotonic() - heard
                if mute > (SILENT if self.up else START):
                    log.error("replica is mute: killed", replica=self.name, seconds=round(mute))
                    process.kill()
                    return
            else:
                heard = time.monotonic()
                if not self.up:
                    self.up = True
                    REPLICAS.labels(self.policy).inc()
                    self._on_up(self.name)
            await asyncio.sleep(HEALTH if self.up else 0.1)


async def _end(process: asyncio.subprocess.Process) -> None:
    if process.stdin is not None:
        process.stdin.close()
    try:
        async with asyncio.timeout(5):
            await process.wait()
    except TimeoutError:
        process.kill()
        await process.wait()
