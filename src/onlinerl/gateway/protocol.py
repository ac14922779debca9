"""HTTP as uvicorn speaks it, and HTTP/1.0 too."""

from __future__ import annotations

from typing import TYPE_CHECKING

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

if TYPE_CHECKING:
    from uvicorn._types import ASGISendEvent


class Protocol(HttpToolsProtocol):
    """uvicorn's, except that a client that speaks HTTP/1.0 is not sent what it cannot read: chunks (RFC 9112,
    6.1) and "100 Continue" (RFC 9110, 10.1.1). nginx speaks it to its upstreams unless told otherwise.
    """

    def on_headers_complete(self) -> None:
        """A request's head has been read."""
        if self.parser.get_http_version() != "1.0":
            super().on_headers_complete()
            return
        self.expect_100_continue = False
        before = self.cycle
        super().on_headers_complete()
        if self.cycle is not before:  # its task begins when this returns
            self.cycle.__class__ = _UntilClose


class _UntilClose(RequestResponseCycle):
    """An answer that tells no length ends where the connection does."""

    measured = True
    """Whether the answer told its length."""

    async def send(self, message: ASGISendEvent) -> None:
        """One message of the application."""
        if message["type"] == "http.response.start":
            names = {name.lower() for name, _ in message.get("headers", ())}
            self.measured = b"content-length" in names
            if not self.measured:
                self.chunked_encoding = False
        elif message["type"] == "http.response.body" and not self.measured:
            # What is announced is always just what comes: uvicorn then asks for no more, and no less.
            self.expected_content_length = len(message.get("body", b""))
        await super().send(message)
