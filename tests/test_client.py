"""The client: every endpoint of the controller's interface, the same sync and async."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from onlinerl.client import AsyncClient, Client, ControllerError
from onlinerl.gateway.document import PAGES
from tests.controllers import controlled
from tests.gateways import ADMIN_KEY, Gateway

ARGUMENTS: dict[str, Any] = {"policy": "tab", "version": 1, "run": 1, "experiment": 1, "treatment": 1}


@pytest.fixture
async def gateway(tmp_path: Path) -> AsyncIterator[Gateway]:
    async with controlled(tmp_path) as one:
        yield one


def methods(client: type) -> dict[str, inspect.Signature]:
    return {
        name: inspect.signature(method)
        for name, method in inspect.getmembers(client, inspect.isfunction)
        if not name.startswith("_")
    }


def test_both_clients_have_the_same_methods_and_each_says_what_it_does() -> None:
    assert methods(Client) == methods(AsyncClient)
    for client in (Client, AsyncClient):
        for name in methods(client):
            assert (getattr(client, name).__doc__ or "").strip(), name


def test_every_endpoint_of_the_controller_has_a_method() -> None:
    """What each of them sends, without a server; a download asks for a manifest first."""
    sent: set[tuple[str, str]] = set()

    def answer(request: httpx.Request) -> httpx.Response:
        path = request.url.path
        for name in ("version", "run", "experiment"):
            path = path.replace(f"/{name}s/1", f"/{name}s/{{{name}}}")
        sent.add((request.method, path.replace("/policies/tab", "/policies/{policy}")))
        return httpx.Response(418)

    with Client("http://127.0.0.1", ADMIN_KEY) as client:
        client._http = httpx.Client(base_url="http://127.0.0.1", transport=httpx.MockTransport(answer))
        for name, signature in methods(Client).items():
            if name in ("send", "close"):
                continue
            needed = [
                one.name
                for one in signature.parameters.values()
                if one.default is inspect.Parameter.empty and one.name != "self"
            ]
            given = {one: ARGUMENTS.get(one, []) for one in needed} | (
                {"folder": Path("nowhere")} if name == "download" else {}
            )
            with pytest.raises(ControllerError, match="418"):
                getattr(client, name)(**given)
    wanted = {place for place in PAGES if place[1].startswith("/admin/")} | {("POST", "/v1/feedback")}
    wanted -= {("GET", "/admin/v1/replicas")}  # the engines of who serves, which a controller has none of
    files = ("GET", "/admin/v1/policies/{policy}/versions/{version}/files/{name}")  # once there is a manifest
    assert sent == wanted - {files}


async def test_an_experiment_over_the_client(gateway: Gateway) -> None:
    async with AsyncClient(gateway.url, ADMIN_KEY) as controller:
        begun = await controller.start_experiment("tab", 1, plan={"stages": [0.05, 0.5], "decide": "ask"})
        assert (begun["state"], begun["control"], begun["treatment"]) == ("running", "tab@0", "tab@1")
        assert begun["plan"]["stages"] == [0.05, 0.5]
        assert [one["id"] for one in await controller.experiments("tab")] == [begun["id"]]
        shown = await controller.experiment("tab", begun["id"])
        assert [one["kind"] for one in shown["decisions"]] == ["start"]
        with pytest.raises(ControllerError, match=r"409: .* proposes nothing"):
            await controller.confirm("tab", begun["id"], "promote")
        ended = await controller.stop_experiment("tab", begun["id"], "enough seen")
        assert (ended["state"], ended["message"]) == ("stopped", "enough seen")
        assert (await controller.versions("tab"))[1]["state"] == "rejected"


async def test_a_refusal_says_what_the_server_says(gateway: Gateway) -> None:
    def use() -> None:
        with Client(gateway.url) as nobody, pytest.raises(ControllerError, match="401: the admin key") as no:
            nobody.runs("tab")
        assert no.value.status == 401
        with Client(gateway.url, ADMIN_KEY) as controller:
            with pytest.raises(ControllerError, match=r"404: there is no policy 'none'"):
                controller.runs("none")
            with pytest.raises(ControllerError, match=r"400: rewards\.function can name code"):
                controller.start_run("tab", {"rewards.function": "os:system"})
            assert controller.runs("tab") == []

    await asyncio.to_thread(use)


def test_a_server_that_answers_no_json_is_told_as_it_is() -> None:
    def proxy(request: httpx.Request) -> httpx.Response:
        return httpx.Response(502, text="<html>bad gateway")

    with Client("http://127.0.0.1") as client:
        client._http = httpx.Client(base_url="http://127.0.0.1", transport=httpx.MockTransport(proxy))
        with pytest.raises(ControllerError, match="502: <html>bad gateway"):
            client.webhooks()
