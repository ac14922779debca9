"""`python -m onlinerl.replica --socket PATH --policy NAME`: one embedded engine.

Settings are config.Engine as JSON in ONLINERL_SETTINGS. Ends with 0 on SIGTERM, SIGINT or when stdin
reaches its end (the parent died), with 2 on wrong settings, with 70 when the decoding loop broke.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import uvicorn
import uvloop
from pydantic import ValidationError

from onlinerl.config import Engine
from onlinerl.errors import OnlineRLError, SettingsError

SOCKET_LIMIT = 100
"""Bytes of a Unix socket's path that every system takes."""

SWITCH = 0.0002
"""Seconds until a thread that wants the interpreter gets it. Python's 5 ms would let the thread that
writes answers hold up the decoding at every operation."""


def main() -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(prog="onlinerl.replica", description="One embedded engine")
    parser.add_argument("--socket", required=True, type=Path)
    parser.add_argument("--policy", required=True)
    options = parser.parse_args()
    try:
        settings = Engine.model_validate_json(os.environ.get("ONLINERL_SETTINGS", "{}"))
        if len(os.fsencode(options.socket)) > SOCKET_LIMIT:
            raise SettingsError(f"the socket's path is longer than {SOCKET_LIMIT} bytes: {options.socket}")
        if not options.socket.parent.is_dir():
            raise SettingsError(f"the socket's folder {options.socket.parent} does not exist")
        threads = settings.threads or max(1, (os.cpu_count() or 1) // 2)
        # Before torch is imported, which reads it once.
        os.environ["OMP_NUM_THREADS"] = str(threads)
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
        os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
        uvloop.run(_serve(options.socket, options.policy, settings, threads))
    except (OnlineRLError, ValidationError) as error:
        print(f"replica: {error}", file=sys.stderr, flush=True)
        return 2
    return 0


async def _serve(path: Path, policy: str, settings: Engine, threads: int) -> None:
    # Here, not above: torch reads OMP_NUM_THREADS when it is imported.
    import torch
    from transformers.utils import logging as transformers_logging

    from onlinerl.replica.decoder import Decoder
    from onlinerl.replica.server import Server
    from onlinerl.replica.versions import Versions

    torch.set_num_threads(threads)
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    sys.setswitchinterval(SWITCH)
    server = Server(policy)
    decoder = Decoder(
        concurrency=settings.concurrency,
        queue=settings.queue,
        prefill=settings.prefill,
        threads=threads,
        deliver=server.deliver,
        crashed=_crashed,
    )
    server.decoder, server.versions = decoder, Versions(settings, decoder, threads)
    decoder.start()
    listener = _listen(path)
    http = _Http(
        uvicorn.Config(
            server,
            http="httptools",
            ws="none",
            lifespan="off",
            log_level="warning",
            access_log=False,
            timeout_graceful_shutdown=1,
        )
    )
    loop = asyncio.get_running_loop()

    def stop() -> None:
        http.should_exit = True

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop)
    threading.Thread(target=_watch_parent, args=(loop, stop), daemon=True).start()
    await http.serve(sockets=[listener])
    decoder.close()
    path.unlink(missing_ok=True)
    # Hard, since a thread may still be loading weights, and Python would wait for it.
    os._exit(0)


class _Http(uvicorn.Server):
    """uvicorn without its signal handlers: they raise the signal again after a clean end."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Do nothing: `_serve` has handlers of its own."""
        yield


def _listen(path: Path) -> socket.socket:
    """A private socket. It takes its name once it takes connections: who sees the file can connect."""
    young = path.with_name(path.name + "~")
    young.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    before = os.umask(0o177)
    try:
        listener.bind(str(young))
        listener.listen(2048)
        young.rename(path)
    except OSError as error:
        raise SettingsError(f"cannot listen on {path}: {error.strerror}") from error
    finally:
        os.umask(before)
    return listener


def _watch_parent(loop: asyncio.AbstractEventLoop, stop: Callable[[], None]) -> None:
    try:
        while os.read(0, 4096):
            pass
    except OSError:
        pass
    loop.call_soon_threadsafe(stop)


def _crashed(error: BaseException) -> None:
    traceback.print_exception(error)
    print("replica: the decoding loop broke; the process ends", file=sys.stderr, flush=True)
    os._exit(70)


if __name__ == "__main__":
    sys.exit(main())
