"""The dashboard's house: what it says, what it counts, who may read what. The pages: test_pages."""

from __future__ import annotations

import csv
import io
import math
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from onlinerl.config import Policy, load_settings
from onlinerl.dashboard import export, views
from onlinerl.dashboard.app import STATIC, mount
from onlinerl.dashboard.lineage import Knot, lanes
from onlinerl.dashboard.past import Past
from onlinerl.dashboard.words import verdict
from onlinerl.errors import Forbidden
from onlinerl.records import (
    Arm,
    Decision,
    DecisionKind,
    Event,
    Experiment,
    ExperimentState,
    FeedbackStatus,
    Step,
)
from onlinerl.store import charts, experiments, interactions
from onlinerl.store.database import Database
from onlinerl.store.schema import interactions as table
from tests import boards
from tests.gateways import ADMIN_KEY, Gateway, running
from tests.store_helpers import base, opened, shown, silent, tell

KEY = {"authorization": f"Bearer {ADMIN_KEY}"}
COUNT = 3000


# ------------------------------------------------------------------------------------------- words


def told(
    low: float, high: float, state: ExperimentState = ExperimentState.RUNNING, **plan: Any
) -> tuple[str, str]:
    one = Experiment.example()
    one = replace(one, state=state, control=Arm("tab", 6), treatment=Arm("tab", 7), plan={**one.plan, **plan})
    numbers = {"estimate": (low + high) / 2, "low": low, "high": high}
    found = verdict(one, Decision(DecisionKind.CONTINUE, "", numbers))
    return found.text, found.outcome


def test_an_experiment_in_words() -> None:
    assert told(0.012, 0.04, ExperimentState.PROMOTED) == ("v7 is better by 1.2 to 4.0 points", "promoted")
    assert told(-0.04, -0.012, ExperimentState.ABORTED) == ("v7 is worse by 1.2 to 4.0 points", "taken back")
    undecided = "v7 is between 1.0 points worse and 4.0 points better than v6"
    assert told(-0.01, 0.04) == (undecided, "still running; stage 2 of 4, 5 % of users")
    assert told(-0.01, 0.04, ExperimentState.WAITING)[1].startswith("waiting for a person to decide")
    equal = "v7 is as good as v6: at most 1.0 points worse, and 2.0 are accepted"
    assert told(-0.01, 0.04, goal="equal", margin=0.02)[0] == equal
    assert told(-0.03, 0.04, goal="equal", margin=0.02)[0].startswith("v7 is between 3.0 points worse")


def test_an_experiment_without_an_interval_says_so_and_names_foreign_arms() -> None:
    one = replace(Experiment.example(), control=Arm("tab", None, "large"), treatment=Arm("other", 3))
    for numbers in ({}, {"estimate": 0.1, "low": float("-inf"), "high": float("inf")}):
        text = verdict(one, Decision(DecisionKind.CONTINUE, "", numbers)).text
        assert text == "other@3 is compared with upstream:large; too few users for an interval"


def test_an_experiment_that_has_not_begun_says_what_it_waits_for() -> None:
    found = verdict(replace(Experiment.example(), stage_at=math.inf), None)
    assert found.text == "v1 is compared with v0 once the engines hold both"
    assert found.outcome == "not begun yet"


# ----------------------------------------------------------------------------------------- lineage


def test_a_line_of_versions_is_one_lane() -> None:
    assert [knot.lane for knot in lanes([(3, 2), (2, 1), (1, 0), (0, None)])] == [0, 0, 0, 0]


def test_branches_get_lanes_and_end_at_their_parent() -> None:
    found = lanes([(4, 2), (3, 2), (2, 1), (1, None)])
    assert found == [
        Knot(lane=0, joins=(), through=(), leaves=True),
        Knot(lane=1, joins=(), through=(0,), leaves=True),
        Knot(lane=0, joins=(0, 1), through=(), leaves=True),
        Knot(lane=0, joins=(0,), through=(), leaves=False),
    ]


# ------------------------------------------------------------------------------------------ counts


