"""A test DOUBLE of an engine: no model, no process, scripted answers. Never shipped, never measured as one.

Tests that are about something else than generation (gateway, publisher, joins, pool) use it, so that
they are fast and can make an engine slow, full, dead or broken at a chosen token.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence

from onlinerl.engines.base import EngineStatus
from onlinerl.errors import EngineError, EngineFull, EngineUnavailable, VersionNotLoaded
from onlinerl.records import Finish, FinishReason, Generation, Token, Version

Script = Callable[[Sequence[int], int], Sequence[int]]
"""From prompt ids and version to the token ids of the answer."""


def scripted(prompt_ids: Sequence[int], version: int) -> tuple[int, ...]:
    """Six token ids in 100…227: the same for the same prompt and version, other ones otherwise."""
    digest = hashlib.sha256(repr((tuple(prompt_ids), version)).encode()).digest()
    return tuple(100 + byte % 128 for byte in digest[:6])


def scripted_logprob(token: int, position: int) -> float:
    """The log-probability that the double reports: made up, negative, the same every time."""
    return -0.01 * (token % 97 + 1) - 0.001 * position


class DoubleEngine:
    """A scripted engine that implements `engines.base.Engine` in this process.

    Knobs (plain attributes, change them at any time):
        script         what it answers; default `scripted`. The answer ends with STOP, as if the model
                       had sampled an end-of-text token; that token is sent when `stop_ids` has one.
        gap            seconds between two tokens.
        hold           (tokens, event): after so many tokens a stream waits for the event; None: none does.
        down           nothing is reachable: every call raises EngineUnavailable.
        full           generate raises EngineFull with this `retry_after`; None: it is not full.
        die_after      EngineError after so many tokens of every stream; None: never. 0: EngineUnavailable.
        load_error     the sentence with which `load` fails; "": it works.
        load_time      seconds that `load` takes.
    What happened (read them): requests, finished, aborted, loads, unloads, closed.
    """

    def __init__(
        self,
        name: str = "double-0",
        *,
        versions: Iterable[int] = (0,),
        script: Script = scripted,
        gap: float = 0.0,
        context: int = 2048,
    ) -> None:
        self._name = name
        self.versions = set(versions)
        self.script = script
        self.gap = gap
        self.hold: tuple[int, asyncio.Event] | None = None
        self.context = context
        self.down = False
        self.full: float | None = None
        self.die_after: int | None = None
        self.load_error = ""
        self.load_time = 0.0
        self.running = 0
        self.requests: list[Generation] = []
        self.finished: list[str] = []
        self.aborted: list[str] = []
        self.loads: list[Version] = []
        self.unloads: list[int] = []
        self.closed = False

    @property
    def name(self) -> str:
        """As given."""
        return self._name

    def _reach(self) -> None:
        if self.down:
            raise EngineUnavailable(f"{self._name} cannot be reached")

    async def status(self) -> EngineStatus:
        """The versions it was given, and what runs."""
        self._reach()
        return EngineStatus(
            versions=frozenset(self.versions), running=self.running, waiting=0, context=self.context
        )

    async def generate(self, request: Generation) -> AsyncGenerator[Token | Finish, None]:
        """The script's tokens, at most `max_tokens`, `gap` seconds apart."""
        self._reach()
        if self.full is not None:
            raise EngineFull(f"{self._name} is full", retry_after=self.full)
        if request.version not in self.versions:
            raise VersionNotLoaded(f"{self._name} does not hold version {request.version}")
        self.requests.append(request)
        self.running += 1
        ended = False
        try:
            answer = [*self.script(request.prompt_ids, request.version), *request.stop_ids[:1]]
            for position, token in enumerate(answer[: request.max_tokens]):
                await asyncio.sleep(self.gap)
                if self.hold is not None and position == self.hold[0]:
                    await self.hold[1].wait()
                if self.down or self.die_after == position:
                    ended = True
                    if position == 0:
                        raise EngineUnavailable(f"{self._name} died")
                    raise EngineError(f"{self._name} died in mid-stream")
                logprob = scripted_logprob(token, position)
                top = tuple((token + i, logprob - i) for i in range(request.top_logprobs))
                yield Token(id=token, logprob=logprob, version=request.version, top=top)
            ended = True
            self.finished.append(request.id)
            cut = len(answer) > request.max_tokens
            yield Finish(FinishReason.LENGTH if cut else FinishReason.STOP)
        finally:
            self.running -= 1
            if not ended:
                self.aborted.append(request.id)

    async def load(self, version: Version) -> None:
        """Hold `version` from now on."""
        self._reach()
        await asyncio.sleep(self.load_time)
        self._reach()
        if self.load_error:
            raise EngineError(self.load_error)
        self.loads.append(version)
        self.versions.add(version.id)

    async def unload(self, version: int) -> None:
        """Forget `version`."""
        self._reach()
        self.unloads.append(version)
        self.versions.discard(version)

    async def close(self) -> None:
        """Remember that it was closed."""
        self.closed = True
