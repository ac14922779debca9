"""Simulated developers at the wire: they ask, read, and accept or refuse, over real HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
import uuid
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from types import MappingProxyType
from typing import Any

import aiohttp
import orjson
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from onlinerl.datasets.fim import FimPrompt, collect
from onlinerl.datasets.users import TASTES, Act, Habits, Reaction, Taste, User, decide, plan
from onlinerl.datasets.wires import (
    CONTINUE_CHECK,
    CONTINUE_CUT,
    Call,
    Client,
    Display,
    Wire,
    WireForm,
    wire,
)
from onlinerl.errors import SettingsError


@dataclass(frozen=True, slots=True)
class Outcome:
    """One request and what came of it. Made by the player, eaten by the demo's plot."""

    at: float
    """Seconds since the epoch, on this machine's clock, when the request was sent."""
    user: str
    version: int | None
    """As the server's header says; None where it does not."""
    act: Act | None
    """None: the request was cancelled or failed."""
    failed: bool = False


@dataclass(frozen=True, slots=True)
class Report:
    """What the simulated developers did and met. Made by `play`, printed by the command line."""

    requests: int
    shown: int
    silent: int
    accepted: int
    """Late ones included."""
    rejected: int
    timeouts: int
    unrated: int
    cancelled: int
    cut: int
    """Streams that the client closed after 375 ms."""
    cached: int
    late: int
    errors: int
    error_kinds: Mapping[str, int]
    feedback: Mapping[str, int]
    """Replies to feedback, by join status."""
    first_p50: float
    """Seconds to the first text, median; 0 when there was none."""
    first_p95: float
    latency_p50: float
    """Seconds to the whole answer."""
    latency_p95: float
    seconds: float
    """How long it all took."""
    outcomes: tuple[Outcome, ...] = field(repr=False, default=())

    def as_json(self) -> dict[str, Any]:
        """All but the single outcomes."""
        names = [name for name in self.__dataclass_fields__ if name != "outcomes"]
        return {
            name: dict(value) if isinstance(value := getattr(self, name), Mapping) else value
            for name in names
        }

    def table(self) -> Table:
        """For people."""
        table = Table(title="simulated developers", show_header=False)
        for name, value in self.as_json().items():
            if isinstance(value, dict):
                value = ", ".join(f"{key} {count}" for key, count in sorted(value.items())) or "-"
            elif isinstance(value, float):
                value = f"{value:.3f} s"
            table.add_row(name.replace("_", " "), str(value))
        return table


def developers(count: int, taste: Taste, habits: Habits, *, prefix: str = "dev") -> list[User]:
    """`count` users of one taste."""
    return [User(f"{prefix}-{number}", taste, habits) for number in range(1, count + 1)]


def run(
    url: str,
    *,
    feedback_url: str | None = None,
    protocol: WireForm | str = WireForm.NATIVE,
    users: int = 4,
    requests: int = 100,
    code: Path | None = None,
    seed: int = 0,
    taste: str = "lenient",
    speed: float = 1.0,
    model: str | None = None,
    max_tokens: int = 24,
    temperature: float | None = None,
    key: str = "none",
    characters: int = 2048,
    progress: bool = True,
) -> Report:
    """Play `users` developers against a running server until `requests` requests were made in all.

    `speed` divides reading times, pauses and the client's 10 s clock. Raises SettingsError when
    nothing answers at `url` or the taste is unknown, RequestError for a protocol not spoken yet.
    """
    form = WireForm(protocol)
    if users < 1 or requests < 1:
        raise SettingsError("--users and --requests must be at least 1")
    if speed <= 0:
        raise SettingsError("--speed must be above 0")
    if taste not in TASTES:
        raise SettingsError(f"unknown taste {taste!r}: choose one of {', '.join(TASTES)}")
    default = "tab" if form is WireForm.NATIVE else "Qwen2.5-Coder-1.5B"
    client = Client(model=model or default, max_tokens=max_tokens, temperature=temperature, key=key)
    dialect = wire(form, client)
    found = collect(code, limit=requests, seed=seed, characters=characters, progress=progress)
    return asyncio.run(
        play(
            dialect,
            url,
            feedback_url or url,
            developers(users, TASTES[taste], Habits()),
            found.prompts,
            requests=requests,
            seed=seed,
            speed=speed,
            progress=progress,
        )
    )


