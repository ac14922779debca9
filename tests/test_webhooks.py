"""Webhooks: signed, in order, at least once, over restarts, and bounded where nobody answers."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import re
import socket
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import structlog

from onlinerl import observe
from onlinerl.client import Damaged, verify
from onlinerl.config import Settings, load_settings
from onlinerl.errors import SettingsError
from onlinerl.loop import webhooks
from onlinerl.loop.webhooks import Webhooks, secrets_of, sign
from onlinerl.records import Arm, Decision, DecisionKind, ExperimentState, RunState, VersionState
from onlinerl.store import experiments, notices, runs, versions
from onlinerl.store.database import Database
from onlinerl.store.notices import Place
from tests.controllers import KEY
from tests.gateways import running, until
from tests.receivers import Receiver, receiving
from tests.store_helpers import base, opened, version

SECRET = "whsec-no-one-may-see-this"


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOOK_KEY", SECRET)
    monkeypatch.setattr(webhooks, "LOOK", 0.01)
    monkeypatch.setattr(webhooks, "FIRST_DELAY", 0.01)
    monkeypatch.setattr(webhooks, "LONGEST_DELAY", 0.05)


@pytest.fixture
def database(tmp_path: Path) -> Iterator[Database]:
    with opened(tmp_path) as database:
        with database.write() as c:
            base(c)
        yield database


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with receiving(SECRET) as one:
        yield one


def settings_of(*receivers: Receiver | str, policies: str = "{tab: {}}", events: str = "") -> Settings:
    urls = [one if isinstance(one, str) else one.url for one in receivers]
    hooks = ", ".join(f'{{url: "{url}", secret: HOOK_KEY{events}}}' for url in urls)
    return load_settings(overrides=[f"webhooks=[{hooks}]", f"policies={policies}"])


@contextlib.asynccontextmanager
async def telling(settings: Settings, database: Database) -> AsyncIterator[None]:
    """Webhooks at work; by the time it begins, they know from where on they tell."""
    task = asyncio.create_task(Webhooks(settings, database).run())

    def enrolled() -> bool:
        with database.read() as c:
            names = [notices.target(webhook.url) for webhook in settings.webhooks]
            return all(len(notices.state(c, name)) == len(settings.policies) for name in names)

    await until(enrolled)
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def noted(database: Database, receiver: Receiver) -> None:
    """Wait until the store knows what the receiver has: whoever is stopped before that says it again."""

    def waiting() -> int:
        with database.read() as c:
            (one, *_) = notices.state(c, notices.target(receiver.url))
            return notices.waiting(c, one, ("version", "run", "experiment"))

    await until(lambda: waiting() == 0)


def register(database: Database, *ids: int) -> None:
    for id in ids:
        with database.write() as c:
            versions.register(c, version(id, parent=0))


def types(receiver: Receiver) -> list[str]:
    return [notice["type"] for notice in receiver.taken]


def registered(receiver: Receiver) -> list[int]:
    return [one["data"]["version"] for one in receiver.taken if one["type"] == "version.registered"]


async def test_all_that_happens_to_versions_runs_and_experiments_is_told_in_its_order(
    database: Database, receiver: Receiver
) -> None:
    async with telling(settings_of(receiver), database):
        now = time.time()
        with database.write() as c:
            run = runs.request(c, policy="tab", host=socket.gethostname(), settings="{}", now=now)
        with database.write() as c:
            begun, _ = runs.start(
                c, policy="tab", host="h", pid=1, settings="", tau_of=lambda c: 0.1, now=now, run=run.id
            )
        with database.write() as c:
            runs.move(c, begun, RunState.PAUSED)
        with database.write() as c:
            runs.move(c, begun, RunState.RUNNING)
        with database.write() as c:
            again, resumed = runs.start(
                c, policy="tab", host="h", pid=2, settings="", tau_of=lambda c: 0.1, now=now + 60
            )
            assert resumed
        with database.write() as c:
            versions.register(c, version(1, parent=0, run=run.id, step=3))
            runs.heartbeat(c, again, step=3, now=now + 60)
            runs.finish(c, again, RunState.FINISHED, "no feedback is left")
        with database.write() as c:
            experiment = experiments.start(
                c,
                policy="tab",
                control=Arm("tab", 0),
                treatment=Arm("tab", 1),
                plan={"stages": (0.5,)},
                rewards={},
                tau=0.1,
                alpha=0.05,
                actor="admin",
                now=time.time(),
            )
        numbers = MappingProxyType({"estimate": 0.02})
        with database.write() as c:
            decision = Decision(DecisionKind.PROMOTE, "better by 0.02", numbers, at=time.time())
            state = ExperimentState.PROMOTED
            experiments.finish(c, experiment, state, decision, time.time())
        await until(lambda: len(receiver.taken) == 12)
    assert types(receiver) == [
        "run.pending",
        "run.running",
        "run.paused",
        "run.running",
        "run.resumed",
        "version.registered",
        "run.finished",
        "experiment.start",
        "version.canary",
        "experiment.promote",
        "version.retired",
        "version.live",
    ]
    assert len({notice["id"] for notice in receiver.taken}) == 12
    assert {notice["policy"] for notice in receiver.taken} == {"tab"}
    at = [notice["at"] for notice in receiver.taken]
    assert at == sorted(at)
    told = {notice["type"]: notice["data"] for notice in receiver.taken}
    assert told["run.finished"] == {
        "run": run.id, "from": "running", "to": "finished", "step": 3, "message": "no feedback is left",
    }  # fmt: skip
    live = told["version.live"]
    assert (live["version"], live["from"], live["run"], live["parent"]) == (1, "canary", run.id, 0)
    assert live["digest"] == version(1).digest
    promoted = told["experiment.promote"]
    assert (promoted["control"], promoted["treatment"]) == ("tab@0", "tab@1")
    assert (promoted["numbers"], promoted["reason"]) == ({"estimate": 0.02}, "better by 0.02")


async def test_refusals_are_tried_again_and_what_comes_later_waits_its_turn(
    database: Database, receiver: Receiver
) -> None:
    receiver.statuses = [500, 302, 404, 429]
    async with telling(settings_of(receiver), database):
        register(database, 1, 2, 3)
        await until(lambda: len(receiver.taken) == 3)
    assert registered(receiver) == [1, 2, 3]
    ids = [json.loads(body)["id"] for _, body in receiver.raw]
    assert len(set(ids[:5])) == 1  # the first one five times, and by the same name
    assert len(set(ids)) == 3


async def test_a_restart_loses_nothing_and_repeats_nothing(database: Database, receiver: Receiver) -> None:
    settings = settings_of(receiver)
    async with telling(settings, database):
        register(database, 1)
        await until(lambda: len(receiver.taken) == 1)
        receiver.statuses = [503] * 1000
        register(database, 2)
        await until(lambda: len(receiver.raw) > 3)
    register(database, 3)  # while nobody tells
    receiver.statuses = []
    async with telling(settings, database):
        await until(lambda: len(receiver.taken) == 3)
        register(database, 4)
        await until(lambda: len(receiver.taken) == 4)
    assert registered(receiver) == [1, 2, 3, 4]


async def test_one_who_never_answers_holds_up_nobody_else_and_is_given_up_in_the_end(
    database: Database, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))  # does not listen: connections are refused
        dead = f"http://127.0.0.1:{silent.getsockname()[1]}/"
        async with telling(settings_of(dead, receiver), database):
            register(database, 1, 2)
            await until(lambda: len(receiver.taken) == 2)

            def state() -> notices.Listener:
                with database.read() as c:
                    return notices.state(c, notices.target(dead))[0]

            await until(lambda: state().failing_at)
            assert (state().delivered, state().dropped, state().error) == (0, 0, "ConnectError")
            with database.read() as c:
                assert notices.waiting(c, state(), ("version",)) == 2
            rows = _rows(database)
            monkeypatch.setattr(webhooks, "KEEP", 0.0)
            await until(lambda: state().dropped == 2)
            register(database, 3)
            await until(lambda: state().dropped == 3)
            assert _rows(database) == rows  # what waits for the dead is in no table of its own


def _rows(database: Database) -> int:
    with database.read() as c:
        return int(c.exec_driver_sql("SELECT count(*) FROM webhooks").scalar_one())


async def test_only_what_was_asked_for_is_told(database: Database, receiver: Receiver) -> None:
    async with telling(settings_of(receiver, events=", events: [run]"), database):
        register(database, 1, 2)
        with database.write() as c:
            runs.request(c, policy="tab", host="h", settings="{}", now=time.time())
        await until(lambda: receiver.taken)
        register(database, 3)
        await noted(database, receiver)  # what it does not want is passed over for good
    assert types(receiver) == ["run.pending"]


async def test_new_listeners_hear_from_now_on_and_new_policies_are_heard_from_their_beginning(
    database: Database, receiver: Receiver
) -> None:
    register(database, 1)
    async with telling(settings_of(receiver), database):
        register(database, 2)
        await until(lambda: len(receiver.taken) == 1)
        await noted(database, receiver)
    with database.write() as c:
        versions.register(c, version(0, VersionState.LIVE, policy="other"))
    async with telling(settings_of(receiver, policies="{tab: {}, other: {}}"), database):
        await until(lambda: len(receiver.taken) == 2)
    assert [(one["policy"], one["data"]["version"]) for one in receiver.taken] == [("tab", 2), ("other", 0)]
    with database.write() as c:
        notices.enrol(c, [], ["tab"])
    assert _rows(database) == 0


def test_history_is_read_in_pieces_without_a_gap(database: Database) -> None:
    """However small the pieces are, and although each table has numbers of its own."""
    register(database, 1, 2)
    with database.write() as c:
        run = runs.request(c, policy="tab", host="h", settings="{}", now=1.0)
        runs.wish(c, "tab", run.id, "stop")
        versions.promote(c, "tab", 1, actor="me")
    with database.read() as c:
        whole = [notice for notice, _ in notices.after(c, "tab", Place(), 100)]
        assert len(whole) == 7
        for limit in (1, 2, 3):
            place, pieces = Place(), []
            while found := notices.after(c, "tab", place, limit):
                assert len(found) <= limit
                pieces += [notice for notice, _ in found]
                place = found[-1][1]
            assert pieces == whole
        assert notices.after(c, "other", Place(), 9) == []


# ---------------------------------------------------------------------------------------- secrets


def test_a_signature_is_good_for_its_body_its_secret_and_its_time() -> None:
    body = b'{"id": "version-1"}'
    good = sign(SECRET, body, time.time())
    assert verify(SECRET, good, body)["id"] == "version-1"
    for secret, signature, content in [
        ("another", good, body),
        (SECRET, good, body + b" "),
        (SECRET, sign(SECRET, body, time.time() - 400), body),
        (SECRET, sign(SECRET, body, time.time() + 400), body),
        (SECRET, good.replace("t=", "t=1"), body),
        (SECRET, "", body),
        (SECRET, "t=x,v1=ü", body),
    ]:
        with pytest.raises(Damaged):
            verify(secret, signature, content)


def test_the_signature_is_hmac_sha256_over_the_seconds_a_dot_and_the_body() -> None:
    """Worked out by `printf '1700000000.{}' | openssl dgst -sha256 -hmac key`."""
    assert sign("key", b"{}", 1700000000.9) == (
        "t=1700000000,v1=9d713ed406bb7076d4123f0dc2c39d2df5c654ed4b0cd56b52c8b4c940bd63ae"
    )


def test_the_verifier_that_the_docs_give_to_others_agrees() -> None:
    page = (Path(__file__).parents[1] / "docs" / "controller.md").read_text("utf-8")
    (block,) = [text for text in re.findall(r"```python\n(.*?)```", page, re.S) if "def verified" in text]
    assert len(block.strip().splitlines()) <= 10
    found: dict[str, Any] = {}
    exec(compile(block, "controller.md", "exec"), found)
    verified = found["verified"]
    body = b"{}"
    good = sign(SECRET, body, time.time())
    assert verified(SECRET, good, body)
    for signature in (
        good + "0",
        good.replace("t=", "t=1"),
        sign(SECRET, body, time.time() - 400),
        "",
        "t=x",
    ):
        assert not verified(SECRET, signature, body)
    assert not verified("another", good, body)


def test_a_secret_that_is_missing_is_told_before_anything_starts_and_without_its_text(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    settings = load_settings(overrides=["webhooks=[{url: 'http://h/', secret: whsec-written-in-by-mistake}]"])
    with pytest.raises(SettingsError, match=r"webhooks\.0\.secret must name") as refused:
        secrets_of(settings)
    assert "mistake" not in str(refused.value)
    for bad in (
        "{url: 'ftp://h/', secret: K}",
        "{url: 'http://h/'}",
        "{url: 'http://h/', secret: K, events: []}",
    ):
        with pytest.raises(SettingsError):
            load_settings(overrides=[f"webhooks=[{bad}]"])
    twice = "{url: 'http://h/', secret: K}"
    with pytest.raises(SettingsError, match="named once"):
        load_settings(overrides=[f"webhooks=[{twice}, {twice}]"])


async def test_no_secret_is_in_a_log_or_an_answer(tmp_path: Path, receiver: Receiver) -> None:
    file = tmp_path / "serve.log"
    observe.configure_logging(file=file)
    try:
        receiver.statuses = [500, 400]
        hook = f'webhooks=[{{url: "{receiver.url}", secret: HOOK_KEY}}]'
        async with running(tmp_path, hook, versions_=(0,)) as gateway:
            async with telling(gateway.settings, gateway.database):
                register(gateway.database, 1)
                await until(lambda: receiver.taken)
                await noted(gateway.database, receiver)
            told = await gateway.client.get("/admin/v1/webhooks", headers=KEY)
            pages = [told, await gateway.client.get("/openapi.json"), await gateway.client.get("/metrics")]
    finally:
        root = logging.getLogger()
        for handler in root.handlers[:]:
            if isinstance(handler.formatter, structlog.stdlib.ProcessorFormatter):
                root.removeHandler(handler)
                handler.close()
        root.setLevel(logging.WARNING)
        structlog.reset_defaults()
    (listed,) = told.json()
    assert (listed["host"], listed["events"]) == ("127.0.0.1", ["version", "run", "experiment"])
    (state,) = listed["policies"]
    assert (state["policy"], state["waiting"], state["delivered"]) == ("tab", 0, 1)
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    failed = [line for line in lines if line["event"] == "webhook failed"]
    assert [line["error"] for line in failed] == ["it answered 500", "it answered 400"]
    for text in (file.read_text(), *(page.text for page in pages)):
        assert SECRET not in text
        assert "in-the-url" not in text
    assert SECRET not in gateway.settings.model_dump_json()
