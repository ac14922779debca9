"""The replica's HTTP interface, a plain ASGI application: the tokens' way is as short as it can be.

    POST   /generate        {id, version, prompt_ids, max_tokens, temperature, top_p, seed, stop_ids,
                            top_logprobs} → NDJSON: {"token", "logprob", "version", "top"?} for each token,
                            then {"finish": reason}, or {"error": sentence} when this sequence failed
    POST   /versions/{id}   {url, digest}: load; answers when the version is servable
    DELETE /versions/{id}   unload; answers when its last sequence has ended
    GET    /status          {policy, versions, running, waiting, context}
    GET    /health          {}

Errors are `{"error": kind, "message": sentence}`: 400 request, 404 version, 409 cannot load, 429 full
(with `retry_after`). Reached over a private Unix socket only: there are no keys.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

import orjson

from onlinerl.errors import (
    EngineError,
    EngineFull,
    ModelError,
    OnlineRLError,
    RequestError,
    VersionNotLoaded,
    WeightsError,
)
from onlinerl.records import Generation
from onlinerl.replica.decoder import Decoder, End, Event, Running
from onlinerl.replica.sampling import Drawn
from onlinerl.replica.versions import Versions

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Inbox = asyncio.Queue["Drawn | End"]

BODY_LIMIT = 16_000_000


class Server:
    """The ASGI application. `deliver` is what the decoder calls with its events."""

    def __init__(self, policy: str) -> None:
        self._policy = policy
        self._loop: asyncio.AbstractEventLoop | None = None
        self.decoder: Decoder
        self.versions: Versions

    def deliver(self, events: list[Event]) -> None:
        """Hand events to the requests' tasks; called in the decoder's thread, once per iteration."""
        loop = self._loop
        if loop is not None and not loop.is_closed():
            loop.call_soon_threadsafe(_sort, events)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI entry."""
        if scope["type"] != "http":
            return
        self._loop = asyncio.get_running_loop()
        method, path = scope["method"], scope["path"]
        try:
            if (method, path) == ("POST", "/generate"):
                await self._generate(receive, send)
            elif path.startswith("/versions/"):
                await self._version(method, path.removeprefix("/versions/"), receive, send)
            elif (method, path) == ("GET", "/status"):
                versions, running, waiting, _ = self.decoder.counts()
                status = {
                    "policy": self._policy,
                    "versions": sorted(versions),
                    "running": running,
                    "waiting": waiting,
                    "context": self.versions.context,
                }
                await _answer(send, 200, status)
            elif (method, path) == ("GET", "/health"):
                await _answer(send, 200, {})
            else:
                await _answer(send, 404, {"error": "path", "message": f"no {method} {path} here"})
        except OnlineRLError as error:
            await _refuse(send, error)

    async def _version(self, method: str, name: str, receive: Receive, send: Send) -> None:
        if not name.isascii() or not name.isdigit():
            raise RequestError(f"{name!r} is not a version number")
        if method == "POST":
            body = await _body(receive)
            url, digest = body.get("url"), body.get("digest", "")
            if not isinstance(url, str) or not isinstance(digest, str):
                raise RequestError("url and digest must be strings")
            await asyncio.to_thread(self.versions.load, int(name), url, digest)
        elif method == "DELETE":
            await asyncio.to_thread(self.versions.unload, int(name))
        else:
            raise RequestError(f"no {method} here")
        await _answer(send, 200, {})

    async def _generate(self, receive: Receive, send: Send) -> None:
        request = _generation(await _body(receive), self._policy)
        inbox: Inbox = asyncio.Queue()
        sequence = self.decoder.submit(request, inbox)
        gone = asyncio.create_task(_disconnected(receive))
        gone.add_done_callback(lambda _: self.decoder.abort(sequence))
        try:
            await send(
                {
                    "type": "http.response.start",
                    "status": 200,
                    "headers": [(b"content-type", b"application/x-ndjson")],
                }
            )
            ended = False
            while not ended:
                lines = [_line(item := await inbox.get(), request.version)]
                ended = isinstance(item, End)
                while not inbox.empty():
                    item = inbox.get_nowait()
                    lines.append(_line(item, request.version))
                    ended = isinstance(item, End)
                await send({"type": "http.response.body", "body": b"".join(lines), "more_body": not ended})
        finally:
            # Also reached when the server shuts down in mid-stream: then this is what frees the row.
            gone.cancel()


