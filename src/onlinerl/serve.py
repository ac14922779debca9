"""`onlinerl serve`: composes gateway, publishers and triggers, and keeps the replicas running.

One process, no torch in it. What it starts: one `onlinerl.replica` per policy and replica, which dies with
it (their standard input is a pipe from here), and training runs, which do not.
"""

from __future__ import annotations

import asyncio
import errno
import fcntl
import json
import os
import secrets
import shutil
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvicorn
import uvloop

from onlinerl import base, config
from onlinerl.config import Settings
from onlinerl.dashboard import app as dashboard
from onlinerl.engines.embedded import EmbeddedEngine
from onlinerl.engines.pool import Pool
from onlinerl.errors import EngineError, ModelError, NotFound, OnlineRLError, PortTaken, SettingsError
from onlinerl.gateway.app import create_app
from onlinerl.gateway.service import Service
from onlinerl.loop.promotion import Promotion
from onlinerl.loop.publisher import Publisher
from onlinerl.loop.trigger import Trigger
from onlinerl.observe import configure_logging, logger
from onlinerl.records import Arm
from onlinerl.store import versions
from onlinerl.store.database import Database, Writer
from onlinerl.supervisor import Supervisor, socket_folder
from onlinerl.text.codec import Codec
from onlinerl.text.templates import find as find_template

BACKLOG = 2048
"""Connections that the kernel keeps for us while we start or are busy."""
DRAIN = 10
"""Seconds that open requests may take after a signal to stop."""
READY = 300.0
"""Seconds until an engine must serve, in `running`."""
log = logger(component="serve")


# ------------------------------------------------------------------------------ before anything starts