@pytest.fixture(scope="module")
def lived(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Database, float]]:
    """A database with a past; nobody writes into it."""
    folder = tmp_path_factory.mktemp("lived")
    settings = load_settings(home=folder)
    with opened(folder) as database:
        now = boards.everything(settings, database, COUNT, weights=False)
        yield database, now


def test_traffic_counts_what_the_rows_say(lived: tuple[Database, float]) -> None:
    database, now = lived
    with database.read() as c:
        slices = charts.traffic(c, policy="tab", since=now - 86_400, until=now, width=900)
        rows = c.execute(sa.select(table.c.version, table.c.kind, table.c.verdict, table.c.at)).all()
    assert sum(one.opportunities for one in slices) == COUNT == len(rows)
    for version in range(6):
        mine = [row for row in rows if row.version == version]
        cut = [one for one in slices if one.version == version]
        assert sum(one.shown for one in cut) == sum(row.kind == "shown" for row in mine) > 50
        assert sum(one.silent for one in cut) == sum(row.kind == "silent" for row in mine)
        for name in ("accepted", "rejected", "timeout"):
            assert sum(getattr(one, name) for one in cut) == sum(row.verdict == name for row in mine)
    place = slices[7]
    there = [
        row for row in rows if place.start <= row.at < place.start + 900 and row.version == place.version
    ]
    assert place.opportunities == len(there)


def test_traffic_and_statuses_read_indices_alone(lived: tuple[Database, float]) -> None:
    database, now = lived
    statements: list[tuple[str, Any]] = []
    with database.read() as c:
        sa.event.listen(c, "before_cursor_execute", lambda *a: statements.append((a[2], a[3])))
        charts.traffic(c, policy="tab", since=now - 86_400, until=now, width=900)
        charts.statuses(c, since=now - 86_400)
        for statement, parameters in statements[:2]:
            plan = " ".join(
                row[3] for row in c.exec_driver_sql(f"EXPLAIN QUERY PLAN {statement}", parameters)
            )
            assert "USING COVERING INDEX" in plan, plan


def test_the_newest_are_the_newest_of_all_kinds(lived: tuple[Database, float]) -> None:
    database, _ = lived
    with database.read() as c:
        rows = c.execute(
            sa.select(table.c.id, table.c.verdict, table.c.kind).order_by(table.c.at.desc())
        ).all()
        assert [one.id for one in charts.newest(c, policy="tab", limit=30)] == [row.id for row in rows[:30]]
        for name in ("accepted", "rejected", "timeout", "silent"):
            wanted = [row.id for row in rows if row.verdict == name][:10]
            assert [one.id for one in charts.newest(c, policy="tab", limit=10, verdict=name)] == wanted
        waiting = [row.id for row in rows if row.verdict is None and row.kind == "shown"][:10]
        assert [one.id for one in charts.newest(c, policy="tab", limit=10, verdict="waiting")] == waiting
        first = charts.newest(c, policy="tab", limit=10)
        second = charts.newest(c, policy="tab", limit=10, before=first[-1].at)
        assert [one.id for one in second] == [row.id for row in rows[10:20]]
        assert charts.newest(c, policy="other", limit=10) == []


def test_long_histories_are_thinned_and_keep_their_ends(lived: tuple[Database, float]) -> None:
    database, _ = lived
    with database.read() as c:
        (id,) = charts.recent_experiments(c, policy="tab", limit=5)
        whole = experiments.decisions(c, id)
        thin = charts.readings(c, id, limit=20)
        assert thin[-1] == whole[-1]
        assert [one for one in thin if one.kind is not DecisionKind.CONTINUE] == [
            one for one in whole if one.kind is not DecisionKind.CONTINUE
        ]
        assert 10 < sum(one.kind is DecisionKind.CONTINUE for one in thin) <= 20
        assert charts.last_reading(c, id) == whole[-1]
        assert [one.batch for one in charts.progress(c, 1, limit=10)] == [*range(1, 49, 5), 48]


