"""Which arm a request is served in, over HTTP: who takes part, what sticks, what is recorded."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from onlinerl.records import Arm, DecisionKind, Experiment, FinishReason, Interaction
from onlinerl.records import Decision as Made
from onlinerl.store import experiments, interactions
from onlinerl.store.database import Database
from onlinerl.text.codec import Codec
from tests.gateways import MODEL, Gateway, ids_of, running, says
from tests.servers import environment
from tests.trials import T0, lineage, start, users

USERS = [f"user-{number}" for number in range(40)]


def trying(treatment: Arm | int = 1, **plan: Any) -> Callable[[Database], dict[str, Experiment]]:
    """What a publisher knows once an experiment of the policy `tab` runs in the store."""

    def knows(database: Database) -> dict[str, Experiment]:
        with database.write() as c:
            found = experiments.running(c, "tab")
            return {"tab": found or start(c, treatment, **plan)}

    return knows


@pytest.fixture
async def gateway(tmp_path: Path) -> AsyncIterator[Gateway]:
    async with running(tmp_path, versions_=(0, 1), knows=trying()) as one:
        one.engine.versions = {0, 1}
        yield one


async def ask(
    gateway: Gateway, user: str, prompt: object = "def f(x):\n", **fields: object
) -> httpx.Response:
    reply = await gateway.complete(prompt, user=user, max_tokens=2, **fields)
    assert reply.status_code == 200, reply.text
    return reply


async def arms(gateway: Gateway, people: list[str] = USERS) -> dict[str, str]:
    replies = await asyncio.gather(*(ask(gateway, user) for user in people))
    return {user: reply.headers["x-onlinerl-arm"] for user, reply in zip(people, replies, strict=True)}


def someone(gateway: Gateway, arm: str) -> str:
    """A user whom the running experiment assigns to that arm."""
    return users(gateway.experiments["tab"], arm, 1)[0]


def record(gateway: Gateway, reply: httpx.Response) -> Interaction:
    (one,) = gateway.interactions(reply.json()["id"])
    return one


async def test_arms_are_served_and_recorded(gateway: Gateway) -> None:
    found = await arms(gateway)
    assert 8 < Counter(found.values())["treatment"] < 32
    assert set(found.values()) == {"control", "treatment"}
    for user in USERS[:10]:
        reply = await ask(gateway, user)
        one = record(gateway, reply)
        version = 1 if found[user] == "treatment" else 0
        assert (one.arm, one.experiment, one.unit, one.propensity) == (found[user], 1, user, 0.5)
        assert (one.version, reply.headers["x-onlinerl-version"]) == (version, str(version))
        assert reply.json()["system_fingerprint"] == f"tab@{version}"


async def test_who_takes_no_part(gateway: Gateway) -> None:
    treated = someone(gateway, "treatment")
    nobody = await ask(gateway, "")
    pinned = await ask(gateway, treated, model="tab@0")
    for reply, arm in ((nobody, "live"), (pinned, "pinned")):
        one = record(gateway, reply)
        assert (reply.headers["x-onlinerl-arm"], one.arm) == (arm, arm)
        assert (one.experiment, one.unit, one.version) == (None, "", 0)


@pytest.mark.parametrize("field", [{"seed": 1}, {"temperature": 0}])
async def test_repeatable_requests_take_part(gateway: Gateway, field: dict[str, object]) -> None:
    reply = await ask(gateway, "ann", **field)
    assert record(gateway, reply).experiment == 1


async def test_lists_projects_and_shares(tmp_path: Path) -> None:
    plan: dict[str, Any] = {"users": USERS[:20], "projects": ["mine"], "share": 0.5}
    async with running(tmp_path, versions_=(0, 1), knows=trying(1, **plan)) as gateway:
        gateway.engine.versions = {0, 1}
        assert set((await arms(gateway)).values()) == {"live"}
        found = {}
        for user in USERS:
            reply = await ask(gateway, user, headers={"x-project-id": "mine"})
            found[user] = reply.headers["x-onlinerl-arm"]
        assert {found[user] for user in USERS[20:]} == {"live"}
        assert set(Counter(found.values())) == {"live", "control", "treatment"}
        assert 2 < Counter(found[user] for user in USERS[:20])["live"] < 18


async def test_a_user_keeps_the_arm_over_restarts_and_in_every_gateway(tmp_path: Path) -> None:
    async with running(tmp_path, versions_=(0, 1), knows=trying()) as first:
        first.engine.versions = {0, 1}
        before = await arms(first)
        async with running(tmp_path, versions_=(0, 1), knows=trying()) as second:
            second.engine.versions = {0, 1}
            assert await arms(second) == before
    async with running(tmp_path, versions_=(0, 1), knows=trying()) as later:
        later.engine.versions = {0, 1}
        assert await arms(later) == before


def test_processes_that_share_only_the_store_assign_alike(tmp_path: Path) -> None:
    script = """
