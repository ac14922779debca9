"""The engines of one policy as one: chooses where a request goes, and knows who holds what."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator

from onlinerl.engines.base import Engine, EngineStatus
from onlinerl.errors import EngineError, EngineFull, EngineUnavailable, VersionNotLoaded
from onlinerl.records import Finish, Generation, Token, Version

PATIENCE = 5.0
"""Seconds that a request waits for an engine to come back (a restarted process) before it gets a 503."""

LOOK = 0.1
"""Seconds between two looks at the engines while requests wait for one."""


class Member:
    """An engine of a pool: the engine itself, and what it is known to hold.

    Implements `engines.base.Engine`. Whoever loads, unloads or asks an engine does it through here, so that
    the pool needs no questions of its own while all goes well.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.versions: frozenset[int] = frozenset()
        self.reachable = True
        self.inflight = 0

    @property
    def name(self) -> str:
        """The engine's."""
        return self.engine.name

    async def status(self) -> EngineStatus:
        """Ask the engine, and remember."""
        try:
            status = await self.engine.status()
        except EngineUnavailable:
            self.lost()
            raise
        self.versions, self.reachable = status.versions, True
        return status

    async def generate(self, request: Generation) -> AsyncGenerator[Token | Finish, None]:
        """The engine's stream, counted while it runs."""
        self.inflight += 1
        stream = self.engine.generate(request)
        try:
            async for item in stream:
                yield item
        except EngineFull:
            raise
        except EngineUnavailable:
            self.lost()
            raise
        except VersionNotLoaded:
            self.versions -= {request.version}
            raise
        finally:
            self.inflight -= 1
            await stream.aclose()

    async def load(self, version: Version) -> None:
        """Load, and remember."""
        try:
            await self.engine.load(version)
        except EngineUnavailable:
            self.lost()
            raise
        self.versions, self.reachable = self.versions | {version.id}, True

    async def unload(self, version: int) -> None:
        """Send nothing more there for `version`, then unload it."""
        self.versions -= {version}
        try:
            await self.engine.unload(version)
        except EngineUnavailable:
            self.lost()
            raise

    async def close(self) -> None:
        """Drop its connections."""
        await self.engine.close()

    def lost(self) -> None:
        """It cannot be reached: a process that comes back holds nothing."""
        self.versions, self.reachable = frozenset(), False


class Pool:
    """The engines of `policy`. For use in one event loop."""

    def __init__(self, policy: str, *, patience: float = PATIENCE) -> None:
        self.policy = policy
        self._patience = patience
        self._members: dict[str, Member] = {}
        self._looked = 0.0
        self._looking: asyncio.Task[dict[str, EngineStatus]] | None = None

    # ------------------------------------------------------------------------------------ members

    def add(self, engine: Engine) -> Member:
        """Take an engine in; from now on use what this returns. ValueError when the name is taken."""
        if engine.name in self._members:
            raise ValueError(f"the pool of {self.policy} already has an engine named {engine.name}")
        member = self._members[engine.name] = Member(engine)
        return member

    def remove(self, name: str) -> Engine | None:
        """Send nothing more to that engine; its streams run on. Returns it, or None when it is not here."""
        member = self._members.pop(name, None)
        return member.engine if member is not None else None

    @property
    def engines(self) -> tuple[Member, ...]:
        """All of them, in the order in which they were added."""
        return tuple(self._members.values())

    def resident(self) -> frozenset[int]:
        """Versions that every reachable engine holds, as far as is known."""
        held = [member.versions for member in self._members.values() if member.reachable]
        return frozenset.intersection(*held) if held else frozenset()

    def servable(self) -> frozenset[int]:
        """Versions that at least one reachable engine holds, as far as is known."""
        return frozenset().union(*(m.versions for m in self._members.values() if m.reachable))

    async def statuses(self) -> dict[str, EngineStatus]:
        """Ask all engines at once; those that do not answer are missing in the result."""
        members = self.engines
        answers = await asyncio.gather(*(m.status() for m in members), return_exceptions=True)
        found: dict[str, EngineStatus] = {}
        for member, answer in zip(members, answers, strict=True):
            if isinstance(answer, EngineStatus):
                found[member.name] = answer
            elif not isinstance(answer, EngineError):
                raise answer
        return found

    async def load(self, version: Version) -> None:
        """Load on every engine that can be reached. Raises what the first of them that failed said, after
        all have answered; EngineUnavailable when none could be reached."""
        members = self.engines
        answers = await asyncio.gather(*(m.load(version) for m in members), return_exceptions=True)
        failed = [a for a in answers if a is not None and not isinstance(a, EngineUnavailable)]
        if failed:
            raise failed[0]
        if all(answer is not None for answer in answers):
            raise EngineUnavailable(f"no engine of {self.policy} can be reached")

    async def unload(self, version: int) -> None:
        """Unload everywhere; an engine that cannot be reached holds nothing anyway."""
        answers = await asyncio.gather(*(m.unload(version) for m in self.engines), return_exceptions=True)
        for answer in answers:
            if answer is not None and not isinstance(answer, EngineUnavailable):
                raise answer

    # ----------------------------------------------------------------------------------- requests

    async def generate(self, request: Generation) -> AsyncGenerator[Token | Finish, None]:
        """Sample from the least loaded engine that holds the version.

        An engine that fails before its first token is left for another one. While none holds the version,
        waits up to `patience` seconds for one, then raises EngineUnavailable; EngineFull when all that hold
        it have full queues. After the first token errors go through: nobody else can carry on from there.
        """
        deadline = time.monotonic() + self._patience
        full: EngineFull | None = None
        tried: set[str] = set()
        while True:
            member = self._choose(request.version, tried)
            if member is None:
                if full is not None:
                    raise full
                if time.monotonic() >= deadline:
                    raise EngineUnavailable(
                        f"no engine of {self.policy} serves version {request.version} now", retry_after=2.0
                    )
                await self._look()
                tried.clear()
                continue
            tried.add(member.name)
            started = False
            stream = member.generate(request)
            try:
                async for item in stream:
                    started = True
                    yield item
                return
            except EngineFull as error:
                if full is None or error.retry_after < full.retry_after:
                    full = error
            except (EngineUnavailable, VersionNotLoaded) as error:
                if started:
                    raise EngineError(str(error)) from error
            finally:
                await stream.aclose()

    def _choose(self, version: int, tried: set[str]) -> Member | None:
        able = [m for m in self._members.values() if version in m.versions and m.name not in tried]
        return min(able, key=lambda member: member.inflight, default=None)

    async def _look(self) -> None:
        """Ask the engines who is there; those who wait together ask once."""
        if self._looking is None:
            pause = self._looked + LOOK - time.monotonic()
            if pause > 0:
                await asyncio.sleep(pause)
        if self._looking is None:
            self._looking = asyncio.create_task(self.statuses())
        looking = self._looking
        try:
            await asyncio.shield(looking)
        finally:
            if looking.done() and self._looking is looking:
                self._looking, self._looked = None, time.monotonic()