def test_changes_tell_a_rollback_from_a_promotion(lived: tuple[Database, float]) -> None:
    database, now = lived
    with database.read() as c:
        found = charts.changes(c, policy="tab", since=now - 86_400)
    assert [(one.version, one.back) for one in found] == [
        (0, False), (1, False), (2, False), (3, False), (2, True), (4, False), (5, False)
    ]  # fmt: skip


def test_the_board_of_an_empty_policy(tmp_path: Path) -> None:
    with opened(tmp_path) as database, database.write() as c:
        base(c)
        found = views.board(c, "tab", Policy(), views.SPANS["day"], 1e9, Past())
    assert found["window"]["rate"] is None
    assert found["window"]["reward"] is None
    assert (found["experiment"], found["run"], found["series"]["lines"]) == (None, None, [])
    assert [one["id"] for one in found["versions"]] == [0]


def test_the_reward_of_the_board_is_that_of_the_rule(tmp_path: Path) -> None:
    """Two accepts, a reject, a timeout of a client that knows rejects, one of a client that does not, a
    silence."""
    with opened(tmp_path) as database, database.write() as c:
        base(c)
        interactions.insert(c, [shown(f"s{n}") for n in range(5)])
        interactions.insert(c, [silent("q")])
        for id, event in (("s0", Event.ACCEPTED), ("s1", Event.ACCEPTED), ("s2", Event.REJECTED)):
            assert tell(c, id, event) is FeedbackStatus.MATCHED
        tell(c, "s3", Event.IGNORED)
        tell(c, "s4", Event.IGNORED)
        c.execute(table.update().where(table.c.id == "s4").values(verdict_source="continue"))
        settings = Policy.model_validate({"rewards": {"tau": 0.2, "timeout_weight": 0.5}})
        found = views.board(c, "tab", settings, views.SPANS["hour"], 1100.0, Past())
    assert found["tau"] == {"value": 0.2, "origin": "a run that starts now"}
    assert found["window"]["reward"] == pytest.approx((2 * 0.8 - 0.2 * (1 + 0.5 + 1)) / 6)
    assert found["window"]["rate"] == pytest.approx(2 / 5)


def test_guards_say_where_the_last_batch_lies() -> None:
    steps = [
        Step(1, 1, 0.0, {"kl": 0.0, "entropy": 2.0, "length": 10.0, "gradient_norm": 1.0}),
        Step(1, 2, 0.0, {"kl": 0.9, "entropy": 0.5, "length": 12.0, "gradient_norm": 30.0}),
    ]
    found = {one["name"]: one for one in views.guards(Policy(), steps)}
    assert found.keys() == {"kl", "entropy", "length", "gradient_norm"}
    assert (found["kl"]["value"], found["kl"]["high"]) == (0.9, 0.5)
    assert found["entropy"]["low"] == pytest.approx(0.6)
    assert (found["length"]["low"], found["length"]["high"]) == (3.0, 20.0)
    assert found["gradient_norm"]["high"] == 20.0
    assert views.guards(Policy(), []) == []


# -------------------------------------------------------------------------------------------- HTTP


@pytest.fixture
async def gateway(tmp_path: Path) -> AsyncIterator[Gateway]:
    async with running(tmp_path, versions_=(0, 1)) as one:
        mounted(one)
        yield one


def mounted(one: Gateway) -> None:
    async def replicas() -> list[dict[str, Any]]:
        return [
            {"name": "tab-0", "policy": "tab", "state": "up", "versions": [0], "running": 0, "waiting": 0}
        ]

    live = {name: (lambda name=name: one.live[name]) for name in one.live}
    mount(one.app, one.settings, one.database, live=live, admin_key=ADMIN_KEY, replicas=replicas)


