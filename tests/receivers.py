"""A real HTTP server that receives webhooks, and may refuse them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from onlinerl.client import verify
from onlinerl.interface import Notice


@dataclass
class Receiver:
    """What arrived. `statuses` are the next answers, then 204 for ever."""

    secret: str
    url: str = ""
    statuses: list[int] = field(default_factory=list)
    raw: list[tuple[str, bytes]] = field(default_factory=list)
    """Signature and body of every attempt."""
    taken: list[Notice] = field(default_factory=list)
    """Those that were answered with 2xx; their signatures were good."""


@contextmanager
def receiving(secret: str, port: int = 0) -> Iterator[Receiver]:
    """Listens on loopback."""
    receiver = Receiver(secret)

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            signature = self.headers["x-onlinerl-signature"]
            receiver.raw.append((signature, body))
            status = receiver.statuses.pop(0) if receiver.statuses else 204
            if 200 <= status < 300:
                receiver.taken.append(verify(receiver.secret, signature, body))
            self.send_response(status)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    receiver.url = f"http://127.0.0.1:{server.server_port}/hook?token=in-the-url"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield receiver
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
