"""Versions' manifests and files over HTTP, and the client that fetches them."""

from __future__ import annotations

import asyncio
import hashlib
import http.client
import json
import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from onlinerl import client as module
from onlinerl.client import AsyncClient, Client, ControllerError, Damaged
from onlinerl.store import versions
from onlinerl.weights import directory
from tests.controllers import BASE, KEY, controlled
from tests.gateways import ADMIN_KEY, Gateway

FILE = f"{BASE}/versions/1/files/model.safetensors"


@pytest.fixture
async def gateway(tmp_path: Path) -> AsyncIterator[Gateway]:
    async with controlled(tmp_path / "home") as one:
        yield one


async def get(gateway: Gateway, path: str, **headers: str) -> httpx.Response:
    return await gateway.client.get(
        path, headers={**KEY, **{k.replace("_", "-"): v for k, v in headers.items()}}
    )


def source(gateway: Gateway, version: int = 1) -> Path:
    return directory.folder(gateway.settings.weights_url, "tab", version)


async def test_a_manifest_is_the_bytes_that_the_digest_is_of(gateway: Gateway) -> None:
    reply = await get(gateway, f"{BASE}/versions/1/manifest")
    listed = (await get(gateway, f"{BASE}/versions")).json()[1]
    assert hashlib.sha256(reply.content).hexdigest() == listed["digest"]
    assert reply.headers["etag"] == f'"{listed["digest"]}"'
    assert reply.headers["content-type"] == "application/json"
    assert reply.content == (source(gateway) / "manifest.json").read_bytes()
    again = await get(gateway, f"{BASE}/versions/1/manifest", if_none_match=reply.headers["etag"])
    assert (again.status_code, again.content) == (304, b"")


async def test_a_file_whole_and_in_parts(gateway: Gateway) -> None:
    content = (source(gateway) / "model.safetensors").read_bytes()
    whole = await get(gateway, FILE)
    assert (whole.status_code, whole.content) == (200, content)
    etag = whole.headers["etag"]
    assert etag == f'"{hashlib.sha256(content).hexdigest()}"'
    assert whole.headers["accept-ranges"] == "bytes"
    size = len(content)
    for asked, first, last in [
        ("bytes=0-9", 0, 9),
        ("bytes=5-", 5, size - 1),
        ("bytes=-7", size - 7, size - 1),
        (f"bytes=3-{size * 2}", 3, size - 1),
        (f"bytes=-{size * 2}", 0, size - 1),
        (f"bytes={size - 1}-{size - 1}", size - 1, size - 1),
    ]:
        part = await get(gateway, FILE, range=asked, if_range=etag)
        assert (part.status_code, part.content) == (206, content[first : last + 1]), asked
        assert part.headers["content-range"] == f"bytes {first}-{last}/{size}"
        assert part.headers["content-length"] == str(last + 1 - first)
    for asked in (
        "bytes=1-0",
        "bytes=-",
        "lines=1-2",
        "bytes=0-1,3-4",
        "bytes=x-",
        "bytes=" + "9" * 40 + "-",
    ):
        part = await get(gateway, FILE, range=asked)
        assert (part.status_code, part.content) == (200, content), asked
    for asked in (f"bytes={size}-", f"bytes={size + 5}-{size + 6}", "bytes=-0"):
        beyond = await get(gateway, FILE, range=asked)
        assert beyond.status_code == 416, asked
        assert beyond.headers["content-range"] == f"bytes */{size}"
        assert beyond.json()["error"]["message"]
    other = await get(gateway, FILE, range="bytes=0-9", if_range='"0"')
    assert (other.status_code, other.content) == (200, content)
    assert (await get(gateway, FILE, if_none_match=etag)).status_code == 304


OUTSIDE = [
    "../../../onlinerl.db",
    "..%2F..%2F..%2Fonlinerl.db",
    "%2e%2e/000000/model.safetensors",
    "../000001/model.safetensors",
    "/etc/passwd",
    "%2Fetc%2Fpasswd",
    "manifest.json",
    ".",
    "",
    "model.safetensors%00.txt",
    "model.safetensors/",
    "adapter/../model.safetensors",
    "secret",
]


async def test_no_name_leads_out_of_the_versions_folder(gateway: Gateway) -> None:
    (source(gateway) / "secret").write_text("not named by the manifest")

    def ask() -> list[int]:
        # http.client sends a path as it stands; httpx tidies it up first
        connection = http.client.HTTPConnection(gateway.url.removeprefix("http://"))
        statuses = []
        for name in OUTSIDE:
            connection.request("GET", f"{BASE}/versions/1/files/{name}", headers=KEY)
            reply = connection.getresponse()
            reply.read()
            statuses.append(reply.status)
        connection.close()
        return statuses

    assert await asyncio.to_thread(ask) == [404] * len(OUTSIDE)