async def test_the_page_loads_only_its_own_files(gateway: Gateway) -> None:
    page = await gateway.client.get("/")
    assert page.headers["content-type"].startswith("text/html")
    assert "script-src 'self'" in page.headers["content-security-policy"]
    assert "unsafe" not in page.headers["content-security-policy"]
    named = [part.split('"')[0] for part in page.text.split('="')[1:]]
    assets = [name for name in named if name.startswith("/dashboard/static/")]
    assert len(assets) >= 5
    for name in assets:
        asset = await gateway.client.get(name)
        assert asset.status_code == 200
        assert "immutable" in asset.headers["cache-control"]
    assert (await gateway.client.get("/dashboard/static/x/secret.txt")).status_code == 404
    for file in STATIC.iterdir():  # offline: nothing points elsewhere
        text = file.read_text("utf-8").replace("http://www.w3.org/", "")
        if file.name not in ("uplot.js", "uplot.LICENSE"):
            assert "://" not in text, file.name


async def test_the_board_needs_no_key_and_holds_no_text(gateway: Gateway) -> None:
    await gateway.complete("secret_prompt = ", user="ann@example.org")
    reply = await gateway.client.get("/dashboard/board")
    assert (reply.json()["serving"], reply.json()["totals"]["opportunities"]) == (0, 1)
    assert "secret" not in reply.text
    assert "ann@" not in reply.text
    assert str(gateway.settings.home) not in reply.text
    again = await gateway.client.get("/dashboard/board", headers={"if-none-match": reply.headers["etag"]})
    assert again.status_code == 304
    gateway.live["tab"] = 1  # what new requests get is never kept
    moved = await gateway.client.get("/dashboard/board", headers={"if-none-match": reply.headers["etag"]})
    assert moved.json()["serving"] == 1
    assert (await gateway.client.get("/dashboard/replicas")).json()[0]["name"] == "tab-0"


async def test_what_is_recent_is_counted_at_every_look_and_the_whole_now_and_then(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("onlinerl.dashboard.app.FRESH", 0.0)
    monkeypatch.setattr("onlinerl.dashboard.past.THRIFT", 1e9)
    boards.traffic(gateway.database, 500, now=time.time())

    async def window() -> dict[str, int]:
        found: dict[str, int] = (await gateway.client.get("/dashboard/board")).json()["window"]
        return found

    before = await window()
    id = (await gateway.complete("x = ")).json()["id"]
    await gateway.client.post("/v1/feedback", json={"id": id, "event": "accepted"})
    assert (await window())["opportunities"] == before["opportunities"] + 1
    assert (await window())["accepted"] == before["accepted"] + 1
    old = "(SELECT seq FROM interactions WHERE verdict = 'rejected' ORDER BY at LIMIT 1)"
    with gateway.database.write() as c:
        c.exec_driver_sql(f"UPDATE interactions SET verdict = 'accepted' WHERE seq = {old}")
    assert (await window())["accepted"] == before["accepted"] + 1
    assert fresh_board(gateway)["window"]["accepted"] == before["accepted"] + 2


def fresh_board(gateway: Gateway) -> dict[str, Any]:
    """As a server that has not looked before tells it."""
    with gateway.database.read() as c:
        settings = gateway.settings.policies["tab"]
        return views.board(c, "tab", settings, views.SPANS["day"], time.time(), Past())


@pytest.mark.parametrize("path", ["/dashboard/interactions", "/dashboard/export"])
async def test_text_needs_the_key(gateway: Gateway, path: str) -> None:
    assert (await gateway.client.get(path)).status_code == 401
    wrong = await gateway.client.get(path, headers={"authorization": "Bearer wrong"})
    assert wrong.status_code == 403
    assert wrong.json()["error"]["message"] == "that is not the admin key"
    assert (await gateway.client.get(path, headers=KEY)).status_code == 200


@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("/dashboard/board?policy=x", "there is no policy 'x'"),
        ("/dashboard/board?span=year", "span must be one of hour, day, week"),
        ("/dashboard/interactions?verdict=x", "verdict must be one of"),
        ("/dashboard/interactions?before=nan", "before must be a number"),
        ("/dashboard/export.csv?since=x", "since must be a number"),
    ],
)
async def test_wrong_questions_get_a_sentence(gateway: Gateway, path: str, says: str) -> None:
    reply = await gateway.client.get(path, headers=KEY)
    assert reply.status_code in (400, 404)
    assert reply.json()["error"]["message"].startswith(says)


