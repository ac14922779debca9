"""`onlinerl serve` as a process, on the built-in model: it serves, survives what is done to it, ends well.

The tests share one server and leave it running; each of them stands by itself.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import stat
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from onlinerl import config, supervisor
from onlinerl.engines import embedded
from onlinerl.store import versions
from tests.servers import OVERRIDES, Served, alive, onlinerl, until
from tests.versions import make_version


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    one = Served(tmp_path_factory.mktemp("serve") / "home").start()
    yield one
    if not one.ended:
        one.stop()


@pytest.fixture(autouse=True)
def running(served: Served) -> None:
    if served.ended:
        served.start()
    served.until_ready()


def test_complete_rate_and_list(served: Served) -> None:
    answer = served.complete()
    assert answer.status_code == 200
    assert answer.json()["system_fingerprint"] == f"tab@{served.version()}"
    assert served.rate(answer.json()["id"]).json() == {"status": "matched"}
    assert served.rate(answer.json()["id"]).json() == {"status": "duplicate"}
    listed = json.loads(onlinerl("versions", "list", "--json", "--home", served.home).stdout)
    assert (listed[0]["policy"], listed[0]["id"], listed[0]["parent"]) == ("tab", 0, None)


def test_the_admin_key_is_made_once_and_only_for_its_owner(served: Served) -> None:
    file = served.home / "admin.key"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    key = file.read_text().strip()
    assert served.log().count(key) == 1
    path = f"{served.url}/admin/v1/policies/tab/versions"
    assert httpx.get(path).status_code == 401
    assert httpx.get(path, headers={"authorization": f"Bearer {key}"}).status_code == 200


def test_what_it_prints_says_what_to_do_next(served: Served) -> None:
    until(lambda: "ready. Try" in served.log(), 10, "it says that it is ready")
    assert f"{served.url}/v1/completions" in served.log()
    assert f"{served.feedback_url}/v1/feedback" in served.log()
    assert f"onlinerl train --home {served.home} {' '.join(OVERRIDES)} " in served.log()


def test_simulate_needs_only_the_home(served: Served) -> None:
    options = ["--requests", 2, "--users", 1, "--speed", 50, "--json", "--home", served.home]
    report = json.loads(onlinerl("simulate", *options).stdout)
    assert (report["requests"], report["errors"]) == (2, 0)


def test_developers_whom_nobody_answers_are_a_failure(served: Served) -> None:
    options = ["--requests", 2, "--users", 1, "--model", "tab@999", "--home", served.home]
    done = onlinerl("simulate", *options)
    assert done.returncode == 1
    assert "none of the 2 requests was answered (HTTP 404): name one" in done.stderr


def test_replicas_are_listed(served: Served) -> None:
    (one,) = json.loads(onlinerl("replicas", "list", "--json", "--home", served.home).stdout)
    assert (one["name"], one["policy"], one["state"]) == ("tab-0", "tab", "up")
    assert served.version() in one["versions"]
    assert stat.S_IMODE(served.sockets.stat().st_mode) == 0o700


class Streams:
    """Clients that stream answers one after the other; what they got."""

    def __init__(self, served: Served, count: int) -> None:
        self.answers: list[tuple[float, float, str]] = []
        """Start, end, fingerprint of each."""
        self.failures: list[str] = []
        self._served = served
        self._done = threading.Event()
        self._url = f"{served.url}/v1/completions"
        self._threads = [threading.Thread(target=self._work) for _ in range(count)]

    def __enter__(self) -> Streams:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        for thread in self._threads:
            thread.join()

    def _work(self) -> None:
        body = {"model": "tab", "prompt": "def f(x):\n    return ", "max_tokens": 12, "stream": True}
        with httpx.Client(timeout=60) as client:
            while not self._done.is_set():
                started, prints, text = time.monotonic(), set(), ""
                with client.stream("POST", self._url, json=body) as response:
                    for line in response.iter_lines():
                        text += line
                        if line.startswith("data: {"):
                            prints.add(json.loads(line[6:]).get("system_fingerprint"))
                if response.status_code != 200 or "[DONE]" not in text or len(prints) != 1:
                    self.failures.append(f"{response.status_code} {prints} {text[-300:]}")
                else:
                    self.answers.append((started, time.monotonic(), prints.pop()))


def test_switch_and_roll_back_under_streams(served: Served) -> None:
    before = served.version()
    with served.database() as database:
        made = make_version(served.settings, database, parent=before)
        with Streams(served, 8) as streams:
            until(lambda: len(streams.answers) >= 8, 30, "the streams run")
            done = onlinerl("versions", "promote", made.id, "--home", served.home)
            assert done.returncode == 0, done.stderr
            until(lambda: streams.answers[-1][2] == made.name, 30, "the new version serves")
            switched = time.monotonic()
            until(lambda: sum(start > switched for start, _, _ in streams.answers) >= 16, 30, "they go on")
            with database.write() as c:
                versions.rollback(c, "tab", actor="test")
            written = time.monotonic()
            until(lambda: any(start > written + 1 for start, _, _ in streams.answers), 30, "they go on")
    assert streams.failures == []
    names = {f"tab@{before}", made.name}
    assert {name for _, _, name in streams.answers} == names
    assert {name for start, _, name in streams.answers if switched < start < written} == {made.name}
    # every request that came a second or more after the row was written got the old version
    assert {name for start, _, name in streams.answers if start > written + 1} == {f"tab@{before}"}


def test_a_rollback_takes_effect_in_under_a_second(served: Served) -> None:
    before = served.version()
    with served.database() as database:
        made = make_version(served.settings, database, parent=before)
        with database.write() as c:
            versions.promote(c, "tab", made.id, actor="test")
        until(lambda: served.version() == made.id, 30, "the new version serves")
        for _ in range(3):
            with database.write() as c:
                versions.rollback(c, "tab", to=before, actor="test")
            assert until(lambda: served.version() == before, 30, "the rollback is there") < 1.0
            with database.write() as c:
                versions.rollback(c, "tab", to=made.id, actor="test")
            assert until(lambda: served.version() == made.id, 30, "and forward again") < 1.0
        with database.write() as c:
            versions.rollback(c, "tab", to=before, actor="test")
    until(lambda: served.version() == before, 10, "left as it was")


def test_a_killed_replica_comes_back_by_itself(served: Served) -> None:
    version = served.version()
    (pid,) = served.replicas()
    body = {"model": "tab", "prompt": "def f(x):\n", "max_tokens": 400, "stream": True, "temperature": 1.5}
    lines: list[str] = []
    with httpx.stream("POST", f"{served.url}/v1/completions", json=body, timeout=60) as response:
        for line in response.iter_lines():
            lines.append(line)
            if sum(part.startswith("data: {") for part in lines) == 3:
                os.kill(pid, signal.SIGKILL)
                killed = time.monotonic()
    assert '"error"' in "".join(lines)
    assert time.monotonic() - killed < 10
    # while it is away: a clear 503, or an answer after a wait
    answer = served.complete()
    assert answer.status_code in (200, 503)
    if answer.status_code == 503:
        assert int(answer.headers["retry-after"]) >= 1
        assert answer.json()["error"]["message"]
    served.until_ready()
    assert served.version() == version
    (again,) = served.replicas()
    assert again != pid
    assert "onlinerl_replica_restarts_total" in httpx.get(f"{served.url}/metrics").text


def test_a_killed_server_takes_its_replicas_along_and_carries_on_when_restarted(served: Served) -> None:
    id = served.complete().json()["id"]
    assert served.rate(id, "rejected").json() == {"status": "matched"}
    replicas, sockets = served.replicas(), served.sockets
    assert replicas
    served.kill()
    until(lambda: not any(map(alive, replicas)), 15, "the replicas end")
    served.start()
    assert not sockets.exists()
    assert served.rate(id, "rejected").json() == {"status": "duplicate"}
    assert served.rate(id, "accepted").json() == {"status": "matched"}
    assert served.complete().status_code == 200


def test_a_signal_lets_open_answers_finish_and_leaves_nothing_behind(served: Served) -> None:
    replicas, sockets = served.replicas(), served.sockets
    body = {"model": "tab", "prompt": "def f(x):\n", "max_tokens": 60, "stream": True, "temperature": 1.5}
    codes: list[int] = []
    stopping: threading.Thread | None = None
    text = ""
    with httpx.stream("POST", f"{served.url}/v1/completions", json=body, timeout=60) as response:
        for line in response.iter_lines():
            text += line
            if stopping is None and "data: {" in text:
                stopping = threading.Thread(target=lambda: codes.append(served.stop(signal.SIGINT)))
                stopping.start()
    assert stopping is not None
    stopping.join()
    assert text.endswith("data: [DONE]")
    assert codes == [0]
    assert not any(map(alive, replicas))
    assert not sockets.exists()
    assert not (served.home / "serve.json").exists()
    assert "Traceback" not in served.log()


def test_a_second_server_on_the_home_is_refused(served: Served) -> None:
    done = onlinerl("serve", "--port", 0, "--feedback-port", 0, "--home", served.home)
    assert done.returncode == 2
    assert str(served.pid) in done.stderr
    assert "--home" in done.stderr
    assert served.complete().status_code == 200


@pytest.mark.parametrize(
    ("option", "setting"), [("--port", "server.port"), ("--feedback-port", "server.feedback_port")]
)
def test_a_taken_port_is_named_with_its_setting(tmp_path: Path, option: str, setting: str) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        ports: dict[str, Any] = {"--port": 0, "--feedback-port": 0, option: port}
        pairs = [part for pair in ports.items() for part in pair]
        done = onlinerl("serve", *pairs, "--home", tmp_path / "home")
    assert done.returncode == 2
    assert done.stderr.startswith(f"onlinerl: port {port} on 127.0.0.1 is in use")
    assert f"set {setting} ({option})" in done.stderr
    assert not (tmp_path / "home" / "weights").exists()


async def test_a_replica_that_does_not_answer_is_killed_and_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "SILENT", 1.0)
    monkeypatch.setattr(embedded, "STATUS", 0.5)
    came: asyncio.Queue[str] = asyncio.Queue()
    went: asyncio.Queue[str] = asyncio.Queue()
    with supervisor.socket_folder() as sockets:
        one = supervisor.Supervisor(
            "tab",
            0,
            config.Engine(threads=1),
            sockets=sockets,
            logs=tmp_path,
            on_up=came.put_nowait,
            on_down=went.put_nowait,
        )
        keeping = asyncio.create_task(one.run())
        try:
            async with asyncio.timeout(90):
                assert await came.get() == "tab-0"
                mute = one.pid
                assert mute is not None
                os.kill(mute, signal.SIGSTOP)
                assert await went.get() == "tab-0"
                assert await came.get() == "tab-0"
            assert one.pid not in (None, mute)
            last = one.pid
        finally:
            keeping.cancel()
            await asyncio.gather(keeping, return_exceptions=True)
            await one.engine.close()
    assert last is not None
    assert not alive(last)
