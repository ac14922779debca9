"""GET …/versions/{version}/manifest and …/files/{name}: a version's bytes, for whoever serves it elsewhere.

Only names that the manifest names are answered, so no path leads out of a version's folder. The ETag of a
file is its SHA-256, the manifest's is the digest that the store has: a download can be resumed (`Range`,
`If-Range`) and checked by whoever gets it.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from onlinerl.errors import Gone, NotFound, RequestError
from onlinerl.gateway.bodies import error_reply
from onlinerl.gateway.keys import Gate
from onlinerl.records import Version
from onlinerl.store import versions
from onlinerl.store.database import Database
from onlinerl.weights import directory
from onlinerl.weights.directory import MANIFEST

BLOCK = 1 << 20
_RANGE = re.compile(r"bytes=(\d{0,18})-(\d{0,18})")


class BadRange(RequestError):
    """The range that was asked for lies behind the file's end."""

    status = 416


class Files:
    """Both endpoints."""

    def __init__(self, gate: Gate, database: Database) -> None:
        self._gate = gate
        self._database = database

    async def manifest(self, request: Request) -> Response:
        """GET …/versions/{version}/manifest: its very bytes, of which the version's digest is the SHA-256."""
        version = await self._version(request)
        path = directory.file_path(version.url, MANIFEST)
        size = await asyncio.to_thread(directory.file_size, path)
        return _answer(request, path, size, version.digest, "application/json")

    async def file(self, request: Request) -> Response:
        """GET …/versions/{version}/files/{name}."""
        version = await self._version(request)
        name: str = request.path_params["name"]
        manifest = await asyncio.to_thread(directory.read_manifest, version.url)
        entry = manifest.files.get(name)
        if entry is None:
            raise NotFound(f"{version.name} has no file {name[:120]!r}; its manifest names those that it has")
        path = directory.file_path(version.url, name)
        return _answer(request, path, entry.size, entry.sha256, "application/octet-stream")

    async def _version(self, request: Request) -> Version:
        policy = self._gate.policy(request).name
        id = self._gate.number(request, "version")

        def read() -> Version:
            with self._database.read() as c:
                return versions.get(c, policy, id)

        version = await asyncio.to_thread(read)
        if version.collected_at is not None:
            raise Gone(f"the files of {version.name} were collected by gc")
        return version


def _answer(request: Request, path: str, size: int, sha256: str, kind: str) -> Response:
    """200, 206, 304 or 416, as RFC 9110 has it; of several ranges at once none is taken, which it allows."""
    etag = f'"{sha256}"'
    if request.headers.get("if-none-match", "") in (etag, "*"):
        return Response(status_code=304, headers={"etag": etag})
    headers = {"etag": etag, "accept-ranges": "bytes"}
    try:
        part = _part(request.headers, etag, size)
    except BadRange as error:
        reply = error_reply(error)
        reply.headers["content-range"] = f"bytes */{size}"
        return reply
    if part is None:
        return Part(path, 0, size, 200, headers, kind)
    first, last = part
    headers["content-range"] = f"bytes {first}-{last}/{size}"
    return Part(path, first, last + 1 - first, 206, headers, kind)


def _part(headers: Mapping[str, str], etag: str, size: int) -> tuple[int, int] | None:
    """First and last byte that are asked for; None: all of them. Raises BadRange.

    A range that cannot be understood is ignored, and so is one of another file than the client began with.
    """
    match = _RANGE.fullmatch(headers.get("range", "").replace(" ", ""))
    if match is None or match[0] == "bytes=-" or headers.get("if-range", etag) != etag:
        return None
    if not match[1]:  # the last so many bytes
        first, last = max(0, size - int(match[2])), size - 1
    else:
        first, last = int(match[1]), min(int(match[2]), size - 1) if match[2] else size - 1
        if match[2] and int(match[2]) < first:
            return None
    if first >= size or first > last:
        raise BadRange(f"the file has {size} bytes")
    return first, last


class Part(Response):
    """Bytes of a file as they are read, until they are sent or the client has left."""

    def __init__(
        self, path: str, first: int, length: int, status: int, headers: Mapping[str, str], kind: str
    ) -> None:
        super().__init__(None, status, {**headers, "content-length": str(length)}, kind)
        self._path = path
        self._first = first
        self._length = length

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Opens before it answers: a file that gc takes meanwhile stays readable to its end."""
        file = await asyncio.to_thread(directory.open_file, self._path)
        left = asyncio.create_task(_left(receive))
        try:
            await asyncio.to_thread(file.seek, self._first)
            await send(
                {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
            )
            rest = self._length
            while rest and not left.done():
                block = await asyncio.to_thread(file.read, min(BLOCK, rest))
                if not block:
                    raise OSError(f"{self._path} is shorter than its manifest says")  # cuts the connection
                rest -= len(block)
                await send({"type": "http.response.body", "body": block, "more_body": rest > 0})
            if not self._length:
                await send({"type": "http.response.body", "body": b""})
        finally:
            left.cancel()
            file.close()


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
