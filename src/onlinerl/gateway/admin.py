"""/admin/v1: versions and replicas, for those who hold the admin key."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from sqlalchemy.engine import Connection
from starlette.requests import Request
from starlette.responses import Response

from onlinerl.errors import NotFound, RequestError
from onlinerl.gateway.bodies import JSONReply, read_json
from onlinerl.gateway.keys import Gate
from onlinerl.gateway.service import Services
from onlinerl.records import Version
from onlinerl.store import versions
from onlinerl.store.database import Database, Writer

ACTOR = "admin"

Replicas = Callable[[], Awaitable[list[dict[str, Any]]]]
"""What `serve` knows of the engines, as JSON objects."""


class Admin:
    """The endpoints. Every one of them checks the key first."""

    def __init__(
        self,
        services: Services,
        writer: Writer,
        database: Database,
        *,
        key: str | None,
        replicas: Replicas | None,
        body_limit: int,
    ) -> None:
        self._services = services
        self._writer = writer
        self._database = database
        self._gate = Gate(key, services)
        self._replicas = replicas
        self._limit = body_limit

    def _allow(self, request: Request) -> None:
        """Raise Forbidden without the admin key."""
        self._gate.allow(request)

    def _policy(self, request: Request) -> str:
        name: str = request.path_params["policy"]
        if name not in self._services.by_name:
            raise NotFound(f"there is no policy {name[:80]!r}")
        return name

    async def versions(self, request: Request) -> Response:
        """GET …/versions."""
        self._allow(request)
        policy = self._policy(request)

        def read() -> list[Version]:
            with self._database.read() as connection:
                return list(versions.list_(connection, policy))

        return JSONReply([one.describe() for one in await asyncio.to_thread(read)])

    async def promote(self, request: Request) -> Response:
        """POST …/versions/{v}/promote."""
        self._allow(request)
        policy = self._policy(request)
        version = _version(request.path_params["version"], "version")
        done = await self._writer.submit(
            lambda connection: versions.promote(connection, policy, version, actor=ACTOR)
        )
        return JSONReply(done.describe())

    async def rollback(self, request: Request) -> Response:
        """POST …/rollback, with `{"to": version}` or nothing for the one before."""
        self._allow(request)
        policy = self._policy(request)
        body = {}
        if request.headers.get("content-length", "0") != "0" or "transfer-encoding" in request.headers:
            body = await read_json(request, self._limit)
        unknown = sorted(set(body) - {"to"})
        if unknown:
            raise RequestError(
                f"unknown field {unknown[0][:64]}: only `to` is known", parameter=unknown[0][:64]
            )
        to = body.get("to")
        if to is not None and (type(to) is not int or not 0 <= to < 2**63):
            raise RequestError("to must be a version number", parameter="to")
        done = await self._writer.submit(partial(_rollback, policy=policy, to=to))
        return JSONReply(done.describe())

    async def replicas(self, request: Request) -> Response:
        """GET /admin/v1/replicas."""
        self._allow(request)
        return JSONReply(await self._replicas() if self._replicas else [])


def _rollback(connection: Connection, *, policy: str, to: int | None) -> Version:
    return versions.rollback(connection, policy, to=to, actor=ACTOR)


def _version(text: str, name: str) -> int:
    if not (text.isascii() and text.isdecimal() and len(text) < 19):
        raise RequestError(f"{name} must be a version number", parameter=name)
    return int(text)
