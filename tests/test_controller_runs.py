"""Runs over HTTP, and which settings may come with them."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError

from onlinerl import config
from onlinerl.config import OPEN, Policy, Settings, closed, for_run, leaves, load_settings
from onlinerl.errors import SettingsError
from onlinerl.records import Run, RunState
from onlinerl.store import runs
from tests.controllers import BASE, KEY, controlled
from tests.gateways import Gateway, running

# ------------------------------------------------------------------------------ settings over HTTP

EVERY = [*leaves(Policy), *((name, item) for name, item in leaves(Settings) if name != "policies")]
WORDS = ("os:system", "/etc/passwd", "../models", "https://evil.example/model", "file:///home")


def takes_text(item: Any) -> bool:
    """Whether the setting, alone or as a part of it, accepts what could be code or a path."""
    kind: Any = TypeAdapter(item.annotation)
    for word in WORDS:
        for value in (word, [word], {word: word}, {word: 1.0}):
            try:
                kind.validate_python(value)
            except ValidationError:
                continue
            return True
    return False


def test_every_setting_that_takes_text_is_closed_or_is_known_to_be_harmless() -> None:
    """Over the whole tree, by what the settings accept and not by what they are called."""
    assert len(EVERY) > 150
    harmless = {name for name, item in EVERY if OPEN in item.metadata}
    assert harmless == {
        "exploration.users",
        "experiments.users",
        "experiments.projects",
        "rewards.weights",
        "cleaning.languages",
        "train.lora.targets",
    }
    found = {name for name, item in EVERY if takes_text(item)}
    found.add("webhooks")  # a list of branches, each with a URL
    assert {"model", "rewards.function", "home", "store.url", "server.host"} <= found
    assert {name for name, item in EVERY if closed(item)} == found - harmless


def test_every_open_setting_of_a_run_can_be_set_and_every_other_one_is_refused() -> None:
    settings = load_settings()
    default = settings.policies["tab"]
    taken = 0
    for name, item in leaves(Policy):
        value: Any = default
        for part in name.split("."):
            value = getattr(value, part)
        kind: Any = TypeAdapter(item.annotation)  # type: ignore[arg-type]  # None is a type here
        value = kind.dump_python(value, mode="json")
        read = any(name == branch or name.startswith(f"{branch}.") for branch in config.RUN_READS)
        if read and not closed(item):
            assert for_run(settings, "tab", {name: value}) == default, name
            taken += 1
            continue
        with pytest.raises(
            SettingsError, match="can name code or a path" if closed(item) else "no run reads"
        ):
            for_run(settings, "tab", {name: value})
    assert taken > 60


def test_overrides_change_what_they_name_and_nothing_else() -> None:
    settings = load_settings(overrides=["policies.tab.train.batch=8", "policies.other={}"])
    chosen = for_run(
        settings,
        "tab",
        {"train.lr": "2e-6", "policies.tab.train.lora.rank": 4, "rewards.weights": {"verdict": 2}},
    )
    assert (chosen.train.lr, chosen.train.lora.rank, chosen.train.batch) == (2e-6, 4, 8)
    assert chosen.rewards.weights == {"verdict": 2.0}
    assert settings.policies["tab"].train.lr == 3e-5


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("rewards", {"function": "os:system"}, "one single value"),
        ("train", {"lr": 1}, "one single value"),
        ("", 1, "one single value"),
        ("train.nonsense", 1, "there is no setting"),
        ("home", "/", "there is no setting"),
        ("policies.other.train.lr", 1e-5, "there is no setting"),
        ("rewards.function", "os:system", "can name code or a path"),
        ("policies.tab.rewards.function", "", "can name code or a path"),
        ("model", "/models", "can name code or a path"),
        ("engine.replicas", 2, "no run reads"),
        ("joins.window", 2.0, "no run reads"),
        ("train.lr", -1, "greater than 0"),
        ("train.lr", None, "valid number"),
        ("rewards.weights", {"mine": 2}, "no source 'mine'"),
    ],
)
def test_an_override_that_is_none_is_refused_with_its_reason(name: str, value: Any, said: str) -> None:
    settings = load_settings(overrides=["policies.tab={}", "policies.other={}"])
    with pytest.raises(SettingsError, match=said):
        for_run(settings, "tab", {"train.batch": 4, name: value})


# --------------------------------------------------------------------------------------- endpoints


@pytest.fixture
async def gateway(tmp_path: Path) -> AsyncIterator[Gateway]:
    async with controlled(tmp_path) as one:
        yield one


def run_of(gateway: Gateway, id: int) -> Run:
    with gateway.database.read() as c:
        return runs.get(c, "tab", id)


async def test_a_run_is_asked_for_watched_paused_and_stopped(gateway: Gateway) -> None:
    body = {"overrides": {"train.lr": 1e-6}, "max_steps": 5, "follow": True}
    made = await gateway.client.post(f"{BASE}/runs", json=body, headers=KEY)
    assert made.status_code == 201
    run = made.json()
    assert (run["id"], run["state"], run["alive"]) == (1, "pending", False)
    assert made.headers["location"] == f"{BASE}/runs/1"
    with gateway.database.write() as c:
        chosen = Policy.model_validate_json(runs.settings(c, 1))
        assert chosen.train.lr == 1e-6
        begun, _ = runs.start(
            c,
            policy="tab",
            host="elsewhere",
            pid=1,
            settings="",
            tau_of=lambda c: 0.1,
            now=time.time(),
            run=1,
        )
        assert (begun.last_batch, begun.follow) == (5, True)
        runs.heartbeat(c, begun, step=3, now=time.time())
        runs.add_step(c, run=1, batch=3, at=time.time(), numbers={"reward": 0.25, "kl": 0.01})
    second = await gateway.client.post(f"{BASE}/runs", json={}, headers=KEY)
    assert second.status_code == 409
    assert "run 1 of tab is running (step 3)" in second.json()["error"]["message"]

    shown = (await gateway.client.get(made.headers["location"], headers=KEY)).json()
    assert (shown["state"], shown["step"], shown["alive"]) == ("running", 3, True)
    assert shown["metrics"] == {"reward": 0.25, "kl": 0.01}
    assert shown["versions"] == []
    assert 0 <= shown["heartbeat_age"] < 5
    listed = (await gateway.client.get(f"{BASE}/runs", headers=KEY)).json()
    assert [one["id"] for one in listed] == [1]

    for verb, wish in (("pause", "pause"), ("resume", "")):
        reply = await gateway.client.post(f"{BASE}/runs/1/{verb}", headers=KEY)
        assert (reply.status_code, reply.json()["wish"]) == (202, wish)
        assert run_of(gateway, 1).wish == wish
    for _ in range(2):
        reply = await gateway.client.delete(f"{BASE}/runs/1", headers=KEY)
        assert (reply.status_code, reply.json()["wish"]) == (202, "stop")
    late = await gateway.client.post(f"{BASE}/runs/1/resume", headers=KEY)
    assert late.status_code == 409
    with gateway.database.write() as c:
        runs.finish(c, begun, RunState.STOPPED, "asked to stop")
    over = await gateway.client.delete(f"{BASE}/runs/1", headers=KEY)
    assert over.status_code == 409
    assert "has ended" in over.json()["error"]["message"]


async def test_whoever_starts_processes_is_woken(gateway: Gateway) -> None:
    woken: list[str] = []
    runs_routes = [route for route in gateway.app.routes if getattr(route, "path", "").endswith("/runs")]
    (start,) = [one for one in runs_routes if "POST" in getattr(one, "methods", ())]
    start.endpoint.__self__._wake = woken.append  # type: ignore[attr-defined]
    await gateway.client.post(f"{BASE}/runs", json={}, headers=KEY)
    assert woken == ["tab"]
    await gateway.client.post(f"{BASE}/runs", json={}, headers=KEY)
    assert woken == ["tab"]


async def test_bad_requests_change_nothing(gateway: Gateway) -> None:
    bodies: list[tuple[Any, int, str]] = [
        ({"overrides": {"rewards.function": "os:system"}}, 400, "can name code or a path"),
        ({"overrides": {"model": "/"}}, 400, "can name code or a path"),
        ({"overrides": ["train.lr=1"]}, 400, "overrides"),
        ({"max_steps": 0}, 400, "max_steps"),
        ({"max_steps": "3"}, 400, "max_steps"),
        ({"follow": 1}, 400, "follow"),
        ({"home": "/"}, 400, "home"),
        ([], 400, "JSON object"),
    ]
    for body, status, said in bodies:
        reply = await gateway.client.post(f"{BASE}/runs", json=body, headers=KEY)
        assert (reply.status_code, said in reply.json()["error"]["message"]) == (status, True), reply.text
    for path in ("runs/7", "runs/x", "runs/-1", f"runs/{10**30}"):
        reply = await gateway.client.get(f"{BASE}/{path}", headers=KEY)
        assert reply.status_code in (400, 404)
    assert (
        await gateway.client.post("/admin/v1/policies/none/runs", json={}, headers=KEY)
    ).status_code == 404
    with gateway.database.read() as c:
        assert runs.list_(c) == []


async def test_no_endpoint_of_the_controller_answers_without_the_key(gateway: Gateway) -> None:
    paths = (await gateway.client.get("/openapi.json")).json()["paths"]
    asked = 0
    for path, operations in paths.items():
        if not path.startswith("/admin/"):
            continue
        for method, operation in operations.items():
            assert operation["security"] == [{"admin": []}]
            place = path
            for parameter in operation.get("parameters", ()):
                place = place.replace(f"{{{parameter['name']}}}", str(parameter["example"]))
            for headers, status in (({}, 401), ({"authorization": "Bearer no"}, 403)):
                reply = await gateway.client.request(method.upper(), place, headers=headers, json={})
                assert reply.status_code == status, (method, path)
                asked += 1
    assert asked > 20


async def test_a_policy_without_a_live_version_starts_no_run(tmp_path: Path) -> None:
    async with running(tmp_path, versions_=()) as gateway:
        reply = await gateway.client.post(f"{BASE}/runs", json={}, headers=KEY)
        assert reply.status_code == 404
        assert "no live version" in reply.json()["error"]["message"]
