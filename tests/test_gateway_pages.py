"""Admin, readiness, metrics, the OpenAPI document, and a store that refuses."""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
import structlog

from onlinerl import observe
from onlinerl.errors import StoreError
from onlinerl.gateway.app import create_app
from onlinerl.store import versions
from tests.gateways import ADMIN_KEY, Gateway, running

KEY = {"authorization": f"Bearer {ADMIN_KEY}"}
BASE = "/admin/v1/policies/tab"


@pytest.fixture
async def gateway(tmp_path: Path) -> AsyncIterator[Gateway]:
    async with running(tmp_path, versions_=(0, 1, 2)) as one:
        yield one


async def test_versions_are_listed_promoted_and_rolled_back(gateway: Gateway) -> None:
    listed = (await gateway.client.get(f"{BASE}/versions", headers=KEY)).json()
    assert [(one["policy"], one["id"], one["state"], one["parent"]) for one in listed] == [
        ("tab", 0, "live", None),
        ("tab", 1, "candidate", 0),
        ("tab", 2, "candidate", 0),
    ]
    promoted = await gateway.client.post(f"{BASE}/versions/1/promote", headers={"x-admin-key": ADMIN_KEY})
    assert (promoted.json()["id"], promoted.json()["state"]) == (1, "live")
    back = await gateway.client.post(f"{BASE}/rollback", headers=KEY)
    assert (back.json()["id"], back.json()["state"]) == (0, "live")
    again = await gateway.client.post(f"{BASE}/rollback", headers=KEY, json={"to": 1})
    assert again.json()["id"] == 1
    with gateway.database.read() as c:
        assert versions.live(c, "tab").id == 1


async def test_replicas(gateway: Gateway) -> None:
    reply = await gateway.client.get("/admin/v1/replicas", headers=KEY)
    assert reply.json() == [{"policy": "tab", "name": "double-0", "versions": [0]}]


async def test_without_an_admin_key_admin_is_closed(gateway: Gateway) -> None:
    app = create_app({}, gateway.writer, gateway.database, gateway.settings)
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        assert (await client.get("/admin/v1/replicas", headers=KEY)).status_code == 403


async def test_metrics(gateway: Gateway) -> None:
    await gateway.complete("my secret prompt", user="ann")
    metrics = (await gateway.client.get("/metrics")).text
    assert 'onlinerl_interactions_total{finish="stop",policy="tab",version="0"}' in metrics
    assert "onlinerl_first_token_seconds_bucket" in metrics
    assert "secret" not in metrics
    assert '"ann"' not in metrics


async def test_the_openapi_document(gateway: Gateway) -> None:
    document = (await gateway.client.get("/openapi.json")).json()
    body = document["paths"]["/v1/completions"]["post"]["requestBody"]["content"]["application/json"][
        "schema"
    ]
    assert body["properties"]["stop"]["anyOf"]
    assert len(body["properties"]["prompt"]["anyOf"]) == 4
    assert "/v1/feedback" in document["paths"]
    assert "/api/training/submit" in document["paths"]
    assert "/admin/v1/policies/{policy}/versions/{version}/promote" in document["paths"]
    assert "$ref" not in str(body)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_full_disk_is_a_503_and_no_finished_answer(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    async def full(operation: object) -> None:
        raise StoreError("the disk is full: make room")

    monkeypatch.setattr(gateway.writer, "submit", full)
    reply = await gateway.complete(stream=stream)
    assert "the disk is full" in reply.text
    assert "[DONE]" not in reply.text
    assert '"finish_reason":"stop"' not in reply.text
    assert reply.status_code == (200 if stream else 503)
    feedback = await gateway.client.post("/v1/feedback", json={"id": "x", "event": "accepted"})
    assert feedback.status_code == 503
    assert feedback.headers["retry-after"]


async def test_a_fault_of_ours_tells_nothing(gateway: Gateway, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise ValueError("prompt text inside")

    monkeypatch.setattr("onlinerl.gateway.completions._stops", broken)
    reply = await gateway.complete()
    assert reply.status_code == 500
    assert reply.json()["error"]["message"] == "internal error"


async def test_logs_hold_no_text_of_anybody(gateway: Gateway, tmp_path: Path) -> None:
    file = tmp_path / "serve.log"
    observe.configure_logging(file=file)
    try:
        gateway.engine.die_after = 2
        reply = await gateway.complete(
            "very secret prompt", stream=True, headers={"authorization": "Bearer k-12"}
        )
        gateway.engine.down = True
        await gateway.complete("very secret prompt")
        await gateway.client.get("/very-secret-path", headers={"host": "evil.example"})
    finally:
        root = logging.getLogger()
        for handler in root.handlers[:]:
            if isinstance(handler.formatter, structlog.stdlib.ProcessorFormatter):
                root.removeHandler(handler)
                handler.close()
        root.setLevel(logging.WARNING)
        structlog.reset_defaults()
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    failed = [line for line in lines if line["event"] == "engine failed a request"]
    assert [line["begun"] for line in failed] == [True, False]
    assert all(line["component"] == "gateway" for line in failed)
    assert reply.text.split('"id":"')[1].split('"')[0] == failed[0]["id"]
    assert "secret" not in file.read_text()
    assert "k-12" not in file.read_text()