async def play(
    dialect: Wire,
    url: str,
    feedback_url: str,
    users: Sequence[User],
    prompts: Sequence[FimPrompt],
    *,
    requests: int,
    seed: int = 0,
    speed: float = 1.0,
    progress: bool = False,
    stop: asyncio.Event | None = None,
    watch: Callable[[Outcome], None] | None = None,
) -> Report:
    """Let `users` work on `prompts` until `requests` were made, or until `stop` is set.

    `watch` is called once for each request, when its outcome is known.
    """
    player = _Player(dialect, url.rstrip("/"), feedback_url.rstrip("/"), seed, speed, watch)
    bar = Progress(console=Console(stderr=True), disable=not progress, transient=True)
    started = time.perf_counter()
    timeout = aiohttp.ClientTimeout(total=120)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
        await _reach(session, player.url)
        with bar:
            row = bar.add_task("developers at work", total=requests)
            async with asyncio.TaskGroup() as tasks:
                for place, user in enumerate(users):
                    mine = range(place, requests, len(users))
                    tasks.create_task(
                        player.work(session, tasks, user, mine, prompts, stop, lambda: bar.advance(row))
                    )
    return player.report(time.perf_counter() - started)


async def _reach(session: aiohttp.ClientSession, url: str) -> None:
    try:
        async with session.get(f"{url}/health"):
            pass
    except aiohttp.InvalidURL:
        raise SettingsError(f"{url!r} is not a URL: write http://HOST:PORT") from None
    except (aiohttp.ClientError, TimeoutError) as error:
        raise SettingsError(f"nothing answers at {url} ({error}): is the server running?") from None


@dataclass(frozen=True, slots=True)
class _Answer:
    id: str
    text: str
    version: int | None
    first: float | None
    seconds: float
    cut: bool


class _Failed(Exception):
    """The server's answer was an error or no answer; the message is its kind, for the count."""