import json, sys
from onlinerl import config
from onlinerl.experiments import assignment
from onlinerl.store import experiments
from onlinerl.store.database import Database

database = Database.open(sys.argv[1])
with database.read() as c:
    one = experiments.running(c, "tab")
settings = config.Experiments(holdout=0.1)
found = {}
for number in range(3000):
    drawn = assignment.experimental(one, settings, user=f"u{number}", project="p", path="a.py", at=1e6)
    found[f"u{number}"] = drawn and [drawn.arm, drawn.propensity, drawn.unit]
print(json.dumps(found))
database.close()
"""
    url = f"sqlite:///{tmp_path / 'onlinerl.db'}"
    database = Database.open(url)
    with database.write() as c:
        lineage(c, 1)
        start(c, stages=[0.1, 0.3], unit="session")
    line = [sys.executable, "-c", script, url]
    processes = [
        subprocess.Popen(line, env={**environment(), "PYTHONHASHSEED": seed}, stdout=subprocess.PIPE)
        for seed in "12"
    ]
    one, two = (json.loads(process.communicate(timeout=60)[0]) for process in processes)
    assert one == two
    counts = Counter(drawn and drawn[0] for drawn in one.values())
    assert 240 < counts[None] < 360  # the hold-out
    assert 200 < counts["treatment"] < 340
    # and as the stage rises nobody is taken back
    with database.write() as c:
        found = experiments.running(c, "tab")
        assert found is not None
        experiments.ramp(c, found, Made(DecisionKind.RAMP, "on", at=T0 + 9), T0 + 9)
    database.close()
    later = json.loads(subprocess.check_output(line, env=environment(), timeout=60))
    moved = Counter((one[user] and one[user][0], later[user] and later[user][0]) for user in one)
    assert set(moved) == {
        (None, None),
        ("control", "control"),
        ("control", "treatment"),
        ("treatment", "treatment"),
    }


async def test_nobody_loses_an_arm_as_stages_rise(tmp_path: Path) -> None:
    async with running(tmp_path, versions_=(0, 1), knows=trying(1, stages=[0.2, 0.5, 0.9])) as gateway:
        gateway.engine.versions = {0, 1}
        treated: set[str] = set()
        for stage in range(3):
            gateway.experiments["tab"] = replace(gateway.experiments["tab"], stage=stage)
            now = {user for user, arm in (await arms(gateway)).items() if arm == "treatment"}
            assert treated < now
            treated = now
        assert len(treated) > 28


async def test_arms_are_frozen(gateway: Gateway) -> None:
    before = await arms(gateway)
    gateway.engine.versions |= {2}
    gateway.live["tab"] = 2  # a newly trained version goes live all the same
    for user in USERS[:20]:
        reply = await ask(gateway, user)
        assert reply.headers["x-onlinerl-arm"] == before[user]
        assert reply.headers["x-onlinerl-version"] == ("1" if before[user] == "treatment" else "0")
    assert (await ask(gateway, "")).headers["x-onlinerl-version"] == "2"


async def test_live_serves_where_an_arm_is_not_loaded_and_the_record_says_who_was_assigned(
    gateway: Gateway,
) -> None:
    treated = someone(gateway, "treatment")
    gateway.engine.versions = {0}
    one = record(gateway, await ask(gateway, treated))
    assert (one.arm, one.experiment, one.unit, one.version) == ("treatment", 1, treated, 0)


@pytest.mark.parametrize("stream", [False, True])
async def test_an_error_before_the_first_token_is_an_opportunity_of_an_experiment(
    gateway: Gateway, stream: bool
) -> None:
    found = await arms(gateway, USERS[:5])
    gateway.engine.die_after = 0
    reply = await gateway.complete("lost", user=USERS[0], stream=stream)
    assert reply.status_code == 503
    last = gateway.last()
    assert last is not None
    assert (last.prompt, last.finish, last.completion_ids) == ("lost", FinishReason.ERROR, ())
    assert (last.arm, last.experiment, last.unit) == (found[USERS[0]], 1, USERS[0])
    gateway.engine.die_after, gateway.engine.full = None, 1.0
    reply = await gateway.complete("full", user=USERS[0], stream=stream)
    assert reply.status_code == 429
    last = gateway.last()
    assert last is not None
    assert (last.prompt, last.finish) == ("full", FinishReason.ERROR)
    with gateway.database.read() as c:
        counted = experiments.observations(c, gateway.experiments["tab"], T0)
    assert sum(sum(arm.errors) for arm in counted.values()) == 2
    # outside of an experiment nobody was given an answer, and nothing is to be compared
    assert (await gateway.complete("nobody", stream=stream)).status_code == 429
    again = gateway.last()
    assert again is not None
    assert again.prompt == "full"


async def test_the_hold_out_stays_on_the_first_version(tmp_path: Path) -> None:
    overrides = "policies.tab.experiments.holdout=0.3"
    async with running(tmp_path, overrides, versions_=(0, 1, 2), knows=trying(2, control=1)) as gateway:
        gateway.engine.versions = {0, 1, 2}
        gateway.live["tab"] = 1
        found = await arms(gateway)
        assert set(found.values()) == {"control", "treatment", "holdout"}
        assert 3 < Counter(found.values())["holdout"] < 22
        held = next(user for user, arm in found.items() if arm == "holdout")
        one = record(gateway, await ask(gateway, held))
        assert (one.version, one.experiment, one.unit, one.propensity) == (0, None, "", 0.3)
        gateway.experiments.clear()  # whatever runs
        after = await arms(gateway)
        assert {user for user, arm in after.items() if arm == "holdout"} == {
            user for user, arm in found.items() if arm == "holdout"
        }
        gateway.engine.versions = {1, 2}
        one = record(gateway, await ask(gateway, held))
        assert (one.version, one.arm) == (1, "holdout")


async def test_who_explores_takes_no_part(tmp_path: Path) -> None:
    exploring = ("policies.tab.exploration.users=all", "policies.tab.exploration.share=0.3")
    async with running(tmp_path, *exploring, versions_=(0, 1), knows=trying()) as gateway:
        gateway.engine.versions = {0, 1}
        found = await arms(gateway)
        assert set(found.values()) == {"explore", "control", "treatment"}
        explorer = next(user for user, arm in found.items() if arm == "explore")
        one = record(gateway, await ask(gateway, explorer, temperature=0.01))
        assert (one.version, one.temperature, one.experiment) == (0, 1.0, None)


async def test_sessions_are_a_user_s_work_on_one_file(tmp_path: Path) -> None:
    async with running(tmp_path, versions_=(0, 1), knows=trying(1, unit="session")) as gateway:
        gateway.engine.versions = {0, 1}

        async def file(user: str, name: str, text: str = "def f(x):\n") -> Interaction:
            prompt = f"<|file_sep|>{name}\n<|fim_prefix|>{text}<|fim_suffix|>\n<|fim_middle|>"
            return record(gateway, await ask(gateway, user, prompt))

        drawn = [await file("ann", f"src/{number}.py") for number in range(20)]
        assert {one.arm for one in drawn} == {"control", "treatment"}
        for number in range(5):
            again = await file("ann", f"src/{number}.py", "other text\n")
            assert (again.arm, again.unit) == (drawn[number].arm, drawn[number].unit)
        user, path, day = drawn[0].unit.split("\0")
        assert (user, path, int(day)) == ("ann", "src/0.py", int(drawn[0].at // 86400))
        long = await file("ann", "x" * 1500 + ".py")
        assert len(long.unit) < 300


# -------------------------------------------------------------------------------- another policy's version


@pytest.fixture
def starcoder(tmp_path: Path) -> Codec:
    """The built-in tokenizer with other markers, in another place of the vocabulary."""
    folder = tmp_path / "starcoder"
    folder.mkdir()
    for file in ("config.json", "generation_config.json", "tokenizer_config.json", "tokenizer.json"):
        if (MODEL / file).exists():
            text = (MODEL / file).read_text("utf-8")
            for name in ("fim_prefix", "fim_suffix", "fim_middle", "file_sep"):
                text = text.replace(f"<|{name}|>", f"<{name}>")
            (folder / file).write_text(text, "utf-8")
    return Codec.open(folder)


async def test_another_policy_s_version_gets_the_prompt_in_its_own_template(
    tmp_path: Path, starcoder: Codec
) -> None:
    big = ("policies.big.sampling.temperature=0.5", "policies.big.sampling.max_tokens=3")
    knows = trying(Arm("big", 1), control=Arm("tab", 0))
    async with running(
        tmp_path, *big, codecs={"big": starcoder}, knows=knows, policies=("tab", "big"), versions_=(0, 1)
    ) as gateway:
        gateway.engine.versions = {0, 1}
        treated = someone(gateway, "treatment")
        prompt = "<|file_sep|>a.py\n<|fim_prefix|>def f(x):\n<|fim_suffix|>\n<|fim_middle|>"
        replies = [
            await gateway.complete(prompt, user=treated),
            await gateway.complete("def f(x):\n", suffix="\n", user=treated),
            await gateway.complete(ids_of(prompt), user=treated),
            await gateway.complete("def f(x):\n", user=treated),
        ]
        moved = [record(gateway, reply) for reply in replies]
        assert {(one.policy, one.version, one.arm, one.experiment) for one in moved} == {
            ("big", 1, "treatment", 1)
        }
        bare = "<fim_prefix>def f(x):\n<fim_suffix>\n<fim_middle>"
        full = "<fim_prefix><file_sep>a.py\ndef f(x):\n<fim_suffix>\n<fim_middle>"
        assert [one.prompt for one in moved] == [full, bare, full, "def f(x):\n"]
        assert [one.prompt_ids for one in moved] == [tuple(starcoder.encode(one.prompt)) for one in moved]
        assert [one.language for one in moved] == ["python", "", "python", ""]
        assert {one.temperature for one in moved} == {0.5}
        assert {len(one.completion_ids) for one in moved} == {3}
        assert {reply.json()["system_fingerprint"] for reply in replies} == {"big@1"}
        assert {reply.json()["model"] for reply in replies} == {"tab"}  # as it was asked for


async def test_what_another_policy_cannot_take_is_served_live_and_stays_assigned(
    tmp_path: Path, starcoder: Codec
) -> None:
    knows = trying(Arm("big", 1), control=Arm("tab", 0))
    async with running(
        tmp_path,
        "policies.big.engine.context=16",
        codecs={"big": starcoder},
        knows=knows,
        policies=("tab", "big"),
        versions_=(0, 1),
    ) as gateway:
        gateway.engine.versions = {0, 1}
        treated = someone(gateway, "treatment")
        one = record(gateway, await ask(gateway, treated, "x = 1\n" * 50))
        assert (one.policy, one.version, one.arm, one.experiment) == ("tab", 0, "treatment", 1)


async def test_continue_s_feedback_finds_what_another_policy_answered(
    tmp_path: Path, starcoder: Codec
) -> None:
    knows = trying(Arm("big", 1), control=Arm("tab", 0))
    async with running(
        tmp_path, codecs={"big": starcoder}, knows=knows, policies=("tab", "big"), versions_=(0, 1)
    ) as gateway:
        gateway.engine.versions = {0, 1}
        gateway.engine.script = says("return x")
        treated = someone(gateway, "treatment")
        prompt = "<|fim_prefix|>def f(x):\n    <|fim_suffix|>\n<|fim_middle|>"
        asked = await gateway.complete(prompt, user=treated)
        event = {"accepted": True, "prompt": prompt, "prefix": "def f(x):\n    ", "suffix": "\n"}
        event |= {"completion": "return x", "userId": treated}
        reply = await gateway.client.post("/api/training/submit", json=event)
        assert reply.json()["feedback"] == "matched"
        with gateway.database.read() as c:
            one = interactions.get(c, asked.json()["id"])
        assert one is not None
        assert (one.policy, one.verdict) == ("big", "accepted")