async def test_an_interaction_with_its_tokens(gateway: Gateway) -> None:
    id = (await gateway.complete("def f(x):\n", user="ann")).json()["id"]
    await gateway.client.post("/v1/feedback", json={"id": id, "event": "accepted"})
    (one,) = (await gateway.client.get("/dashboard/interactions", headers=KEY)).json()
    kept = gateway.interactions(id)[0]
    assert (one["id"], one["verdict"], one["user"], one["before"]) == (id, "accepted", "ann", "def f(x):\n")
    assert "".join(token["text"] for token in one["tokens"]) == kept.completion
    assert [token["logprob"] for token in one["tokens"]] == pytest.approx(kept.behavior_logprobs, abs=1e-3)
    assert one["reward"] == pytest.approx(1 - min(0.25, 0.5))


async def test_hidden_code_is_nowhere(tmp_path: Path) -> None:
    async with running(tmp_path, "policies.tab.dashboard.code=hidden") as one:
        mounted(one)
        id = (await one.complete("password = 'hunter2'\n")).json()["id"]
        text = one.interactions(id)[0].completion
        reply = await one.client.get("/dashboard/interactions", headers=KEY)
        assert "hunter2" not in reply.text
        assert text.strip() not in reply.text
        (found,) = reply.json()
        assert sum(token["size"] for token in found["tokens"]) == len(text)
        link = (await one.client.get("/dashboard/export", headers=KEY)).json()["url"]
        body = (await one.client.get(link)).text
        assert id in body
        assert "completion" not in body.splitlines()[0]
        assert text.strip() not in body


async def test_export_is_streamed_whole_to_who_has_the_link(gateway: Gateway) -> None:
    now = time.time()
    boards.traffic(gateway.database, 1200, now=now)
    link = (await gateway.client.get("/dashboard/export?span=day", headers=KEY)).json()["url"]
    pieces = []
    async with gateway.client.stream("GET", link) as reply:
        assert "attachment" in reply.headers["content-disposition"]
        async for piece in reply.aiter_text():
            pieces.append(piece)
    assert len(pieces) > 1
    rows = list(csv.DictReader(io.StringIO("".join(pieces))))
    assert len(rows) == 1200
    assert set(rows[0]) == set(export.COLUMNS)
    assert sum(row["verdict"] == "accepted" for row in rows) > 100
    changed = link.replace("until=", "until=9")
    assert (await gateway.client.get(changed)).status_code == 403
    assert (await gateway.client.get("/dashboard/export.csv")).status_code == 403


def test_a_link_is_of_one_key_and_one_minute() -> None:
    order = export.Order("tab", 1.0, 2.0, 0.1, expires=100)
    signature = order.signature("key")
    order.check("key", signature, 99.0)
    with pytest.raises(Forbidden, match="no longer valid"):
        order.check("key", signature, 101.0)
    with pytest.raises(Forbidden, match="not made by this server"):
        order.check("other", signature, 99.0)
    with pytest.raises(Forbidden, match="not made by this server"):
        replace(order, policy="other").check("key", signature, 99.0)


def test_a_spreadsheet_runs_nothing_that_a_client_wrote(tmp_path: Path) -> None:
    with opened(tmp_path) as database:
        with database.write() as c:
            base(c)
            interactions.insert(c, [shown("a", user="=HYPERLINK(1)", completion="@x", offsets=(1, 2, 2))])
        served = charts.export(database, policy="tab", since=0, until=2000)
        (row,) = csv.DictReader(io.StringIO("".join(export.rows(served, tau=0.1, weight=0.5, code=True))))
    assert (row["user"], row["completion"]) == ("'=HYPERLINK(1)", "'@x")


async def test_without_the_dashboard_there_is_no_page(tmp_path: Path) -> None:
    async with running(tmp_path) as one:
        assert (await one.client.get("/")).status_code == 404
