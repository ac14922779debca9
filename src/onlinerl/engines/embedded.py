"""The client of one embedded engine: HTTP over a private Unix socket."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import aiohttp
import orjson

from onlinerl.engines.base import EngineStatus
from onlinerl.errors import EngineError, EngineFull, EngineUnavailable, RequestError, Unfit, VersionNotLoaded
from onlinerl.records import Finish, FinishReason, Generation, Token, Version

CONNECT = 2.0
"""Seconds until a connection over a local socket counts as refused."""

STATUS = 5.0
"""Seconds that a status may take: the process is there, or it is not."""


class EmbeddedEngine:
    """One replica process behind `socket`. The process itself is the supervisor's business: while it is
    away every call raises EngineUnavailable, and works again when it is back."""

    def __init__(self, name: str, socket: Path) -> None:
        self._name = name
        self._socket = socket
        self._session: aiohttp.ClientSession | None = None

    @property
    def name(self) -> str:
        """As given."""
        return self._name

    async def status(self) -> EngineStatus:
        """Ask the process; EngineUnavailable when it does not answer within STATUS seconds."""
        facts = await self._call("GET", "/status", timeout=STATUS)
        return EngineStatus(
            versions=frozenset(facts["versions"]),
            running=facts["running"],
            waiting=facts["waiting"],
            context=facts["context"],
        )

    async def generate(self, request: Generation) -> AsyncGenerator[Token | Finish, None]:
        """Tokens as they come, then one Finish.

        Before the first token: EngineUnavailable (away), EngineFull (its queue; `retry_after`),
        VersionNotLoaded, RequestError (the prompt cannot be). After it: EngineError.
        """
        body = orjson.dumps(
            {
                "id": request.id,
                "version": request.version,
                "prompt_ids": request.prompt_ids,
                "max_tokens": request.max_tokens,
                "temperature": request.temperature,
                "top_p": request.top_p,
                "seed": request.seed,
                "stop_ids": request.stop_ids,
                "top_logprobs": request.top_logprobs,
            }
        )
        started = False
        try:
            async with self._open().post("http://replica/generate", data=body) as response:
                if response.status != 200:
                    raise self._error(response.status, await response.read())
                async for line in response.content:
                    item = self._item(line)
                    started = True
                    yield item
                    if isinstance(item, Finish):
                        return
            raise aiohttp.ClientPayloadError("the stream stopped short")
        except (aiohttp.ClientError, OSError) as error:
            if started:
                raise EngineError(f"{self._name} died in mid-stream: {error}") from error
            raise EngineUnavailable(f"{self._name} cannot be reached: {error}") from error

    async def load(self, version: Version) -> None:
        """Make `version` servable. EngineError says why it could not be; nothing changed then."""
        await self._call("POST", f"/versions/{version.id}", {"url": version.url, "digest": version.digest})

    async def unload(self, version: int) -> None:
        """Forget `version` once its sequences have ended."""
        await self._call("DELETE", f"/versions/{version}")

    async def close(self) -> None:
        """Drop the connections."""
        if self._session is not None:
            session, self._session = self._session, None
            await session.close()

    def _open(self) -> aiohttp.ClientSession:
        if self._session is None:
            # As many connections as requests: the replica's own queue is the bound.
            self._session = aiohttp.ClientSession(
                connector=aiohttp.UnixConnector(path=str(self._socket), limit=0),
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT),
                json_serialize=lambda facts: orjson.dumps(facts).decode(),
            )
        return self._session

    async def _call(
        self, method: str, path: str, facts: dict[str, Any] | None = None, *, timeout: float | None = None
    ) -> dict[str, Any]:
        try:
            async with (
                asyncio.timeout(timeout),
                self._open().request(method, f"http://replica{path}", json=facts) as response,
            ):
                raw = await response.read()
                if response.status != 200:
                    raise self._error(response.status, raw)
                answer: dict[str, Any] = orjson.loads(raw)
                return answer
        except TimeoutError:
            raise EngineUnavailable(f"{self._name} does not answer within {timeout} s") from None
        except (aiohttp.ClientError, OSError) as error:
            raise EngineUnavailable(f"{self._name} cannot be reached: {error}") from error

    def _item(self, line: bytes) -> Token | Finish:
        try:
            facts = orjson.loads(line)
        except orjson.JSONDecodeError:
            # The last line of a process that was killed while it wrote.
            raise aiohttp.ClientPayloadError("the stream stopped in mid-line") from None
        if "token" in facts:
            top = tuple((token, logprob) for token, logprob in facts.get("top", ()))
            return Token(facts["token"], facts["logprob"], facts["version"], top)
        if "finish" in facts:
            return Finish(FinishReason(facts["finish"]))
        raise EngineError(f"{self._name}: {facts['error']}")

    def _error(self, status: int, raw: bytes) -> Exception:
        try:
            facts = orjson.loads(raw)
            kind, message = facts["error"], f"{self._name}: {facts['message']}"
        except (orjson.JSONDecodeError, KeyError, TypeError):
            return EngineError(f"{self._name} answered with status {status}")
        if kind == "full":
            return EngineFull(message, retry_after=facts["retry_after"])
        if kind == "version":
            return VersionNotLoaded(message)
        if kind == "unfit":
            return Unfit(message)
        if kind == "request":
            return RequestError(facts["message"], parameter=facts.get("parameter"))
        return EngineError(message)
