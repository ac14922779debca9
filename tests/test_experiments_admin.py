"""Experiments as a controller handles them over HTTP, and a person on the command line."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from onlinerl.config import Settings, load_settings
from onlinerl.experiments import picture
from onlinerl.experiments.assignment import CONTROL, TREATMENT
from onlinerl.loop.promotion import Promotion
from onlinerl.records import ExperimentState, VersionState
from onlinerl.store import experiments, versions
from onlinerl.store.database import Database
from tests.gateways import ADMIN_KEY, Gateway, running
from tests.test_cli import Done, onlinerl
from tests.trials import HOUR, T0, lineage, served, start

KEY = {"authorization": f"Bearer {ADMIN_KEY}"}
BASE = "/admin/v1/policies/tab/experiments"


@pytest.fixture
async def gateway(tmp_path: Path) -> AsyncIterator[Gateway]:
    async with running(tmp_path, versions_=(0, 1, 2)) as one:
        yield one


async def post(gateway: Gateway, path: str = "", body: Any = None) -> httpx.Response:
    return await gateway.client.post(f"{BASE}{path}", headers=KEY, json=body)


async def get(gateway: Gateway, path: str = "") -> Any:
    reply = await gateway.client.get(f"{BASE}{path}", headers=KEY)
    assert reply.status_code == 200, reply.text
    return reply.json()


async def test_started_shown_and_stopped(gateway: Gateway) -> None:
    assert await get(gateway) == []
    plan = {"stages": [0.1, 0.5], "alpha": 0.01, "guardrails": {"errors": 0.2}, "tau": 0.15}
    reply = await post(gateway, body={"treatment": 1, "plan": plan})
    assert (reply.status_code, reply.headers["location"]) == (201, f"{BASE}/1")
    made = reply.json()
    assert (made["control"], made["treatment"], made["state"]) == ("tab@0", "tab@1", "running")
    assert (made["tau"], made["actor"], made["stage_at"], made["share"]) == (0.15, "admin", None, 0.1)
    assert made["plan"]["guardrails"]["errors"] == 0.2
    assert [one["id"] for one in await get(gateway)] == [1]
    shown = await get(gateway, "/1")
    assert (shown["now"], [one["kind"] for one in shown["decisions"]]) == (None, ["start"])
    with gateway.database.write() as c:
        one = experiments.begin(c, experiments.get(c, "tab", 1), T0)
        served(c, one, {CONTROL: 0.5, TREATMENT: 0.7}, units=5)
    shown = await get(gateway, "/1")
    assert shown["now"]["kind"] == "continue"
    assert shown["now"]["numbers"]["reward/units/treatment"] == 5
    stopped = await post(gateway, "/1/stop", {"reason": "the office is closed"})
    assert (stopped.json()["state"], stopped.json()["message"]) == ("stopped", "the office is closed")
    with gateway.database.read() as c:
        assert versions.get(c, "tab", 1).state is VersionState.REJECTED
    assert (await post(gateway, "/1/stop")).status_code == 409
    shown = await get(gateway, "/1")
    assert (shown["now"], shown["decisions"][-1]["actor"]) == (None, "admin")


async def test_what_is_proposed_is_confirmed(gateway: Gateway) -> None:
    with gateway.database.write() as c:
        plan: dict[str, Any] = {"tuned": 40, "least_units": 20, "least_hours": 0, "decide": "ask"}
        served(c, start(c, **plan), {CONTROL: 0.2, TREATMENT: 0.9}, units=60)
    assert (await post(gateway, "/1/confirm")).status_code == 409
    await Promotion("tab", gateway.settings, gateway.database).tick(T0 + 48 * HOUR)
    assert (await get(gateway, "/1"))["state"] == "waiting"
    assert (await post(gateway, "/1/confirm", {"decision": "futile"})).status_code == 409
    done = await post(gateway, "/1/confirm", {"decision": "promote"})
    assert (done.status_code, done.json()["state"]) == (200, "promoted")
    with gateway.database.read() as c:
        assert versions.live(c, "tab").id == 1


@pytest.mark.parametrize(
    ("body", "status", "said"),
    [
        ({}, 400, "treatment: Field required"),
        ({"treatment": 9}, 404, "no version 9"),
        ({"treatment": "big@1"}, 404, "there is no policy 'big'"),
        ({"treatment": "upstream:large"}, 400, "not routed to yet"),
        ({"treatment": 0}, 409, "both arms are tab@0"),
        ({"treatment": True}, 400, "treatment"),
        ({"treatment": 1, "salt": "mine"}, 400, "salt: Extra inputs are not permitted"),
        ({"treatment": 1, "plan": {"alpha": 7}}, 400, "plan.alpha: "),
        ({"treatment": 1, "plan": {"holdout": 0.5}}, 400, "holdout is a setting of the policy"),
        ({"treatment": 1, "plan": {"function": "os:system"}}, 400, "function: is no setting"),
        ({"treatment": 1, "plan": {"rewards": {"function": "os:system"}}}, 400, "rewards: is no setting"),
        ({"treatment": 1, "plan": {"model": "/etc"}}, 400, "model: is no setting"),
    ],
)
async def test_what_cannot_be_started_changes_nothing(
    gateway: Gateway, body: dict[str, Any], status: int, said: str
) -> None:
    reply = await post(gateway, body=body)
    assert reply.status_code == status, reply.text
    assert said in reply.json()["error"]["message"]
    assert await get(gateway) == []
    with gateway.database.read() as c:
        assert versions.get(c, "tab", 1).state is VersionState.CANDIDATE


async def test_wrong_names_and_bodies(gateway: Gateway) -> None:
    for path, status in (("/7", 404), ("/x", 400), ("/" + "9" * 30, 400)):
        assert (await gateway.client.get(f"{BASE}{path}", headers=KEY)).status_code == status
    assert (await post(gateway, "/7/stop")).status_code == 404
    with gateway.database.write() as c:
        start(c)
    for path, body in (
        ("/1/stop", {"reason": 3}),
        ("/1/stop", {"why": "x"}),
        ("/1/stop", {"reason": ""}),
        ("/1/confirm", {"decision": "abort"}),
        ("/1/confirm", []),
    ):
        assert (await post(gateway, path, body)).status_code == 400, (path, body)
    assert (await get(gateway, "/1"))["state"] == "running"
    assert (await post(gateway, body={"treatment": 2})).status_code == 409


async def test_without_the_key_nothing_is_told_or_done(gateway: Gateway) -> None:
    with gateway.database.write() as c:
        start(c)
    for method, path in (
        ("GET", ""),
        ("GET", "/1"),
        ("POST", ""),
        ("POST", "/1/stop"),
        ("POST", "/1/confirm"),
    ):
        for headers, status in (({}, 401), ({"authorization": "Bearer no"}, 403)):
            reply = await gateway.client.request(method, f"{BASE}{path}", headers=headers, json={})
            assert reply.status_code == status, (method, path)
    assert (await get(gateway, "/1"))["state"] == "running"
    other = await gateway.client.get("/admin/v1/policies/none/experiments", headers=KEY)
    assert other.status_code == 404


# ------------------------------------------------------------------------------- the command line


@pytest.fixture
def home(tmp_path: Path) -> Iterator[tuple[Path, Settings, Database]]:
    settings = load_settings(home=tmp_path / "home")
    database = Database.open(settings.database_url)
    with database.write() as c:
        lineage(c, 1, 2)
    yield settings.home, settings, database
    database.close()


def said(done: Done, code: int) -> str:
    assert (done.returncode, done.stdout) == (code, "")
    assert "Traceback" not in done.stderr
    return done.stderr


def test_started_listed_shown_and_stopped_by_a_person(home: tuple[Path, Settings, Database]) -> None:
    where = ("--home", home[0])
    assert "no experiments yet" in onlinerl("experiments", "list", *where).stdout
    done = onlinerl("experiments", "start", 1, *where, "policies.tab.experiments.stages=[0.2, 0.5]")
    assert (done.returncode, done.stdout) == (0, "experiment 1 tries tab@1 against tab@0\n")
    assert "stop it first" in said(onlinerl("experiments", "start", "tab@2", *where), 1)
    assert "waits until both arms are loaded" in onlinerl("experiments", "list", *where).stdout
    shown = onlinerl("experiments", "show", 1, *where).stdout
    assert "everybody with a user key by user, in stages of 20%, 50%" in shown
    data = json.loads(onlinerl("experiments", "show", 1, "--json", *where).stdout)
    assert (data["actor"], data["now"], data["plan"]["stages"]) == ("cli", None, [0.2, 0.5])
    (listed,) = json.loads(onlinerl("experiments", "list", "--json", "--policy", "tab", *where).stdout)
    assert listed == {name: value for name, value in data.items() if name not in ("now", "decisions")}
    done = onlinerl("experiments", "stop", 1, "--reason", "the office is closed", *where)
    assert done.stdout == "experiment 1 is stopped\n"
    assert "the office is closed" in onlinerl("experiments", "list", *where).stdout
    assert "is stopped" in said(onlinerl("experiments", "stop", 1, *where), 1)


async def test_the_interval_and_the_verdict_are_shown(home: tuple[Path, Settings, Database]) -> None:
    where = ("--home", home[0])
    with home[2].write() as c:
        plan: dict[str, Any] = {
            "tuned": 40,
            "least_units": 20,
            "least_hours": 2,
            "decide": "ask",
            "window_hours": 0.01,
        }
        one = start(c, **plan)
        for number in range(6):
            served(c, one, {CONTROL: 0.2, TREATMENT: 0.9}, units=25 + 10 * number, at=T0 + number * 100)
    looking = Promotion("tab", home[1], home[2])
    for hours in (0.5, 1.0, 1.5):
        await looking.tick(T0 + hours * HOUR)
    shown = onlinerl("experiments", "show", 1, *where).stdout
    assert "●" in shown
    assert "guardrail" in shown
    assert "stage 1 of 1, 50% get tab@1: " in shown
    await looking.tick(T0 + 3 * HOUR)
    shown = onlinerl("experiments", "show", 1, *where).stdout
    assert "proposes to promote the treatment: v1 is better than v0: better by" in shown
    assert "`onlinerl experiments confirm 1` does it" in shown
    assert "█" in onlinerl("experiments", "list", *where).stdout
    done = onlinerl("experiments", "confirm", 1, *where)
    assert done.stdout == "experiment 1 is promoted\n"
    with home[2].read() as c:
        assert experiments.get(c, "tab", 1).state is ExperimentState.PROMOTED
    assert "proposes nothing" in said(onlinerl("experiments", "confirm", 1, *where), 1)


def test_wrong_names_on_the_command_line(home: tuple[Path, Settings, Database]) -> None:
    where = ("--home", home[0])
    assert "has no experiment 7" in said(onlinerl("experiments", "show", 7, *where), 1)
    assert "there is no policy 'x'" in said(onlinerl("experiments", "list", "--policy", "x", *where), 2)
    assert "is no arm" in said(onlinerl("experiments", "start", "x", *where), 1)
    assert "not routed to yet" in said(onlinerl("experiments", "start", "upstream:large", *where), 1)
    assert onlinerl("experiments", "show", "x", *where).returncode == 2


def test_looking_at_experiments_of_an_empty_home_makes_nothing(tmp_path: Path) -> None:
    where = ("--home", tmp_path / "none")
    assert json.loads(onlinerl("experiments", "list", "--json", *where).stdout) == []
    assert "there is no data" in said(onlinerl("experiments", "start", 1, *where), 1)
    assert not (tmp_path / "none").exists()


# ------------------------------------------------------------------------------------- the picture


def test_a_narrowing_interval_is_drawn_with_its_ends_and_its_newest_look() -> None:
    looks = [picture.Point(-1 / n, 0.1, 0.2 + 1 / n) for n in range(1, 200)]
    lines = picture.chart(looks, width=40, height=9)
    assert len(lines) == 9
    columns = [line[6:].ljust(40) for line in lines]
    heights = [sum(column[place] in "│●┼" for column in columns) for place in range(40)]
    assert heights == sorted(heights, reverse=True)
    assert heights[0] > heights[-1] >= 1
    assert all(any(column[place] == "●" for column in columns) for place in range(40))
    spark = picture.sparkline(looks, width=12)
    assert (len(spark), spark[0], spark[-1]) == (12, "█", min(spark))


def test_no_look_no_picture() -> None:
    assert (picture.chart([]), picture.sparkline([]), picture.points([])) == ([], "", [])
