"""What the fault tests share: clients that write down all they were told, and the books held against it."""

from __future__ import annotations

import asyncio
import json
import os
import random
import sqlite3
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import aiohttp

from tests.servers import Served, onlinerl

INCIDENTS = "ONLINERL_INCIDENTS"
"""Environment variable: file to which each trial adds a line, for `tests.soak_report`."""


@contextmanager
def incident(kind: str, seed: int) -> Iterator[dict[str, Any]]:
    """One trial. What is put into the dict is reported, also when the trial fails."""
    facts: dict[str, Any] = {}
    outcome, started = "failed", time.monotonic()
    try:
        yield facts
        outcome = "passed"
    finally:
        if INCIDENTS in os.environ:
            line = {
                "kind": kind,
                "seed": seed,
                "outcome": outcome,
                "seconds": round(time.monotonic() - started, 1),
                **facts,
            }
            with open(os.environ[INCIDENTS], "a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")


async def eventually(condition: Callable[[], Any], limit: float, what: str) -> float:
    """Seconds until the condition holds; the clients go on meanwhile."""
    started = time.monotonic()
    while not condition():
        assert time.monotonic() - started < limit, f"not within {limit:.0f} s: {what}"
        await asyncio.sleep(0.02)
    return time.monotonic() - started


# ------------------------------------------------------------------------------------------ clients


@dataclass
class Answer:
    """A completion as its client saw it."""

    sent: float
    """Monotonic clock, as all times here."""
    streamed: bool
    status: int = 0
    id: str = ""
    version: str = ""
    """By the header, as `tab@3`."""
    fingerprints: set[str] = field(default_factory=set)
    text: str = ""
    finish: str | None = None
    error: str = ""
    closed: bool = False
    """Came to the end that the protocol has for it."""
    times: list[float] = field(default_factory=list)
    """Of each piece of text."""
    ended: float = 0.0

    @property
    def outcome(self) -> str:
        """whole; cut: begun, then an error said so; refused: a clear 503; lost: the connection broke."""
        if self.status == 200 and self.closed:
            return "whole"
        if self.status == 200 and self.error and self.id:
            return "cut"
        if self.status == 503 and self.error:
            return "refused"
        return "lost"


@dataclass
class Clients:
    """Clients of one server: what they were answered, and which feedback was acknowledged."""

    served: Served
    rng: random.Random
    session: aiohttp.ClientSession
    answers: list[Answer] = field(default_factory=list)
    """Ended ones."""
    open: list[Answer] = field(default_factory=list)
    acknowledged: list[tuple[str, str, str]] = field(default_factory=list)
    """(id, event, status) of every 2xx."""
    unsure: list[tuple[str, str]] = field(default_factory=list)
    """(id, event) of feedback that nobody acknowledged: it may be there or not."""
    url: str = ""
    feedback_url: str = ""
    _workers: list[asyncio.Task[None]] = field(default_factory=list)
    _stopping: bool = False

    @classmethod
    @asynccontextmanager
    async def of(cls, served: Served, seed: int) -> AsyncIterator[Self]:
        """Open them; the block's end waits for the requests that are still open."""
        connector = aiohttp.TCPConnector(limit=0)
        timeout = aiohttp.ClientTimeout(total=90)
        async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
            one = cls(served, random.Random(seed), session)
            one.url, one.feedback_url = served.url, served.feedback_url
            try:
                yield one
            finally:
                await one.stop()

    def work(self, count: int, *, feedback: bool = False, **body: Any) -> None:
        """Start `count` clients who ask again and again, and rate each whole answer if `feedback`."""
        for _ in range(count):
            self._workers.append(asyncio.create_task(self._work(feedback, body)))

    async def stop(self) -> None:
        """No new requests; wait for the open ones."""
        self._stopping = True
        await asyncio.gather(*self._workers)
        self._workers.clear()

    async def _work(self, feedback: bool, body: dict[str, Any]) -> None:
        while not self._stopping:
            answer = await self.ask(**body)
            if feedback and answer.outcome == "whole":
                await self.rate(answer)
            if answer.outcome in ("refused", "lost"):
                await asyncio.sleep(0.1)

    async def ask(self, **fields: Any) -> Answer:
        """One completion; every way in which it can end is written down, none is raised."""
        body = {
            "model": "tab",
            "prompt": f"def f{self.rng.randrange(1000)}(x):\n    return ",
            "max_tokens": 8,
            "stream": self.rng.random() < 0.7,
            **{name: value(self.rng) if callable(value) else value for name, value in fields.items()},
        }
        answer = Answer(sent=time.monotonic(), streamed=body["stream"])
        self.open.append(answer)
        try:
            async with self.session.post(f"{self.url}/v1/completions", json=body) as response:
                answer.status = response.status
                answer.version = f"tab@{response.headers.get('x-onlinerl-version')}"
                if response.status != 200:
                    reply = await response.json()
                    if "retry-after" in response.headers:
                        answer.error = reply["error"]["message"]
                elif answer.streamed:
                    await self._read(answer, response)
                else:
                    reply = await response.json()
                    self._note(answer, reply)
                    answer.closed = True
        except (aiohttp.ClientError, ConnectionError) as error:
            answer.closed, answer.status = False, 0
            answer.error = f"{type(error).__name__}: {error}"
        answer.ended = time.monotonic()
        self.open.remove(answer)
        self.answers.append(answer)
        return answer

    async def _read(self, answer: Answer, response: aiohttp.ClientResponse) -> None:
        async for raw in response.content:
            line = raw.decode().strip()
            if line == "data: [DONE]":
                answer.closed = True
            elif line.startswith("data: "):
                event = json.loads(line[6:])
                if "error" in event:
                    answer.error = event["error"]["message"]
                else:
                    self._note(answer, event)

    @staticmethod
    def _note(answer: Answer, event: dict[str, Any]) -> None:
        answer.id = event["id"]
        answer.fingerprints.add(event["system_fingerprint"])
        for choice in event["choices"]:
            answer.text += choice["text"]
            answer.finish = choice["finish_reason"] or answer.finish
            if choice["text"]:
                answer.times.append(time.monotonic())

    async def rate(self, answer: Answer, event: str | None = None) -> str:
        """A verdict; its status, or "" when nobody acknowledged it."""
        event = event or self.rng.choice(("accepted", "rejected", "ignored", "shown"))
        return await self.say(answer.id, event)

    async def say(self, id: str, event: str) -> str:
        """A piece of feedback about any id."""
        try:
            async with self.session.post(
                f"{self.feedback_url}/v1/feedback", json={"id": id, "event": event}
            ) as response:
                reply = await response.json()
                if response.status == 200:
                    self.acknowledged.append((id, event, reply["status"]))
                    return str(reply["status"])
        except (aiohttp.ClientError, ConnectionError):
            pass
        self.unsure.append((id, event))
        return ""

    def outcomes(self) -> Counter[str]:
        """How the answers ended."""
        return Counter(answer.outcome for answer in self.answers)


