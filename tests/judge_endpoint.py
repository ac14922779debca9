"""A chat-completions endpoint that behaves as badly as it is told to, over real HTTP."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

Reply = Callable[[dict[str, Any]], web.StreamResponse]


def graded(score: object, **fields: Any) -> web.Response:
    """A well-formed chat completion whose text is JSON with this score."""
    return said(f'{{"score": {score}}}', **fields)


def said(content: object, finish: str = "stop") -> web.Response:
    """A well-formed chat completion with this text."""
    message = {"role": "assistant", "content": content}
    choices = [{"index": 0, "message": message, "finish_reason": finish}]
    return web.json_response({"id": "1", "object": "chat.completion", "choices": choices})


def failed(status: int, message: str = "no", **headers: str) -> web.Response:
    """An error in OpenAI's form."""
    body = {"error": {"message": message, "type": "error", "param": None, "code": None}}
    return web.json_response(
        body, status=status, headers={k.replace("_", "-"): v for k, v in headers.items()}
    )


@dataclass
class Endpoint:
    """Answers with `replies` in turn, then with `rest`; an exception in the list closes the connection."""

    replies: list[web.StreamResponse | Reply | None] = field(default_factory=list)
    rest: Reply = lambda body: graded(7)
    delay: float = 0.0
    bodies: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    busiest: int = 0
    url: str = ""
    _busy: int = 0

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """One call."""
        body = await request.json()
        self.bodies.append(body)
        self.headers.append(dict(request.headers))
        self.times.append(asyncio.get_running_loop().time())
        self._busy += 1
        self.busiest = max(self.busiest, self._busy)
        try:
            await asyncio.sleep(self.delay)
            reply = self.replies.pop(0) if self.replies else self.rest
        finally:
            self._busy -= 1
        if reply is None:  # hang up
            assert request.transport is not None
            request.transport.close()
            return web.Response()
        return reply(body) if callable(reply) else reply


@contextlib.asynccontextmanager
async def serving(endpoint: Endpoint) -> AsyncIterator[Endpoint]:
    """Serve it on a free port of this machine."""
    app = web.Application(client_max_size=2**24)
    app.router.add_post("/v1/chat/completions", endpoint.handle)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    host, port = runner.addresses[0][:2]
    endpoint.url = f"http://{host}:{port}/v1"
    try:
        yield endpoint
    finally:
        await runner.cleanup()
