"""Answers that were served elsewhere, and feedback about them, in batches (mode C)."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import orjson
import pytest

from onlinerl.gateway import feedback, intake
from onlinerl.records import FinishReason, Verdict
from onlinerl.store import interactions
from tests.controllers import ANSWER, BASE, KEY, PROMPT, controlled, pushed
from tests.gateways import CODEC, Gateway
from tests.store_helpers import claim

EOS = CODEC.eos_ids[0]


@pytest.fixture
async def gateway(tmp_path: Path) -> AsyncIterator[Gateway]:
    async with controlled(tmp_path) as one:
        yield one


async def push(gateway: Gateway, *items: Any) -> Any:
    reply = await gateway.client.post(f"{BASE}/interactions", json={"interactions": items}, headers=KEY)
    assert reply.status_code == 200, reply.text
    return reply.json()["results"]


async def tell(gateway: Gateway, *items: Any) -> Any:
    reply = await gateway.client.post("/v1/feedback", json=items)
    assert reply.status_code == 200, reply.text
    return reply.json()["results"]


async def test_what_is_pushed_and_rated_is_learned_from_as_if_it_had_been_served_here(
    gateway: Gateway,
) -> None:
    before = time.time()
    results = await push(gateway, pushed("a", age=60.0, duration=0.5, temperature=0.8, label="mine"))
    assert results == [{"id": "a", "index": 0, "status": "recorded", "reason": ""}]
    (one,) = gateway.interactions("a")
    assert (one.policy, one.version, one.arm, one.user) == ("tab", 0, intake.PUSHED, "u1")
    assert (one.prompt, one.completion, one.label) == (PROMPT, ANSWER, "mine")
    assert one.completion_ids == (*CODEC.encode(ANSWER), EOS)
    assert one.offsets[-2:] == (len(ANSWER), len(ANSWER))
    assert before - 61 < one.at < time.time() - 59
    assert one.finished_at - one.at == pytest.approx(0.5)
    assert (await tell(gateway, {"id": "a", "event": "accepted"}))[0]["status"] == "matched"
    with gateway.database.write() as c:
        (sample,) = claim(c, now=time.time())
    assert (sample.id, sample.verdict, sample.temperature) == ("a", Verdict.ACCEPTED, 0.8)
    assert sample.behavior_logprobs == (-0.5,) * len(one.completion_ids)
    assert all(sample.loss_mask)


async def test_the_offsets_are_those_that_the_gateway_itself_records(gateway: Gateway) -> None:
    """The same tokens served here and pushed there make the same record."""
    gateway.engine.script = lambda prompt_ids, version: CODEC.encode("räume = [‘x’]\n")
    served = (await gateway.complete(PROMPT)).json()
    (here,) = gateway.interactions(served["id"])
    await push(
        gateway,
        pushed(
            "there",
            prompt_ids=list(here.prompt_ids),
            completion_ids=list(here.completion_ids),
            behavior_logprobs=list(here.behavior_logprobs),
        ),
    )
    (there,) = gateway.interactions("there")
    assert (there.prompt, there.completion, there.offsets) == (here.prompt, here.completion, here.offsets)
    assert there.behavior_logprobs == here.behavior_logprobs


async def test_the_same_again_changes_nothing_and_another_one_may_not_take_its_name(gateway: Gateway) -> None:
    await push(gateway, pushed("a"))
    again, other, index = await push(
        gateway, pushed("a"), pushed("a", version=1), pushed("a", index=1, version=1)
    )
    assert again["status"] == "duplicate"
    assert (other["status"], other["reason"]) == ("refused", "another interaction has this id and index")
    assert index["status"] == "recorded"
    with gateway.database.read() as c:
        assert interactions.counts(c, policy="tab").opportunities == 2
    twice = await push(gateway, pushed("b"), pushed("b"))
    assert [one["status"] for one in twice] == ["recorded", "duplicate"]


INCOMPLETE: dict[str, tuple[dict[str, Any], str]] = {
    "text": ({"completion_ids": ..., "behavior_logprobs": ..., "completion": "x"}, "no token ids"),
    "prompt": ({"prompt_ids": ..., "prompt": PROMPT}, "no token ids"),
    "none": ({"behavior_logprobs": ...}, "no log-probabilities"),
    "null": (
        {"behavior_logprobs": [None] * (len(CODEC.encode(ANSWER)) + 1)},
        "no log-probabilities",
    ),
    "other": ({"completion": "something else"}, "text and token ids do not agree"),
    "failed": ({"finish": "error"}, "the engine failed"),
    "long": ({"prompt_ids": [40] * 100_000}, "longer than the model's context"),
}
BAD: list[tuple[dict[str, Any], str]] = [
    ({"id": ...}, "id: Field required"),
    ({"id": ""}, "at least 1 character"),
    ({"version": ...}, "version: Field required"),
    ({"version": 7}, "no version 7"),
    ({"version": "0"}, "version:"),
    ({"behavior_logprobs": [-0.5]}, "1 of them for"),
    ({"behavior_logprobs": [0.5] * (len(CODEC.encode(ANSWER)) + 1)}, "less than or equal"),
    ({"completion_ids": [10**6], "behavior_logprobs": [-1.0]}, "outside of the vocabulary"),
    ({"completion_ids": [-1], "behavior_logprobs": [-1.0]}, "greater than or equal to 0"),
    ({"prompt_ids": ...}, "prompt: give"),
    ({"completion_ids": ..., "behavior_logprobs": ...}, "completion: give"),
    ({"temperature": 3.0}, "temperature"),
    ({"finish": "tired"}, "finish"),
    ({"age": -1.0}, "age"),
    ({"reward": 1.0}, "reward: Extra inputs"),
]


async def test_what_is_too_incomplete_to_learn_from_is_kept_and_says_why(gateway: Gateway) -> None:
    items = [pushed(name, **changes) for name, (changes, _) in INCOMPLETE.items()]
    wanted = [(name, reason) for name, (_, reason) in INCOMPLETE.items()]
    for status in ("recorded", "duplicate"):
        results = await push(gateway, *items)
        assert [(one["id"], one["reason"]) for one in results] == wanted
        assert {one["status"] for one in results} == {status}
    for name, reason in wanted:
        assert gateway.interactions(name)[0].untrainable == reason
    await tell(gateway, *({"id": name, "event": "accepted"} for name, _ in wanted))
    with gateway.database.write() as c:
        assert claim(c, now=time.time()) == []
        assert interactions.counts(c, policy="tab").accepted == len(wanted)


async def test_a_bad_item_is_refused_with_its_reason_and_the_good_ones_are_kept(gateway: Gateway) -> None:
    bad = [pushed(**{"id": "bad", **changes}) for changes, _ in BAD]
    first, *refused, none, last = await push(gateway, pushed("a"), *bad, 3, pushed("z"))
    assert (first["status"], last["status"]) == ("recorded", "recorded")
    for result, (_, reason) in zip(refused, BAD, strict=True):
        assert result["status"] == "refused"
        assert reason in result["reason"]
    assert none == {"id": None, "index": 0, "status": "refused", "reason": "it must be a JSON object"}
    with gateway.database.read() as c:
        assert interactions.counts(c, policy="tab").opportunities == 2


async def test_a_batch_has_its_bounds(gateway: Gateway) -> None:
    for number in (0, intake.ITEMS + 1):
        body = {"interactions": [pushed(str(one)) for one in range(number)]}
        reply = await gateway.client.post(f"{BASE}/interactions", json=body, headers=KEY)
        assert reply.status_code == 400
        assert reply.json()["error"]["param"] == "interactions"
        reply = await gateway.client.post("/v1/feedback", json=[{"id": "a", "event": "shown"}] * number)
        assert reply.status_code == 400
    big = b'{"interactions": [' + b" " * gateway.settings.server.body_limit + b"]}"
    headers = {**KEY, "content-type": "application/json"}
    reply = await gateway.client.post(f"{BASE}/interactions", content=big, headers=headers)
    assert reply.status_code == 413
    with gateway.database.read() as c:
        assert interactions.counts(c, policy="tab").opportunities == 0


async def test_a_full_batch_is_taken_and_waits_for_nobody_long(gateway: Gateway) -> None:
    items = [
        pushed(f"a{number}", completion_ids=[400] * 200, behavior_logprobs=[-1.0] * 200)
        for number in range(256)
    ]
    started = time.monotonic()
    results = await push(gateway, *items)
    assert time.monotonic() - started < 10
    assert {one["status"] for one in results} == {"recorded"}


async def test_an_empty_answer_is_silence(gateway: Gateway) -> None:
    await push(gateway, pushed("a", completion_ids=[EOS], behavior_logprobs=[-0.9]))
    (one,) = gateway.interactions("a")
    assert one.silent
    assert one.verdict is Verdict.SILENT
    assert one.finish is FinishReason.STOP


async def test_feedback_may_come_before_what_it_is_about(gateway: Gateway) -> None:
    (early,) = await tell(gateway, {"id": "a", "event": "rejected"})
    assert early == {"id": "a", "index": 0, "status": "unmatched", "reason": ""}
    await push(gateway, pushed("a"))
    assert gateway.interactions("a")[0].verdict is Verdict.REJECTED


async def test_feedback_in_a_list_keeps_its_order_and_refuses_bad_items_alone(gateway: Gateway) -> None:
    await push(gateway, pushed("a"), pushed("b"))
    results = await tell(
        gateway,
        {"id": "a", "event": "shown"},
        {"id": "a", "event": "rejected", "user": "u1"},
        {"id": "a", "event": "accepted"},
        {"id": "b", "event": "liked"},
        "b",
        {"id": "b", "index": 1, "event": "accepted"},
    )
    assert [(one["id"], one["index"], one["status"]) for one in results] == [
        ("a", 0, "matched"),
        ("a", 0, "matched"),
        ("a", 0, "matched"),
        ("b", 0, feedback.REFUSED),
        (None, 0, feedback.REFUSED),
        ("b", 1, "unmatched"),
    ]
    assert "event" in results[3]["reason"]
    assert gateway.interactions("a")[0].verdict is Verdict.ACCEPTED
    rows = [(row["event"], row["status"]) for row in gateway.feedback_rows()]
    assert rows == [
        ("shown", "matched"),
        ("rejected", "superseded"),
        ("accepted", "matched"),
        ("accepted", "unmatched"),
    ]


async def test_a_single_piece_of_feedback_is_answered_as_ever(gateway: Gateway) -> None:
    await push(gateway, pushed("a"))
    reply = await gateway.client.post("/v1/feedback", json={"id": "a", "event": "accepted"})
    assert reply.json() == {"status": "matched"}
    for body in ("3", '"a"', "null"):
        headers = {"content-type": "application/json"}
        reply = await gateway.client.post("/v1/feedback", content=body, headers=headers)
        assert reply.status_code == 400


async def test_what_was_acknowledged_is_on_disk(gateway: Gateway) -> None:
    """Seen by a connection that has nothing to do with the writer, the moment the answer is here."""
    body = orjson.dumps({"interactions": [pushed("a")]})
    headers = {**KEY, "content-type": "application/json"}
    await gateway.client.post(f"{BASE}/interactions", content=body, headers=headers)
    with gateway.database.read() as c:
        assert interactions.get(c, "a") is not None
