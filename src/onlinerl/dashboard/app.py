"""The pages' routes: files, the board that everybody may read, and what needs the admin key.

The pages hold no state here. A page asks again every other second with the mark of what it has, and what
many ask is computed once: so any number of gateway processes may answer it, nothing is open while nobody
looks, and a request for a completion pays nothing. Changing actions are the admin interface's own.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson
from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from onlinerl.config import Settings
from onlinerl.dashboard import export, views
from onlinerl.dashboard.past import Past
from onlinerl.errors import Forbidden, NotFound, RequestError
from onlinerl.records import Verdict
from onlinerl.store import charts
from onlinerl.store.database import Database

STATIC = Path(__file__).parent / "static"
TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
    ".LICENSE": "text/plain; charset=utf-8",
}
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
"""The page shows text that a model wrote: nothing but our own files may run in it."""
FRESH = 1.0
"""Seconds in which an answer is given again without looking."""
SHOWN = 20
"""Most interactions of one answer."""
FILTERS = (*(verdict.value for verdict in Verdict), "waiting")
Replicas = Callable[[], Awaitable[list[dict[str, Any]]]]


def mount(
    app: FastAPI,
    settings: Settings,
    database: Database,
    *,
    live: Mapping[str, Callable[[], int | None]],
    admin_key: str | None,
    replicas: Replicas | None,
) -> None:
    """Add the pages to the application that the gateway made.

    live: by policy, the version that new requests get now. admin_key: opens what needs it; None closes that.
    """
    pages = _Pages(settings, database, live, admin_key, replicas)
    files = _Files()
    for path, endpoint in (
        ("/", files.index),
        ("/dashboard/static/{mark}/{name}", files.file),
        ("/dashboard/board", pages.board),
        ("/dashboard/replicas", pages.replicas),
        ("/dashboard/interactions", pages.interactions),
        ("/dashboard/export", pages.order),
        ("/dashboard/export.csv", pages.download),
    ):
        app.add_api_route(path, endpoint, methods=["GET"], include_in_schema=False)


class _Files:
    """The page and what it loads, under addresses that change with the content."""

    def __init__(self) -> None:
        self._files = {path.name: path.read_bytes() for path in sorted(STATIC.iterdir())}
        digest = hashlib.sha256(b"\0".join(self._files.values()))
        self._mark = digest.hexdigest()[:12]
        self._index = self._files.pop("index.html").replace(b"MARK", self._mark.encode())

    async def index(self, request: Request) -> Response:
        """GET /."""
        headers = {
            "content-security-policy": POLICY,
            "cache-control": "no-cache",
            "x-content-type-options": "nosniff",
            "referrer-policy": "no-referrer",
        }
        return Response(self._index, media_type=TYPES[".html"], headers=headers)

    async def file(self, request: Request) -> Response:
        """GET /dashboard/static/…"""
        name: str = request.path_params["name"]
        if name not in self._files:
            raise NotFound(f"the dashboard has no file {name[:80]!r}")
        fresh = request.path_params["mark"] == self._mark
        headers = {
            "cache-control": "public, max-age=31536000, immutable" if fresh else "no-cache",
            "x-content-type-options": "nosniff",
        }
        return Response(self._files[name], media_type=TYPES[Path(name).suffix], headers=headers)


@dataclass(slots=True)
class _Kept:
    """An answer that several may get."""

    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    at: float = -math.inf
    """When it was looked for, by the monotonic clock."""
    body: bytes = b""
    mark: str = ""


class _Pages:
    def __init__(
        self,
        settings: Settings,
        database: Database,
        live: Mapping[str, Callable[[], int | None]],
        key: str | None,
        replicas: Replicas | None,
    ) -> None:
        self._settings = settings
        self._database = database
        self._live = live
        self._key = key
        self._replicas = replicas
        self._kept: dict[tuple[str, ...], _Kept] = {}
        self._past = Past()

    # ------------------------------------------------------------------------ what needs no key

    async def board(self, request: Request) -> Response:
        """GET /dashboard/board?policy=…&span=…: all but text and names; 304 where nothing moved."""
        policy, span = self._policy(request), _span(request)

        async def look() -> dict[str, Any]:
            return await asyncio.to_thread(self._board, policy, span)

        kept = await self._keep(("board", policy, span), look)
        serving = self._live[policy]() if policy in self._live else None
        mark = f'"{kept.mark}-{serving}"'
        if request.headers.get("if-none-match") == mark:
            return Response(status_code=304, headers={"etag": mark})
        # What the engines serve is known without looking, and must not lag behind a rollback.
        body = b'{"serving":' + orjson.dumps(serving) + b"," + kept.body[1:]
        headers = {"etag": mark, "cache-control": "no-store"}
        return Response(body, media_type="application/json", headers=headers)

    def _board(self, policy: str, span: str) -> dict[str, Any]:
        now = time.time()
        with self._database.read() as c:
            settings = self._settings.policies[policy]
            found = views.board(c, policy, settings, views.SPANS[span], now, self._past)
        return {**found, "policies": list(self._settings.policies)}

    async def replicas(self, request: Request) -> Response:
        """GET /dashboard/replicas: by itself, since an engine may take long to answer."""

        async def look() -> list[dict[str, Any]]:
            return await self._replicas() if self._replicas else []

        kept = await self._keep(("replicas",), look)
        return Response(kept.body, media_type="application/json", headers={"cache-control": "no-store"})

    async def _keep(self, name: tuple[str, ...], look: Callable[[], Awaitable[Any]]) -> _Kept:
        kept = self._kept.setdefault(name, _Kept())
        async with kept.lock:
            if time.monotonic() >= kept.at + FRESH:
                kept.body = orjson.dumps(await look())
                kept.mark = hashlib.sha256(kept.body).hexdigest()[:16]
                kept.at = time.monotonic()
        return kept

    # ------------------------------------------------------------------------ what needs the key

    async def interactions(self, request: Request) -> Response:
        """GET /dashboard/interactions?policy=…&verdict=…&before=…: the newest, with their tokens."""
        self._allow(request)
        policy = self._policy(request)
        verdict = request.query_params.get("verdict") or None
        if verdict is not None and verdict not in FILTERS:
            raise RequestError(f"verdict must be one of {', '.join(FILTERS)}", parameter="verdict")
        before = _number(request, "before", math.inf)
        settings = self._settings.policies[policy]

        def look() -> list[dict[str, Any]]:
            with self._database.read() as c:
                tau = views.tau(c, policy, settings)
                found = charts.newest(c, policy=policy, limit=SHOWN, verdict=verdict, before=before)
            weight, code = settings.rewards.timeout_weight, settings.dashboard.code == "shown"
            return [views.interaction(one, tau=tau, weight=weight, code=code) for one in found]

        return _json(await asyncio.to_thread(look))

    async def order(self, request: Request) -> Response:
        """GET /dashboard/export?policy=…&span=…: a link that downloads interactions, for a minute."""
        key = self._allow(request)
        policy, span = self._policy(request), views.SPANS[_span(request)]
        now = time.time()

        def look() -> float:
            with self._database.read() as c:
                return views.tau(c, policy, self._settings.policies[policy])

        tau = await asyncio.to_thread(look)
        order = export.Order(policy, now - span.seconds, now, tau, int(now + export.VALID))
        return _json({"url": f"/dashboard/export.csv?{order.query(key)}"})

    async def download(self, request: Request) -> Response:
        """GET /dashboard/export.csv: what a signed link asks for, as it is read."""
        if self._key is None:
            raise Forbidden("this server has no admin key, and so exports nothing")
        policy = self._policy(request)
        order = export.Order(
            policy,
            since=_number(request, "since", 0.0),
            until=_number(request, "until", 0.0),
            tau=_number(request, "tau", 0.0),
            expires=int(_number(request, "expires", 0.0)),
        )
        order.check(self._key, request.query_params.get("signature", ""), time.time())
        settings = self._settings.policies[policy]
        pieces = export.rows(
            charts.export(self._database, policy=policy, since=order.since, until=order.until),
            tau=order.tau,
            weight=settings.rewards.timeout_weight,
            code=settings.dashboard.code == "shown",
        )
        name = f"{policy}-{time.strftime('%Y%m%d-%H%M%S', time.gmtime(order.until))}.csv"
        headers = {"content-disposition": f'attachment; filename="{name}"', "cache-control": "no-store"}
        return StreamingResponse(_threaded(pieces), media_type="text/csv; charset=utf-8", headers=headers)

    # ---------------------------------------------------------------------------------- requests

    def _policy(self, request: Request) -> str:
        name = request.query_params.get("policy") or next(iter(self._settings.policies))
        if name not in self._settings.policies:
            raise NotFound(f"there is no policy {name[:80]!r}")
        return name

    def _allow(self, request: Request) -> str:
        """The admin key. Raises Forbidden for a request without it."""
        kind, _, given = request.headers.get("authorization", "").partition(" ")
        if kind.lower() != "bearer" or not given.strip():
            raise Forbidden("the admin key is needed: send it as Authorization: Bearer", status=401)
        if self._key is None or not hmac.compare_digest(given.strip().encode(), self._key.encode()):
            raise Forbidden("that is not the admin key", code="invalid_api_key")
        return self._key


def _json(found: Any) -> Response:
    """An answer that nobody keeps."""
    headers = {"cache-control": "no-store"}
    return Response(orjson.dumps(found), media_type="application/json", headers=headers)


def _span(request: Request) -> str:
    name = request.query_params.get("span") or "day"
    if name not in views.SPANS:
        raise RequestError(f"span must be one of {', '.join(views.SPANS)}", parameter="span")
    return name


def _number(request: Request, name: str, default: float) -> float:
    """A finite number of the query. Raises RequestError."""
    text = request.query_params.get(name)
    if not text:
        return default
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise RequestError(f"{name} must be a number", parameter=name)
    return number


async def _threaded(pieces: Iterator[str]) -> AsyncIterator[str]:
    """The pieces, each made in a thread: the database is read there, and the loop serves others."""
    end: object = object()
    while (piece := await asyncio.to_thread(next, pieces, end)) is not end:
        yield str(piece)
