"""A real `onlinerl serve` process on the built-in model, for tests that need all of it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx

from onlinerl.config import Settings, load_settings
from onlinerl.store.database import Database

ROOT = Path(__file__).parents[1]
OVERRIDES = ("policies.tab.engine.threads=1", "policies.tab.train.threads=1")


def environment() -> dict[str, str]:
    """This one, with this checkout's package and one thread."""
    return {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}


def onlinerl(*arguments: object, timeout: float = 60) -> subprocess.CompletedProcess[str]:
    """Run a verb to its end."""
    line = [sys.executable, "-m", "onlinerl.cli", *map(str, arguments)]
    return subprocess.run(line, env=environment(), capture_output=True, text=True, timeout=timeout)


def until(condition: Callable[[], Any], limit: float, what: str) -> float:
    """Seconds until the condition holds."""
    started = time.monotonic()
    while not condition():
        assert time.monotonic() - started < limit, f"not within {limit:.0f} s: {what}"
        time.sleep(0.02)
    return time.monotonic() - started


def alive(pid: int) -> bool:
    """Whether the process runs (a zombie does not)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


class Served:
    """`serve` on one home; may be killed and started again."""

    def __init__(self, home: Path, *overrides: str) -> None:
        self.home = home
        self.overrides = (*OVERRIDES, *overrides)
        self.settings: Settings = load_settings(overrides=self.overrides, home=home)
        self.output = ""
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, *, ready: bool = True) -> Served:
        """Start it; with `ready`, return when it can answer completions."""
        self.home.mkdir(parents=True, exist_ok=True)
        with (self.home.parent / "serve.out").open("ab") as output:
            self._process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "onlinerl.cli", "serve", "--home", str(self.home)),
                    *("--port", "0", "--feedback-port", "0", *self.overrides),
                ],
                env=environment(),
                stdout=output,
                stderr=output,
            )
        until(lambda: self._presence().get("pid") == self.pid or self.ended, 60, "serve listens")
        assert not self.ended, self.log()
        if ready:
            self.until_ready()
        return self

    def log(self) -> str:
        """What it printed so far."""
        return (self.home.parent / "serve.out").read_text()

    def _presence(self) -> dict[str, Any]:
        try:
            found: dict[str, Any] = json.loads((self.home / "serve.json").read_text())
        except FileNotFoundError:
            return {}
        return found

    @property
    def pid(self) -> int:
        """Of `serve`."""
        assert self._process is not None
        return self._process.pid

    @property
    def ended(self) -> bool:
        """Whether the process is gone."""
        return self._process is None or self._process.poll() is not None

    @property
    def url(self) -> str:
        """The inference API."""
        return str(self._presence()["url"])

    @property
    def feedback_url(self) -> str:
        """The feedback API."""
        return str(self._presence()["feedback_url"])

    @property
    def sockets(self) -> Path:
        """Folder of the replicas' sockets."""
        return Path(self._presence()["sockets"])

    def until_ready(self, limit: float = 90) -> float:
        """Wait for /ready."""

        def ready() -> bool:
            with contextlib.suppress(httpx.TransportError):
                return httpx.get(f"{self.url}/ready", timeout=5).status_code == 200
            return False

        return until(ready, limit, "serve is ready")

    def children(self) -> list[int]:
        """Process ids of its replicas (and of runs that it started)."""
        text = Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text()
        return [int(pid) for pid in text.split()]

    def replicas(self) -> list[int]:
        """Process ids of its replicas."""
        found = []
        for pid in self.children():
            with contextlib.suppress(FileNotFoundError):
                if b"onlinerl.replica" in Path(f"/proc/{pid}/cmdline").read_bytes():
                    found.append(pid)
        return found

    def complete(self, prompt: str = "def f(x):\n    return ", **fields: Any) -> httpx.Response:
        """One completion."""
        body = {"model": "tab", "prompt": prompt, "max_tokens": 8, **fields}
        return httpx.post(f"{self.url}/v1/completions", json=body, timeout=60)

    def version(self) -> int:
        """The version that a new request gets."""
        response = self.complete(max_tokens=1)
        assert response.status_code == 200, response.text
        return int(response.headers["x-onlinerl-version"].rpartition("@")[2])

    def rate(self, id: str, event: str = "accepted") -> httpx.Response:
        """One verdict."""
        return httpx.post(f"{self.feedback_url}/v1/feedback", json={"id": id, "event": event}, timeout=60)

    @contextlib.contextmanager
    def database(self) -> Iterator[Database]:
        """Its database, opened here."""
        database = Database.open(self.settings.database_url)
        try:
            yield database
        finally:
            database.close()

    def kill(self) -> None:
        """kill -9, and wait until it is gone."""
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    def stop(self, number: int = signal.SIGTERM, limit: float = 30) -> int:
        """Ask it to end; its exit code."""
        assert self._process is not None
        if self._process.poll() is None:
            self._process.send_signal(number)
        try:
            return self._process.wait(limit)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
            raise