# -------------------------------------------------------------------------------------------- books


def query(home: Path, statement: str, *parameters: object) -> list[sqlite3.Row]:
    """Read the database past all of our own code."""
    connection = sqlite3.connect(f"file:{home / 'onlinerl.db'}?mode=ro", uri=True, timeout=30)
    connection.row_factory = sqlite3.Row
    try:
        return connection.execute(statement, parameters).fetchall()
    finally:
        connection.close()


def lost_feedback(home: Path, acknowledged: list[tuple[str, str, str]]) -> list[tuple[str, str, str]]:
    """Acknowledged feedback that is not in the store with its status.

    A verdict that a stronger one replaced afterwards is `superseded` now: that is no loss.
    """
    kept: Counter[tuple[str, str, str]] = Counter()
    for row in query(home, "SELECT id, event, status FROM feedback"):
        kept[row["id"], row["event"], row["status"]] += 1
    lost = []
    for id, event, status in acknowledged:
        states = (status, "superseded") if status == "matched" else (status,)
        found = next((state for state in states if kept[id, event, state]), None)
        if found is None:
            lost.append((id, event, status))
        else:
            kept[id, event, found] -= 1
    return lost


def trained(home: Path, run: int) -> dict[str, int]:
    """Batch of each sample that went into the run's weights by its log; what a resume took back is out.

    AssertionError when a batch or a sample was trained on twice.
    """
    steps: dict[int, list[str]] = {}
    for event in log(home, run):
        if event["event"] == "resume":
            steps = {batch: ids for batch, ids in steps.items() if batch <= event["batch"]}
        elif event["event"] == "step":
            assert event["batch"] not in steps, f"batch {event['batch']} of run {run} twice"
            steps[event["batch"]] = event["ids"]
    assert sorted(steps) == list(range(1, len(steps) + 1))
    batches: dict[str, int] = {}
    for batch, ids in steps.items():
        for id in ids:
            assert id not in batches, f"{id} was trained on in batches {batches[id]} and {batch}"
            batches[id] = batch
    return batches


def log(home: Path, run: int) -> list[dict[str, Any]]:
    """Whole lines of a run's log; a line that a kill tore is none."""
    path = home / "runs" / str(run) / "log.jsonl"
    found = []
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            found.append(json.loads(line))
        except ValueError:
            continue
    return found


def claimed(home: Path, run: int) -> dict[str, int]:
    """Batch of each sample that the store says the run was trained on."""
    statement = "SELECT id, \"index\", batch FROM interactions WHERE run = ? AND use = 'claimed'"
    return {f"{row['id']}/{row['index']}": row["batch"] for row in query(home, statement, run)}


def broken_versions(home: Path) -> tuple[int, list[str]]:
    """How many versions `versions verify` looked at, and the names of those that it found broken."""
    done = onlinerl("versions", "verify", "--json", "--home", home, timeout=120)
    results = json.loads(done.stdout)
    broken = [f"{one['policy']}@{one['id']}: {one['fault']}" for one in results if not one["intact"]]
    assert done.returncode == bool(broken), done.stderr
    return len(results), broken


def collect(home: Path) -> None:
    """Let gc take what nothing needs: trials share a disk."""
    done = onlinerl("versions", "gc", "--home", home, timeout=120)
    assert done.returncode == 0, done.stderr
