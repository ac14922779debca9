"""A gateway over test doubles of the engine and the real store, served by a real uvicorn on a free port."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import uvicorn
from fastapi import FastAPI

from onlinerl.config import Settings, load_settings
from onlinerl.errors import EngineUnavailable
from onlinerl.gateway.app import create_app
from onlinerl.gateway.protocol import Protocol
from onlinerl.gateway.service import Service
from onlinerl.records import Experiment, Finish, Generation, Interaction, Token, Version, VersionState
from onlinerl.store import interactions, versions
from onlinerl.store.database import Database, Writer
from onlinerl.text import templates
from onlinerl.text.codec import Codec
from tests.doubles import DoubleEngine, Script

MODEL = Path(__file__).parents[1] / "src/onlinerl/models/fim-27m"
CODEC = Codec.open(MODEL)
ADMIN_KEY = "test-admin-key"


@dataclass
class SinglePool:
    """A pool of one engine."""

    engine: DoubleEngine

    def generate(self, request: Generation) -> AsyncGenerator[Token | Finish, None]:
        return self.engine.generate(request)

    def servable(self) -> frozenset[int]:
        return frozenset() if self.engine.down else frozenset(self.engine.versions)


@dataclass
class Gateway:
    """A running one, and what it stands on."""

    url: str
    app: FastAPI
    engine: DoubleEngine
    database: Database
    writer: Writer
    settings: Settings
    live: dict[str, int | None]
    client: httpx.AsyncClient
    ensured: list[int] = field(default_factory=list)
    experiments: dict[str, Experiment] = field(default_factory=dict)
    """What publishers would know to be running, by policy."""

    def interactions(self, id: str, count: int = 1) -> list[Interaction]:
        with self.database.read() as c:
            found = [interactions.get(c, id, index) for index in range(count)]
        assert all(found)
        return [one for one in found if one is not None]

    def last(self) -> Interaction | None:
        """The newest interaction."""
        with self.database.read() as c:
            found = interactions.candidates(c, project="default", since=0, limit=1)
        return found[0] if found else None

    def feedback_rows(self) -> list[dict[str, object]]:
        with self.database.read() as c:
            return [
                dict(row._mapping) for row in c.exec_driver_sql("SELECT * FROM feedback ORDER BY seq").all()
            ]

    async def complete(self, prompt: object = "def f(x):\n", **fields: object) -> httpx.Response:
        headers = fields.pop("headers", None)
        return await self.client.post(
            "/v1/completions",
            json={"model": "tab", "prompt": prompt, **fields},
            headers=headers,  # type: ignore[arg-type]
        )


async def until(condition: Callable[[], object], seconds: float = 5.0) -> None:
    """Wait for what is about to happen."""
    for _ in range(int(seconds * 100)):
        if condition():
            return
        await asyncio.sleep(0.01)
    raise TimeoutError("it did not happen")


def ids_of(text: str) -> list[int]:
    return CODEC.encode(text)


def says(*texts: str) -> Script:
    """A script whose answer is the token ids of `texts`."""
    ids = [id for text in texts for id in ids_of(text)]

    def script(prompt_ids: Sequence[int], version: int) -> Sequence[int]:
        return ids

    return script


@contextlib.asynccontextmanager
async def running(
    home: Path,
    *overrides: str,
    versions_: Iterable[int] = (0,),
    policies: Sequence[str] = ("tab",),
    codec: Codec = CODEC,
    codecs: Mapping[str, Codec] | None = None,
    knows: Callable[[Database], dict[str, Experiment]] = lambda _: {},
) -> AsyncIterator[Gateway]:
    dotted = [override for override in overrides if override.startswith(("policies.", "webhooks="))]
    settings = load_settings(overrides=[*(f"policies.{name}={{}}" for name in policies), *dotted], home=home)
    for override in overrides:
        name, _, value = override.partition("=")
        if name == "body_limit":
            limits = settings.server.model_copy(update={"body_limit": int(value)})
            settings = settings.model_copy(update={"server": limits})
        elif name == "alias":
            policy = settings.policies["tab"].model_copy(update={"aliases": (value,)})
            settings = settings.model_copy(update={"policies": {**settings.policies, "tab": policy}})
    database = Database.open(settings.database_url)
    with database.write() as c:
        for name in policies:
            if versions.find(c, name, 0) is not None:  # a gateway of this store was here before
                continue
            for id in versions_:
                versions.register(
                    c,
                    Version(
                        policy=name,
                        id=id,
                        state=VersionState.CANDIDATE,
                        parent=None if id == 0 else 0,
                        run=None,
                        created_at=1.0 + id,
                        url=f"file:///nowhere/{name}/{id}",
                        digest="0" * 64,
                    ),
                )
            if 0 in versions_:
                versions.promote(c, name, 0, actor="test")
    engine = DoubleEngine()
    pool = SinglePool(engine)
    live: dict[str, int | None] = dict.fromkeys(policies, 0)
    ensured: list[int] = []
    experiments = knows(database)

    async def ensure(version: int) -> None:
        if engine.down:
            raise EngineUnavailable("nothing is reachable")
        ensured.append(version)
        engine.versions.add(version)

    def service(name: str) -> Service:
        mine = (codecs or {}).get(name, codec)

        def exists(version: int) -> bool:
            with database.read() as c:
                return versions.find(c, name, version) is not None

        return Service(
            name=name,
            settings=settings.policies[name],
            codec=mine,
            template=templates.find(mine.tokenizer.token_to_id),
            pool=pool,
            live=lambda: live[name],
            ensure=ensure,
            exists=exists,
            experiment=lambda: experiments.get(name),
        )

    async def replicas() -> list[dict[str, object]]:
        return [{"policy": "tab", "name": engine.name, "versions": sorted(engine.versions)}]

    writer = Writer(database)
    await writer.start()
    app = create_app(
        {name: service(name) for name in policies},
        writer,
        database,
        settings,
        admin_key=ADMIN_KEY,
        replicas=replicas,
    )
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen(256)
        config = uvicorn.Config(
            app, http=Protocol, log_level="warning", lifespan="off", timeout_graceful_shutdown=5
        )
        server = uvicorn.Server(config)
        serving = asyncio.create_task(server.serve([listening]))
        await until(lambda: server.started)
        url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        try:
            async with httpx.AsyncClient(base_url=url, timeout=20) as client:
                yield Gateway(
                    url, app, engine, database, writer, settings, live, client, ensured, experiments
                )
        finally:
            server.should_exit = True
            await serving
            await writer.close()
            database.close()