def _sort(events: list[Event]) -> None:
    for sequence, item in events:
        _inbox(sequence).put_nowait(item)


def _inbox(sequence: Running) -> Inbox:
    assert isinstance(sequence.context, asyncio.Queue)
    return sequence.context


def _line(item: Drawn | End, version: int) -> bytes:
    if isinstance(item, End):
        facts: dict[str, Any] = {"error": item.message} if item.message else {"finish": item.reason.value}
        return orjson.dumps(facts, option=orjson.OPT_APPEND_NEWLINE)
    facts = {"token": item.token, "logprob": item.logprob, "version": version}
    if item.top:
        facts["top"] = item.top
    return orjson.dumps(facts, option=orjson.OPT_APPEND_NEWLINE)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _generation(body: dict[str, Any], policy: str) -> Generation:
    """Raises RequestError naming the field that is wrong."""
    try:
        request = Generation(
            id=str(body.get("id", "")),
            policy=policy,
            version=_integer(body, "version", None, 0),
            prompt_ids=_integers(body, "prompt_ids"),
            max_tokens=_integer(body, "max_tokens", None, 1),
            temperature=float(body.get("temperature", 1.0)),
            top_p=float(body.get("top_p", 1.0)),
            seed=None if body.get("seed") is None else int(body["seed"]),
            stop_ids=_integers(body, "stop_ids"),
            top_logprobs=_integer(body, "top_logprobs", 0, 0),
        )
    except (TypeError, ValueError, OverflowError) as error:
        raise RequestError(f"a number is not a number: {error}") from None
    if not 0 <= request.temperature <= 100:
        raise RequestError("temperature must be from 0 to 100", parameter="temperature")
    if not 0 < request.top_p <= 1:
        raise RequestError("top_p must be above 0 and at most 1", parameter="top_p")
    return request


def _integer(body: dict[str, Any], name: str, default: int | None, least: int) -> int:
    value = body.get(name, default)
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise RequestError(f"{name} must be an integer of at least {least}", parameter=name)
    return value


def _integers(body: dict[str, Any], name: str) -> tuple[int, ...]:
    value = body.get(name, [])
    if not isinstance(value, list) or not all(type(item) is int for item in value):
        raise RequestError(f"{name} must be a list of integers", parameter=name)
    return tuple(value)


async def _body(receive: Receive) -> dict[str, Any]:
    parts: list[bytes] = []
    size, more = 0, True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise RequestError("the client left before its request was complete")
        parts.append(message.get("body", b""))
        size += len(parts[-1])
        if size > BODY_LIMIT:
            raise RequestError(f"the body is larger than {BODY_LIMIT} bytes")
        more = message.get("more_body", False)
    try:
        body = orjson.loads(b"".join(parts))
    except orjson.JSONDecodeError as error:
        raise RequestError(f"the body is not JSON: {error}") from None
    if not isinstance(body, dict):
        raise RequestError("the body must be an object")
    return body


async def _answer(send: Send, status: int, facts: dict[str, Any]) -> None:
    headers = [(b"content-type", b"application/json")]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": orjson.dumps(facts)})


async def _refuse(send: Send, error: OnlineRLError) -> None:
    facts: dict[str, Any] = {"message": str(error)}
    if isinstance(error, EngineFull):
        await _answer(send, 429, {**facts, "error": "full", "retry_after": error.retry_after})
    elif isinstance(error, VersionNotLoaded):
        await _answer(send, 404, {**facts, "error": "version"})
    elif isinstance(error, WeightsError | ModelError):
        await _answer(send, 409, {**facts, "error": "unfit"})
    elif isinstance(error, EngineError):
        await _answer(send, 409, {**facts, "error": "load"})
    else:
        await _answer(
            send, 400, {**facts, "error": "request", "parameter": getattr(error, "parameter", None)}
        )
