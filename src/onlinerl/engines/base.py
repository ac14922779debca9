"""What the gateway and the publisher need of an engine, whatever runs behind it."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Protocol

from onlinerl.records import Finish, Generation, Token, Version


@dataclass(frozen=True, slots=True)
class EngineStatus:
    """What an engine says of itself. Made by the engine, eaten by the pool and the publisher."""

    versions: frozenset[int]
    """Versions it can serve at this moment."""
    running: int
    """Sequences being decoded."""
    waiting: int
    """Sequences in its queue."""
    context: int
    """Longest prompt plus answer, in tokens; 0 while no version is loaded."""


class Engine(Protocol):
    """One engine. Raises EngineUnavailable when it cannot be reached, VersionNotLoaded when asked for
    a version it does not hold, EngineError for everything else that fails inside it."""

    @property
    def name(self) -> str:
        """Unique within the pool, for logs and metrics."""
        ...

    async def status(self) -> EngineStatus:
        """Ask the engine; raises EngineUnavailable when it does not answer within its time limit."""
        ...

    def generate(self, request: Generation) -> AsyncGenerator[Token | Finish, None]:
        """Sample one sequence: tokens as they come, then one Finish.

        Closing the generator (`aclose`) aborts the sequence: the engine frees it within one decode
        step. The sequence is sampled from `request.version` from its first token to its last.
        """
        ...

    async def load(self, version: Version) -> None:
        """Make `version` servable, without stopping or failing anything that runs. Idempotent."""
        ...

    async def unload(self, version: int) -> None:
        """Forget a version; sequences that run on it end first. Idempotent."""
        ...

    async def close(self) -> None:
        """Drop connections; the engine's process is the supervisor's business."""
        ...
