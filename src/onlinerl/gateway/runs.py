"""/admin/v1/policies/{policy}/runs: start, watch, pause and stop training runs.

A request for a run is a row in the store; `loop.trigger` starts the process. So the answer is immediate, a
restart forgets nothing, and nothing of a run is in this process.
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable
from functools import partial
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field
from sqlalchemy.engine import Connection
from starlette.requests import Request
from starlette.responses import Response

from onlinerl.config import Settings, for_run
from onlinerl.gateway.bodies import JSONReply, checked, read_json
from onlinerl.gateway.keys import Gate
from onlinerl.records import Run
from onlinerl.store import runs, versions
from onlinerl.store.database import Database, Writer


class RunRequest(BaseModel):
    """Body of POST …/runs."""

    model_config = ConfigDict(strict=True, extra="forbid", use_attribute_docstrings=True)

    overrides: dict[str, Any] = {}
    """Settings for this run alone by dotted name, `{"train.lr": 1e-5}`. Those that name code or a path are
    refused, and those that no run reads."""
    max_steps: Annotated[int, Field(ge=1, lt=2**63)] | None = None
    """End after so many batches."""
    follow: bool = False
    """Keep going as feedback arrives."""


class Runs:
    """The endpoints."""

    def __init__(
        self,
        gate: Gate,
        writer: Writer,
        database: Database,
        settings: Settings,
        *,
        wake: Callable[[str], None],
        body_limit: int,
    ) -> None:
        """wake: called with the policy's name once a run of it waits to be started."""
        self._gate = gate
        self._writer = writer
        self._database = database
        self._settings = settings
        self._wake = wake
        self._limit = body_limit

    async def start(self, request: Request) -> Response:
        """POST …/runs."""
        policy = self._gate.policy(request).name
        body = checked(RunRequest, await read_json(request, self._limit))
        chosen = for_run(self._settings, policy, body.overrides)
        made = await self._writer.submit(
            partial(
                runs.request,
                policy=policy,
                host=socket.gethostname(),
                settings=chosen.model_dump_json(),
                now=time.time(),
                follow=body.follow,
                last_batch=body.max_steps,
            )
        )
        self._wake(policy)
        where = f"/admin/v1/policies/{policy}/runs/{made.id}"
        return JSONReply(_describe(made), 201, {"location": where})

    async def list_(self, request: Request) -> Response:
        """GET …/runs, oldest first."""
        policy = self._gate.policy(request).name

        def read() -> list[Run]:
            with self._database.read() as c:
                return runs.list_(c, policy)

        return JSONReply([_describe(run) for run in await asyncio.to_thread(read)])

    async def show(self, request: Request) -> Response:
        """GET …/runs/{run}, with its last numbers and the versions that it made."""
        policy = self._gate.policy(request).name
        id = self._gate.number(request, "run")

        def read() -> dict[str, Any]:
            with self._database.read() as c:
                run = runs.get(c, policy, id)
                last = runs.last_step(c, id)
                made = [one.id for one in versions.list_(c, policy) if one.run == id]
            return {**_describe(run), "metrics": dict(last.numbers) if last else {}, "versions": made}

        return JSONReply(await asyncio.to_thread(read))

    async def stop(self, request: Request) -> Response:
        """DELETE …/runs/{run}: it ends after the step that it is in."""
        return await self._wish(request, "stop")

    async def pause(self, request: Request) -> Response:
        """POST …/runs/{run}/pause: it waits after the step that it is in, and keeps its memory."""
        return await self._wish(request, "pause")

    async def resume(self, request: Request) -> Response:
        """POST …/runs/{run}/resume."""
        return await self._wish(request, "")

    async def _wish(self, request: Request, wish: str) -> Response:
        policy = self._gate.policy(request).name
        id = self._gate.number(request, "run")

        def ask(c: Connection) -> Run:
            return runs.wish(c, policy, id, wish)

        return JSONReply(_describe(await self._writer.submit(ask)), 202)


def _describe(run: Run) -> dict[str, Any]:
    now = time.time()
    return {
        **run.describe(),
        "alive": runs.alive(run, now),
        "heartbeat_age": round(max(0.0, now - run.heartbeat_at), 3),
    }