async def test_a_link_in_the_folder_is_not_followed(gateway: Gateway, tmp_path: Path) -> None:
    place = source(gateway) / "config.json"
    outside = tmp_path / "outside"
    outside.write_bytes(place.read_bytes())
    place.unlink()
    place.symlink_to(outside)
    reply = await get(gateway, f"{BASE}/versions/1/files/config.json")
    assert reply.status_code == 503
    assert "error" in reply.json()


async def test_collected_files_are_gone_and_unknown_versions_never_were(gateway: Gateway) -> None:
    with gateway.database.write() as c:
        versions.reject(c, "tab", 1, actor="test", reason="no good")
        versions.collect(c, "tab")
    for path in ("manifest", "files/model.safetensors"):
        gone = await get(gateway, f"{BASE}/versions/1/{path}")
        assert gone.status_code == 410
        assert "collected" in gone.json()["error"]["message"]
        assert (await get(gateway, f"{BASE}/versions/9/{path}")).status_code == 404
        assert (await get(gateway, f"{BASE}/versions/x/{path}")).status_code == 400


# ------------------------------------------------------------------------------------- the client


async def test_the_client_downloads_what_the_manifest_names(
    gateway: Gateway, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "PART", 100)  # many parts
    async with AsyncClient(gateway.url, ADMIN_KEY) as controller:
        (_, version) = await controller.versions("tab")
        folder = await controller.download("tab", 1, tmp_path / "copy", digest=version["digest"])
    assert folder == tmp_path / "copy"
    for path in source(gateway).rglob("*"):
        assert (folder / path.relative_to(source(gateway))).read_bytes() == path.read_bytes()
    directory.verify(str(folder), version["digest"])
    assert len(list(folder.iterdir())) == len(list(source(gateway).iterdir()))


async def test_an_interrupted_download_goes_on_where_it_was(
    gateway: Gateway, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "PART", 64)
    content = (source(gateway) / "model.safetensors").read_bytes()
    asked: list[str] = []

    async def note(request: httpx.Request) -> None:
        asked.append(request.headers.get("range", ""))
        if len(asked) == 4 and len(broken) == 0:
            broken.append(True)
            raise httpx.ReadError("the cable is out")

    broken: list[bool] = []
    async with AsyncClient(gateway.url, ADMIN_KEY) as controller:
        controller._http.event_hooks = {"request": [note]}
        with pytest.raises(httpx.ReadError):
            await controller.download("tab", 1, tmp_path / "copy")
        assert not (tmp_path / "copy" / "manifest.json").exists()
        before = list(asked)
        await controller.download("tab", 1, tmp_path / "copy")
        rest = asked[len(before) :]
        assert set(before[:-1]) & {one for one in rest if one} == set()  # nothing that had arrived again
        asked.clear()
        await controller.download("tab", 1, tmp_path / "copy")
        assert asked == [""]  # the manifest alone
    assert (tmp_path / "copy" / "model.safetensors").read_bytes() == content


async def test_what_lay_there_of_another_file_is_fetched_again_and_damage_is_told(
    gateway: Gateway, tmp_path: Path
) -> None:
    copy = tmp_path / "copy"
    copy.mkdir()
    (copy / ".model.safetensors.partial").write_bytes(b"of another version")
    (copy / "config.json").write_bytes(b"{}")
    async with AsyncClient(gateway.url, ADMIN_KEY) as controller:
        await controller.download("tab", 1, copy)
        directory.verify(str(copy))
        shutil.rmtree(copy)
        with pytest.raises(Damaged, match="manifest of tab@1"):
            await controller.download("tab", 1, copy, digest="0" * 64)
        place = source(gateway) / "model.safetensors"
        raw = bytearray(place.read_bytes())
        raw[-1] ^= 1  # what a disk does
        place.unlink()
        place.write_bytes(raw)
        with pytest.raises(Damaged, match=r"model\.safetensors has another SHA-256"):
            await controller.download("tab", 1, copy)
        assert not (copy / "manifest.json").exists()


@pytest.mark.parametrize("name", ["../evil", "/tmp/evil", "a/../../evil"])
def test_a_manifest_that_names_a_path_outside_is_not_followed(tmp_path: Path, name: str) -> None:
    text = json.dumps({"files": {name: {"size": 1, "sha256": "0" * 64}}})
    steps = module._download("tab", 1, tmp_path / "copy", None)
    next(steps)
    etag = f'"{hashlib.sha256(text.encode()).hexdigest()}"'
    with pytest.raises(Damaged, match="names"):
        steps.send(httpx.Response(200, text=text, headers={"etag": etag}))


async def test_the_sync_client_says_the_same_as_the_async_one(gateway: Gateway, tmp_path: Path) -> None:
    def use() -> None:
        with Client(gateway.url, ADMIN_KEY) as controller:
            controller.download("tab", 0, tmp_path / "copy")
            assert [one["id"] for one in controller.versions("tab")] == [0, 1]
            with pytest.raises(ControllerError, match="404: the policy tab has no version 9") as refused:
                controller.manifest("tab", 9)
            assert refused.value.status == 404

    await asyncio.to_thread(use)
    directory.verify(str(tmp_path / "copy"))