@contextmanager
def home_lock(home: Path) -> Iterator[Path]:
    """Hold `home` for this process; gives the file in which the server says where it is.

    Raises SettingsError when another `serve` holds it, or the folder cannot be written.
    """
    path = home / "serve.json"
    try:
        home.mkdir(parents=True, exist_ok=True)
        handle = os.open(home / "serve.lock", os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as error:
        raise SettingsError(f"home {home} cannot be written: {error.strerror}; set --home") from None
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            other = read_presence(home)
            where = f" (process {other['pid']}, {other['url']})" if other else ""
            raise SettingsError(
                f"another `onlinerl serve`{where} uses {home}; stop it, or choose another folder with --home"
            ) from None
        stale = read_presence(home)
        if stale:  # a server that was killed could not tidy up
            shutil.rmtree(stale["sockets"], ignore_errors=True)
        yield path
    finally:
        os.close(handle)


def read_presence(home: Path) -> dict[str, Any] | None:
    """What the server of `home` wrote about itself: pid, url, feedback_url, sockets; None: nothing."""
    try:
        presence = json.loads((home / "serve.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    known = isinstance(presence, dict) and {"pid", "url", "feedback_url", "sockets"} <= presence.keys()
    return presence if known else None


def listen(host: str, port: int, setting: str) -> socket.socket:
    """A listening socket; raises PortTaken, or SettingsError for an address that is not ours."""
    where = f"{host}:{port}"
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        made = socket.socket(family, kind, protocol)
    except (OSError, UnicodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "that is no name of a machine"
        raise SettingsError(f"cannot listen on {where}: {reason}; set server.host (--host)") from None
    option = "--" + setting.removeprefix("server.").replace("_", "-")
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind(address)
        made.listen(BACKLOG)
    except OSError as error:
        made.close()
        if error.errno == errno.EADDRINUSE:
            raise PortTaken(
                f"port {port} on {host} is in use; stop what listens there, or set {setting} ({option})"
            ) from None
        raise SettingsError(
            f"cannot listen on {where}: {error.strerror}; set server.host (--host) or {setting} ({option})"
        ) from None
    made.setblocking(False)
    return made


def admin_key(home: Path) -> tuple[str, bool]:
    """The admin key of `home`, made on the first call, and whether it was made just now."""
    path = home / "admin.key"
    try:
        known = path.read_text(encoding="ascii").strip()
    except FileNotFoundError:
        known = ""
    except UnicodeDecodeError:
        raise SettingsError(f"{path} holds no key; remove it, and a new one is made") from None
    if known:
        return known, False
    key = "orl-" + secrets.token_urlsafe(24)
    # Whole or not at all: a server that is killed here must not leave an empty key behind.
    partial = path.with_suffix(".partial")
    partial.unlink(missing_ok=True)
    handle = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(handle, "w", encoding="ascii") as file:
        file.write(key + "\n")
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)
    return key, True


# -------------------------------------------------------------------------------------------- server


class _Uvicorn(uvicorn.Server):
    """Signals are ours to handle, not the web server's."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@dataclass(slots=True)
class Server:
    """A running server. Made by `running`."""

    settings: Settings
    url: str
    """Of the inference API; the same application answers at `feedback_url`."""
    feedback_url: str
    admin_key: str
    key_is_new: bool
    database: Database
    publishers: Mapping[str, Publisher]
    replicas: tuple[Supervisor, ...]
    web: uvicorn.Server
    failure: asyncio.Future[None]
    """Ends only when the server cannot go on; carries the reason."""

    async def until_ready(self, limit: float = READY) -> None:
        """Return once every policy has a live version that an engine holds; EngineError after `limit` s.

        Raises ModelError as soon as an engine says of a policy's first model that it can never serve it.
        """
        deadline = time.monotonic() + limit
        while not all(publisher.ready for publisher in self.publishers.values()):
            if self.failure.done():
                await self.failure
            for publisher in self.publishers.values():
                if publisher.unfit and not publisher.ready:
                    raise ModelError(
                        f"the model of the policy {publisher.policy} cannot be served: {publisher.unfit}"
                    )
            if time.monotonic() > deadline:
                logs = ", ".join(str(replica.log) for replica in self.replicas)
                raise EngineError(
                    f"no engine serves after {limit:.0f} s; the replicas' logs tell why: {logs}"
                )
            await asyncio.sleep(0.02)


@asynccontextmanager
async def running(settings: Settings) -> AsyncIterator[Server]:
    """Start everything, yield the running server, and take everything down again.

    At the yield both ports answer; `await server.until_ready()` waits for the engines. Raises
    SettingsError, ModelError, PortTaken or StoreError before anything is started.
    """
    settings = settings.model_copy(update={"home": settings.home.resolve()})
    async with AsyncExitStack() as stack:
        presence = stack.enter_context(home_lock(settings.home))
        sockets = _listen(settings.server, stack)
        database = Database.open(settings.database_url)
        stack.callback(database.close)
        key, key_is_new = admin_key(settings.home)
        for name in settings.policies:
            await asyncio.to_thread(base.ensure, settings, name, database)
        folder = stack.enter_context(socket_folder())
        logs = settings.home / "logs"
        logs.mkdir(exist_ok=True)

        writer = Writer(database)
        await writer.start()
        stack.push_async_callback(writer.close)
        tasks: list[asyncio.Task[None]] = []
        stack.push_async_callback(_cancel, tasks)

        services: dict[str, Service] = {}
        publishers: dict[str, Publisher] = {}
        supervisors: list[Supervisor] = []
        for name, policy in settings.policies.items():
            pool = Pool(name)
            publisher = publishers[name] = Publisher(name, policy, database, pool)
            services[name] = _service(name, policy, database, pool, publisher)
            for number in range(policy.engine.replicas):
                supervisor = Supervisor(
                    name,
                    number,
                    policy.engine,
                    sockets=folder,
                    logs=logs,
                    on_up=publisher.wake,
                    on_down=publisher.lost,
                )
                stack.push_async_callback(supervisor.engine.close)
                pool.add(supervisor.engine)
                supervisors.append(supervisor)
            tasks.append(asyncio.create_task(publisher.run(), name=f"publisher {name}"))
            tasks.append(asyncio.create_task(Trigger(name, settings, database).run(), name=f"trigger {name}"))
        for name in settings.policies:
            promotion = Promotion(
                name,
                settings,
                database,
                holds=lambda arm: _holds(publishers, arm),
                fault=lambda arm: _fault(publishers, arm),
            )
            tasks.append(asyncio.create_task(promotion.run(), name=f"promotion {name}"))
        for supervisor in supervisors:
            tasks.append(asyncio.create_task(supervisor.run(), name=f"replica {supervisor.name}"))

        app = create_app(
            services,
            writer,
            database,
            settings,
            admin_key=key,
            replicas=lambda: describe_replicas(supervisors),
        )
        if settings.server.dashboard:
            dashboard.mount(
                app,
                settings,
                database,
                live={name: one.live for name, one in services.items()},
                admin_key=key,
                replicas=lambda: describe_replicas(supervisors),
            )
        web = _Uvicorn(
            uvicorn.Config(
                app,
                http="httptools",
                ws="none",
                log_config=None,
                access_log=False,
                server_header=False,
                timeout_graceful_shutdown=DRAIN,
            )
        )
        urls = [_url(each) for each in sockets]
        server = Server(
            settings=settings,
            url=urls[0],
            feedback_url=urls[-1],
            admin_key=key,
            key_is_new=key_is_new,
            database=database,
            publishers=publishers,
            replicas=tuple(supervisors),
            web=web,
            failure=asyncio.get_running_loop().create_future(),
        )
        serving = asyncio.create_task(web.serve(sockets=sockets), name="web")
        for task in (serving, *tasks):
            task.add_done_callback(lambda task: _report(task, server.failure))
        stack.push_async_callback(_drain, web, serving)
        while not web.started:
            if server.failure.done():
                await server.failure
            if serving.done():
                raise OnlineRLError("the web server did not start; its log above tells why")
            await asyncio.sleep(0.005)
        _write_presence(presence, server, folder)
        stack.callback(presence.unlink, missing_ok=True)
        try:
            yield server
        finally:
            server.failure.cancel()


def _listen(settings: config.Server, stack: AsyncExitStack) -> list[socket.socket]:
    sockets = [listen(settings.host, settings.port, "server.port")]
    stack.callback(sockets[0].close)
    if settings.feedback_port == 0 or settings.feedback_port != settings.port:
        sockets.append(listen(settings.host, settings.feedback_port, "server.feedback_port"))
        stack.callback(sockets[1].close)
    return sockets


def _url(listening: socket.socket) -> str:
    host, port = listening.getsockname()[:2]
    if host in ("0.0.0.0", "::"):
        host = "127.0.0.1" if host == "0.0.0.0" else "::1"
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _service(
    name: str, policy: config.Policy, database: Database, pool: Pool, publisher: Publisher
) -> Service:
    with database.read() as c:
        folder = Path(versions.get(c, name, 0).url)
    codec = Codec.open(folder)
    return Service(
        name=name,
        settings=policy,
        codec=codec,
        template=find_template(codec.tokenizer.token_to_id),
        pool=pool,
        live=lambda: publisher.live,
        ensure=publisher.ensure,
        exists=publisher.exists,
        experiment=lambda: publisher.experiment,
    )


def _holds(publishers: Mapping[str, Publisher], arm: Arm) -> bool:
    publisher = publishers.get(arm.policy)
    return publisher is not None and arm.version is not None and publisher.holds(arm.version)


def _fault(publishers: Mapping[str, Publisher], arm: Arm) -> str | None:
    publisher = publishers.get(arm.policy)
    return publisher.fault(arm.version) if publisher is not None and arm.version is not None else None


def _report(task: asyncio.Task[None], failure: asyncio.Future[None]) -> None:
    if task.cancelled() or failure.done():
        return
    error = task.exception()
    if error is not None:
        failure.set_exception(error)


async def _cancel(tasks: list[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def _drain(web: uvicorn.Server, serving: asyncio.Task[None]) -> None:
    web.should_exit = True
    await serving


def _write_presence(path: Path, server: Server, sockets: Path) -> None:
    presence = {
        "pid": os.getpid(),
        "url": server.url,
        "feedback_url": server.feedback_url,
        "sockets": str(sockets),
        "replicas": [
            {"name": one.name, "policy": one.policy, "socket": str(one.socket)} for one in server.replicas
        ],
    }
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(presence, indent=2) + "\n", encoding="utf-8")
    partial.replace(path)


# ----------------------------------------------------------------------------------------- for the CLI


def main(settings: Settings, *, same: str = "") -> None:
    """Serve until SIGINT or SIGTERM; a second one does not wait for open requests.

    same: the options, with a space before each, that give another verb the same settings.
    """
    configure_logging()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(settings, same))


async def _serve(settings: Settings, same: str) -> None:
    stop = asyncio.Event()
    servers: list[Server] = []

    def asked() -> None:
        if stop.is_set():
            for server in servers:
                server.web.force_exit = True
        stop.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, asked)
    async with running(settings) as server:
        servers.append(server)
        _greet(server)
        stopping = asyncio.create_task(stop.wait())
        ready = asyncio.create_task(_say_ready(server, same))
        try:
            ends: set[asyncio.Future[Any]] = {stopping, server.failure}
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            if server.failure.done():
                await server.failure
            print("stopping: open requests may finish, Ctrl-C again cuts them", flush=True)
        finally:
            ready.cancel()
            stopping.cancel()


def _greet(server: Server) -> None:
    names = ", ".join(server.settings.policies)
    print(f"completions  {server.url}/v1/completions   ({names})")
    print(f"feedback     {server.feedback_url}/v1/feedback")
    if server.settings.server.dashboard:
        print(f"dashboard    {server.url}/")
    print(f"data         {server.settings.home}")
    if server.key_is_new:
        print(f"admin key    {server.admin_key}   (kept in {server.settings.home / 'admin.key'})")
    print("loading the model …", flush=True)


async def _say_ready(server: Server, same: str) -> None:
    try:
        await server.until_ready()
    except ModelError as error:  # no waiting helps: say so, and end
        if not server.failure.done():
            server.failure.set_exception(error)
        return
    except EngineError as error:
        log.error("not ready", error=str(error))
        return
    policy = next(iter(server.settings.policies))
    print("ready. Try, in another terminal:")
    print(
        f"  curl -s {server.url}/v1/completions -H 'content-type: application/json' "
        f"""-d '{{"model": "{policy}", "prompt": "def mean(values):\\n    return ", "max_tokens": 24}}'"""
    )
    print(
        f"  curl -s {server.feedback_url}/v1/feedback -H 'content-type: application/json' "
        """-d '{"id": "cmpl-…", "event": "accepted"}'"""
    )
    several = f" --policy {policy}" if len(server.settings.policies) > 1 else ""
    print(f"  onlinerl train{several}{same}            learns from the feedback")
    print(f"  onlinerl versions list{same}    shows what came of it")
    sys.stdout.flush()


async def describe_replicas(supervisors: Sequence[Supervisor]) -> list[dict[str, Any]]:
    """What each replica says of itself; one that does not answer is `down`."""
    return [await _describe(one.name, one.policy, one.engine) for one in supervisors]


def addresses(settings: Settings) -> tuple[str, str]:
    """URLs of the inference and the feedback API of the server that runs on the home; SettingsError: none."""
    presence = read_presence(settings.home)
    if presence is None or not _held(settings.home):
        raise SettingsError(
            f"no `onlinerl serve` runs on {settings.home}: start it, choose its folder with --home, "
            "or name a server with --url"
        )
    return presence["url"], presence["feedback_url"]


async def ask_replicas(settings: Settings) -> list[dict[str, Any]]:
    """`describe_replicas`, asked by another process. Raises NotFound when no server runs on the home."""
    presence = read_presence(settings.home)
    if presence is None or not _held(settings.home):
        raise NotFound(
            f"no `onlinerl serve` runs on {settings.home}: start it, or choose its folder with --home"
        )
    found = []
    for one in presence["replicas"]:
        engine = EmbeddedEngine(one["name"], Path(one["socket"]))
        try:
            found.append(await _describe(one["name"], one["policy"], engine))
        finally:
            await engine.close()
    return found


async def _describe(name: str, policy: str, engine: EmbeddedEngine) -> dict[str, Any]:
    try:
        status = await engine.status()
    except EngineError:
        return {"name": name, "policy": policy, "state": "down", "versions": [], "running": 0, "waiting": 0}
    return {
        "name": name,
        "policy": policy,
        "state": "up",
        "versions": sorted(status.versions),
        "running": status.running,
        "waiting": status.waiting,
    }


def _held(home: Path) -> bool:
    """Whether a living process holds the home's lock."""
    try:
        with open(home / "serve.lock", "rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except OSError:
        return True
    return False