class _Player:
    """Sends what the users do, and counts."""

    def __init__(
        self,
        dialect: Wire,
        url: str,
        feedback_url: str,
        seed: int,
        speed: float,
        watch: Callable[[Outcome], None] | None,
    ) -> None:
        self.dialect = dialect
        self.url = url
        self.feedback_url = feedback_url
        self.seed = seed
        self.speed = speed
        self.watch = watch
        self.counts: Counter[str] = Counter()
        self.acts: Counter[Act] = Counter()
        self.errors: Counter[str] = Counter()
        self.statuses: Counter[str] = Counter()
        self.firsts: list[float] = []
        self.latencies: list[float] = []
        self.outcomes: list[Outcome] = []

    async def work(
        self,
        session: aiohttp.ClientSession,
        tasks: asyncio.TaskGroup,
        user: User,
        numbers: range,
        prompts: Sequence[FimPrompt],
        stop: asyncio.Event | None,
        advance: Callable[[], None],
    ) -> None:
        """One developer's day."""
        for number in numbers:
            if stop is not None and stop.is_set():
                return
            rng = random.Random(f"{self.seed}/{user.name}/{number}")
            intent = plan(user, rng)
            await asyncio.sleep(intent.pause / self.speed)
            sent = time.time()
            self.counts["requests"] += 1
            prompt = prompts[number % len(prompts)]
            version: int | None = None
            reaction: Reaction | None = None
            failed = False
            try:
                # Typing on is the server's business, not the clock's: it is not sped up.
                async with asyncio.timeout(intent.cancel_after) as patience:
                    answer = await self._complete(session, self.dialect.request(prompt, user))
                version = answer.version
                if intent.cancel_after is not None:
                    self.counts["cancelled"] += 1
                else:
                    reaction = await self._react(session, tasks, user, prompt, answer, rng)
            except TimeoutError:
                if patience.expired():
                    self.counts["cancelled"] += 1
                else:
                    failed = True
                    self.errors["no answer in time"] += 1
            except _Failed as error:
                failed = True
                self.errors[str(error)] += 1
            outcome = Outcome(sent, user.name, version, reaction.act if reaction else None, failed)
            self.outcomes.append(outcome)
            if self.watch is not None:
                self.watch(outcome)
            advance()

    async def _react(
        self,
        session: aiohttp.ClientSession,
        tasks: asyncio.TaskGroup,
        user: User,
        prompt: FimPrompt,
        answer: _Answer,
        rng: random.Random,
    ) -> Reaction:
        self.counts["cut"] += answer.cut
        self.latencies.append(answer.seconds)
        if answer.first is not None:
            self.firsts.append(answer.first)
        ids = [str(uuid.UUID(int=rng.getrandbits(128), version=4)) for _ in range(2)]
        text = self.dialect.display(answer.text)
        reaction = decide(user, prompt, text, rng)
        self.acts[reaction.act] += 1
        self.counts["cached"] += reaction.cached
        display = Display(user, prompt, text, answer.id, ids[0], ids[1], answer.seconds, datetime.now(UTC))
        calls = self.dialect.reports(display, reaction)
        if calls:
            # The client's clock runs on beside the user, who may be elsewhere by then.
            tasks.create_task(self._send(session, calls))
        await asyncio.sleep(reaction.seconds / self.speed)
        return reaction

    async def _send(self, session: aiohttp.ClientSession, calls: tuple[Call, ...]) -> None:
        started = time.perf_counter()
        for call in calls:
            due = started + call.after / self.speed
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            try:
                async with session.post(
                    self.feedback_url + call.path, data=call.body, headers=call.headers
                ) as response:
                    raw = await response.read()
                    if response.status >= 400:
                        self.errors[f"feedback: HTTP {response.status}"] += 1
                        continue
                reply = orjson.loads(raw)
                self.statuses[str(reply.get("feedback", reply.get("status", "?")))] += 1
            except (aiohttp.ClientError, TimeoutError, orjson.JSONDecodeError, AttributeError) as error:
                self.errors[f"feedback: {type(error).__name__}"] += 1

    async def _complete(self, session: aiohttp.ClientSession, call: Call) -> _Answer:
        started = time.perf_counter()
        text, id_, first, cut, events = "", "", None, False, 0
        try:
            async with session.post(self.url + call.path, data=call.body, headers=call.headers) as response:
                if response.status >= 400:
                    raise _Failed(f"HTTP {response.status}")
                header = response.headers.get("x-onlinerl-version", "")
                opened = time.perf_counter()
                async with contextlib.aclosing(_events(response)) as stream:
                    async for event in stream:
                        id_ = id_ or str(event.get("id", ""))
                        for choice in event.get("choices", ()):
                            text += choice.get("text") or ""
                        if text and first is None:
                            first = time.perf_counter() - started
                        events += 1
                        if (
                            self.dialect.cuts
                            and events % CONTINUE_CHECK == 0
                            and time.perf_counter() - opened > CONTINUE_CUT
                        ):
                            cut = True
                            response.close()
                            break
        except aiohttp.ClientError as error:
            raise _Failed(type(error).__name__) from None
        seconds = time.perf_counter() - started
        return _Answer(id_, text, int(header) if header.isdigit() else None, first, seconds, cut)

    def report(self, seconds: float) -> Report:
        """What was counted."""
        acts, counts = self.acts, self.counts
        return Report(
            requests=counts["requests"],
            shown=sum(acts.values()) - acts[Act.NOTHING],
            silent=acts[Act.NOTHING],
            accepted=acts[Act.ACCEPT] + acts[Act.LATE_ACCEPT],
            rejected=acts[Act.REJECT],
            timeouts=acts[Act.TIMEOUT],
            unrated=acts[Act.UNRATED],
            cancelled=counts["cancelled"],
            cut=counts["cut"],
            cached=counts["cached"],
            late=acts[Act.LATE_ACCEPT],
            errors=sum(self.errors.values()),
            error_kinds=MappingProxyType(dict(self.errors)),
            feedback=MappingProxyType(dict(self.statuses)),
            first_p50=percentile(self.firsts, 0.5),
            first_p95=percentile(self.firsts, 0.95),
            latency_p50=percentile(self.latencies, 0.5),
            latency_p95=percentile(self.latencies, 0.95),
            seconds=seconds,
            outcomes=tuple(self.outcomes),
        )


async def _events(response: aiohttp.ClientResponse) -> AsyncGenerator[dict[str, Any], None]:
    """The objects of a stream of server-sent events, until [DONE]."""
    async for line in response.content:
        if not line.startswith(b"data:"):
            continue
        payload = line[5:].strip()
        if payload == b"[DONE]":
            return
        try:
            event = orjson.loads(payload)
        except orjson.JSONDecodeError:
            raise _Failed("broken event") from None
        if not isinstance(event, dict) or "error" in event:
            raise _Failed("error in mid-stream")
        yield event


def percentile(values: Sequence[float], share: float) -> float:
    """Linear interpolation between order statistics; 0 for no values.

    >>> percentile([1.0, 2.0, 3.0, 4.0], 0.5)
    2.5
    """
    if not values:
        return 0.0
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)
