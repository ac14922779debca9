"""Feedback over HTTP, native and Continue's two shapes: joined, kept, and answered as the contract says."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from onlinerl.records import Interaction, Verdict
from onlinerl.text.templates import QWEN
from tests.gateways import Gateway, running, says, until

PREFIX, SUFFIX = "def area(r):\n    ", "\n"


@pytest.fixture
async def gateway(tmp_path: Path) -> AsyncIterator[Gateway]:
    async with running(tmp_path) as one:
        one.engine.script = says("return 3.14 * r * r")
        yield one


async def asked(gateway: Gateway, prefix: str = PREFIX, **fields: Any) -> str:
    reply = await gateway.complete(QWEN.render(prefix, SUFFIX), **fields)
    return str(reply.json()["id"])


def row(gateway: Gateway, id: str) -> Interaction:
    return gateway.interactions(id)[0]


async def native(gateway: Gateway, id: str, event: str, **fields: Any) -> str:
    reply = await gateway.client.post("/v1/feedback", json={"id": id, "event": event, **fields})
    assert reply.status_code == 200, reply.text
    assert set(reply.json()) == {"status"}
    return str(reply.json()["status"])


def event(prefix: str = PREFIX, completion: str = "return 3.14 * r * r", **fields: Any) -> dict[str, Any]:
    """Upstream Continue's autocomplete data, as 2.0.0 sends it."""
    return {
        "timestamp": "2026-01-01T00:00:00.000Z",
        "userId": "",
        "userAgent": "vscode/1",
        "selectedProfileId": "local",
        "eventName": "autocomplete",
        "schema": "0.2.0",
        "prefix": prefix,
        "suffix": SUFFIX,
        "prompt": QWEN.render(prefix, SUFFIX),
        "completion": completion,
        "modelProvider": "openai",
        "modelName": "Qwen2.5-Coder-1.5B",
        "filepath": "file:///a.py",
        "completionId": "c-1",
        "uniqueId": "m",
        "cacheHit": False,
        "disable": False,
        "time": 210,
        "debounceDelay": 60,
        **fields,
    }


async def upstream(gateway: Gateway, data: dict[str, Any], **envelope: Any) -> httpx.Response:
    body = {
        "name": "autocomplete",
        "data": data,
        "schema": "0.2.0",
        "level": "all",
        "profileId": "x",
        **envelope,
    }
    return await gateway.client.post(
        "/api/training/submit",
        json=body,
        headers={"authorization": "Bearer KEY", "x-project-id": "demo"},
    )


async def test_native_events_set_the_verdict(gateway: Gateway) -> None:
    id = await asked(gateway)
    assert await native(gateway, id, "shown") == "matched"
    assert row(gateway, id).shown_at
    assert await native(gateway, id, "ignored") == "matched"
    assert row(gateway, id).verdict is Verdict.TIMEOUT
    assert await native(gateway, id, "accepted", accepted_text="return 3.14", score=0.5) == "matched"
    assert row(gateway, id).verdict is Verdict.ACCEPTED
    assert row(gateway, id).score == 0.5
    assert await native(gateway, id, "accepted") == "duplicate"
    assert await native(gateway, id, "rejected") == "superseded"
    assert row(gateway, id).verdict is Verdict.ACCEPTED
    assert [one["status"] for one in gateway.feedback_rows()][-2:] == ["duplicate", "superseded"]


async def test_displayed_text_masks_the_tail(gateway: Gateway) -> None:
    id = await asked(gateway)
    assert await native(gateway, id, "accepted", displayed_text="return 3") == "matched"
    one = row(gateway, id)
    assert one.displayed == len("return 3")
    assert not all(one.loss_mask())
    assert one.loss_mask()[0]


async def test_choices_are_judged_one_by_one(gateway: Gateway) -> None:
    reply = await gateway.complete("x", n=3)
    id = reply.json()["id"]
    assert await native(gateway, id, "accepted", index=2) == "matched"
    assert [one.verdict for one in gateway.interactions(id, 3)] == [None, None, Verdict.ACCEPTED]
    assert await native(gateway, id, "accepted", index=3) == "unmatched"


async def test_an_unknown_id_is_kept_as_unmatched(gateway: Gateway) -> None:
    assert await native(gateway, "cmpl-unknown", "accepted", mood="good", at="yesterday") == "unmatched"
    (one,) = gateway.feedback_rows()
    assert (one["id"], one["status"]) == ("cmpl-unknown", "unmatched")
    assert '"mood"' in str(one["payload"])


@pytest.mark.parametrize("flat", [False, True])
async def test_continue_in_both_shapes(gateway: Gateway, flat: bool) -> None:
    id = await asked(gateway)
    if flat:
        data = {key: value for key, value in event(accepted=True).items() if key not in ("userId", "schema")}
        reply = await gateway.client.post(
            "/api/training/submit", json=data, headers={"authorization": "Bearer test-token"}
        )
    else:
        reply = await upstream(gateway, event(accepted=True))
    assert reply.status_code == 200
    body = reply.json()
    assert set(body) == {"status", "message", "queue_position", "feedback"}
    assert (body["status"], body["feedback"], body["queue_position"]) == ("submitted", "matched", 1)
    one = row(gateway, id)
    assert (one.verdict, one.verdict_source) == (Verdict.ACCEPTED, "fork" if flat else "continue")
    assert '"debounceDelay"' in str(gateway.feedback_rows()[0]["payload"])


async def test_false_is_a_timeout_and_a_late_accept_wins(gateway: Gateway) -> None:
    id = await asked(gateway)
    assert (await upstream(gateway, event(accepted=False))).json()["feedback"] == "matched"
    assert row(gateway, id).verdict is Verdict.TIMEOUT
    assert (await upstream(gateway, event(accepted=True))).json()["feedback"] == "matched"
    assert row(gateway, id).verdict is Verdict.ACCEPTED
    assert [one["status"] for one in gateway.feedback_rows()] == ["superseded", "matched"]


async def test_a_late_accept_finds_the_answer_that_its_timeout_was_about(gateway: Gateway) -> None:
    first, second = await asked(gateway), await asked(gateway)
    assert (await upstream(gateway, event(accepted=False, completionId="c-7"))).json()[
        "feedback"
    ] == "matched"
    timed = first if row(gateway, first).verdict else second
    other = second if timed == first else first
    assert (await upstream(gateway, event(accepted=True, completionId="c-7"))).json()["feedback"] == "matched"
    assert row(gateway, timed).verdict is Verdict.ACCEPTED
    assert row(gateway, other).verdict is None


async def test_a_cut_stream_and_a_stripped_space(gateway: Gateway) -> None:
    gateway.engine.script = says(" return 3.14 * r * r")
    id = await asked(gateway)
    assert (await upstream(gateway, event(completion="return 3.14", accepted=True))).json()[
        "feedback"
    ] == "matched"
    one = row(gateway, id)
    assert one.displayed == len(" return 3.14")
    assert not one.loss_mask()[-1]


async def test_cache_hits_and_typing_through_join_by_text(gateway: Gateway) -> None:
    id = await asked(gateway)
    typed = event(prefix=f"{PREFIX}return 3", completion=".14 * r", cacheHit=True, accepted=True)
    assert (await upstream(gateway, typed)).json()["feedback"] == "matched"
    assert row(gateway, id).displayed == len("return 3.14 * r")
    assert gateway.feedback_rows()[0]["cached"]


async def test_two_users_with_the_same_text_are_told_apart_or_left_alone(gateway: Gateway) -> None:
    ids = [await asked(gateway, headers={"x-user-id": user}) for user in ("ann", "ben")]
    body = {"name": "autocomplete", "data": event(accepted=True)}
    unnamed = await gateway.client.post("/api/training/submit", json=body)
    assert unnamed.json()["feedback"] == "unmatched"
    body["data"] = event(accepted=True, completionId="c-2")
    named = await gateway.client.post("/api/training/submit", json=body, headers={"x-user-id": "ben"})
    assert named.json()["feedback"] == "matched"
    assert [row(gateway, id).verdict for id in ids] == [None, Verdict.ACCEPTED]


async def test_no_code_and_missing_fields_are_kept(gateway: Gateway) -> None:
    await asked(gateway)
    data = event(accepted=True)
    for name in ("prefix", "suffix", "prompt", "completion"):
        del data[name]
    reply = await upstream(gateway, data, level="noCode")
    assert reply.json()["feedback"] == "unmatched"
    assert (await upstream(gateway, {"accepted": True})).json()["feedback"] == "unmatched"
    assert (await upstream(gateway, event(completion="something else", accepted=True))).status_code == 200
    assert len(gateway.feedback_rows()) == 3


async def test_a_verdict_on_an_empty_completion_is_recorded(gateway: Gateway) -> None:
    gateway.engine.script = lambda _p, _v: []
    id = await asked(gateway)
    assert row(gateway, id).verdict is Verdict.SILENT
    reply = await upstream(gateway, event(completion="", accepted=False))
    assert reply.status_code == 200
    assert len(gateway.feedback_rows()) == 1


async def test_other_events_with_a_verdict_are_kept_unmatched(gateway: Gateway) -> None:
    id = await asked(gateway)
    reply = await upstream(gateway, event(accepted=True), name="editOutcome")
    assert reply.json()["feedback"] == "unmatched"
    assert row(gateway, id).verdict is None
    silent = await upstream(gateway, {"tokens": 3}, name="tokensGenerated")
    assert silent.status_code == 400
    assert len(gateway.feedback_rows()) == 1


async def test_our_own_id_as_completion_id(gateway: Gateway) -> None:
    id = await asked(gateway)
    data = {"completionId": id, "accepted": True, "completion": "return 3"}
    reply = await gateway.client.post("/api/training/submit", json=data)
    assert reply.json()["feedback"] == "matched"
    assert row(gateway, id).displayed == len("return 3")


async def test_contradictions_at_once_end_in_the_strongest(gateway: Gateway) -> None:
    id = await asked(gateway)
    kinds = ["accepted", "rejected", "ignored", "shown"] * 8
    statuses = await asyncio.gather(*(native(gateway, id, kind) for kind in kinds))
    assert len(gateway.feedback_rows()) == len(statuses) == 32
    assert row(gateway, id).verdict is Verdict.ACCEPTED


async def test_outside_of_the_window_text_joins_nothing(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    id = await asked(gateway)
    at = row(gateway, id).at
    monkeypatch.setattr("onlinerl.gateway.feedback.time.time", lambda: at + 1801.0)
    assert (await upstream(gateway, event(accepted=True))).json()["feedback"] == "unmatched"
    assert await native(gateway, id, "accepted") == "matched"  # by id it still counts
    monkeypatch.setattr("onlinerl.gateway.feedback.time.time", lambda: at + 86_500.0)
    assert await native(gateway, id, "rejected") == "late"


async def test_metrics_count_what_became_of_it(gateway: Gateway) -> None:
    await native(gateway, "cmpl-nobody", "accepted")
    text = (await gateway.client.get("/metrics")).text
    assert 'onlinerl_feedback_total{event="accepted",source="native",status="unmatched"}' in text
    assert 'onlinerl_joins_total{by="none",source="native"}' in text


# ------------------------------------------------------- feedback that comes before its interaction


@contextlib.asynccontextmanager
async def streamed(
    gateway: Gateway,
    shown: str = "return 3",
    *,
    prefix: str = PREFIX,
    headers: Any = None,
    model: str = "tab",
) -> AsyncIterator[str]:
    """The id of an answer of which `shown` has arrived and the rest is not sampled; left, it is cut."""
    gateway.engine.hold = (3, asyncio.Event())
    body = {"model": model, "prompt": QWEN.render(prefix, SUFFIX), "stream": True}
    async with gateway.client.stream("POST", "/v1/completions", json=body, headers=headers) as reply:
        text = ""
        lines = reply.aiter_lines()  # as long as it lives the connection is open
        while text != shown:
            line = await anext(lines)
            if line.startswith("data: {"):
                event = json.loads(line.removeprefix("data: "))
                text += event["choices"][0]["text"]
        yield event["id"]


async def recorded(gateway: Gateway, id: str) -> Interaction:
    def there() -> bool:
        last = gateway.last()
        return last is not None and last.id == id

    await until(there)
    return row(gateway, id)


@pytest.mark.parametrize(
    ("prefix", "completion", "displayed"),
    [(PREFIX, "return 3", "return 3"), (PREFIX, "retu", "retu"), (f"{PREFIX}ret", "urn", "return")],
    ids=["whole", "part", "typed through"],
)
@pytest.mark.parametrize("flat", [False, True])
async def test_feedback_by_text_on_a_stream_joins_when_that_is_recorded(
    gateway: Gateway, prefix: str, completion: str, displayed: str, flat: bool
) -> None:
    data = event(prefix, completion, accepted=True)
    async with streamed(gateway) as id:
        reply = (
            await gateway.client.post("/api/training/submit", json=data)
            if flat
            else await upstream(gateway, data)
        )
        assert gateway.last() is None
        assert (reply.json()["feedback"], reply.json()["queue_position"]) == ("unmatched", 0)
        assert "under way" in reply.json()["message"]
    one = await recorded(gateway, id)
    assert (one.verdict, one.completion, one.displayed) == (Verdict.ACCEPTED, "return 3", len(displayed))
    assert [(kept["status"], kept["id"]) for kept in gateway.feedback_rows()] == [("matched", id)]
    again = await upstream(gateway, data)
    assert again.json()["feedback"] == "duplicate"
    metrics = (await gateway.client.get("/metrics")).text
    source = "fork" if flat else "continue"
    assert f'onlinerl_joins_total{{by="under_way",source="{source}"}}' in metrics


async def test_feedback_at_once_after_the_cut_is_joined(gateway: Gateway) -> None:
    for n in range(8):
        prefix = f"def area{n}(r):\n    "
        async with streamed(gateway, prefix=prefix) as id:
            pass
        await upstream(gateway, event(prefix, "return 3", accepted=True, completionId=f"c-{n}"))
        assert (await recorded(gateway, id)).verdict is Verdict.ACCEPTED
    assert [kept["status"] for kept in gateway.feedback_rows()] == ["matched"] * 8


async def test_an_answer_accepted_in_mid_stream_may_go_on(gateway: Gateway) -> None:
    async with streamed(gateway) as id:
        await upstream(gateway, event(completion="return 3", accepted=True))
        assert gateway.engine.hold
        gateway.engine.hold[1].set()
        one = await recorded(gateway, id)
    assert (one.completion, one.displayed) == ("return 3.14 * r * r", len("return 3"))
    assert one.verdict is Verdict.ACCEPTED
    assert not one.loss_mask()[-1]


async def test_a_timeout_and_an_accept_of_a_stream_end_in_the_accept(gateway: Gateway) -> None:
    async with streamed(gateway) as id:
        for accepted in (False, True):
            await upstream(gateway, event(completion="return 3", accepted=accepted))
    assert (await recorded(gateway, id)).verdict is Verdict.ACCEPTED
    assert [kept["status"] for kept in gateway.feedback_rows()] == ["superseded", "matched"]


@pytest.mark.parametrize("named", [True, False])
async def test_a_stream_is_not_taken_for_another_users_answer(gateway: Gateway, named: bool) -> None:
    """Both users were sent the same text; only one of them is in the store when the other one reports."""
    first = await asked(gateway, headers={"x-user-id": "ann"})
    headers = {"x-user-id": "ben"}
    async with streamed(gateway, headers=headers) as id:
        data = event(completion="return 3", accepted=True)
        body = {"name": "autocomplete", "data": data}
        await gateway.client.post("/api/training/submit", json=body, headers=headers if named else None)
    assert (await recorded(gateway, id)).verdict is (Verdict.ACCEPTED if named else None)
    assert row(gateway, first).verdict is None
    (kept,) = gateway.feedback_rows()
    assert (kept["status"], kept["id"]) == (("matched", id) if named else ("unmatched", None))


async def test_what_fits_no_text_that_was_sent_waits_for_nothing(gateway: Gateway) -> None:
    async with streamed(gateway) as id:
        for completion in ("return 3.14", "something else", ""):
            reply = await upstream(gateway, event(completion=completion, accepted=False))
            assert reply.json()["feedback"] == "unmatched"
            assert "under way" not in reply.json()["message"]
    assert (await recorded(gateway, id)).verdict is None
    assert [kept["id"] for kept in gateway.feedback_rows()] == [None] * 3


async def test_an_answer_asked_for_after_the_feedback_is_not_meant(gateway: Gateway) -> None:
    await upstream(gateway, event(accepted=True))
    assert row(gateway, await asked(gateway)).verdict is None
    assert [kept["status"] for kept in gateway.feedback_rows()] == ["unmatched"]


async def test_an_answer_of_which_nothing_was_sent_is_not_meant(gateway: Gateway) -> None:
    """Unlike a stream, a whole answer is seen by nobody before it is recorded."""
    first = await asked(gateway)
    gateway.engine.hold = (3, asyncio.Event())
    asking = asyncio.create_task(asked(gateway))
    await until(lambda: gateway.engine.running)
    assert (await upstream(gateway, event(completion="return 3", accepted=True))).json()[
        "feedback"
    ] == "matched"
    gateway.engine.hold[1].set()
    assert row(gateway, await asking).verdict is None
    assert row(gateway, first).verdict is Verdict.ACCEPTED


async def test_feedback_with_an_id_waits_by_the_rules_of_its_policy(tmp_path: Path) -> None:
    overrides = ("policies.chat.joins.deadline=50", "policies.tab.joins.deadline=60")
    async with running(tmp_path, *overrides, policies=("tab", "chat")) as gateway:
        gateway.engine.script = says("return 3.14 * r * r")
        async with streamed(gateway, model="chat") as id:
            assert await native(gateway, id, "accepted") == "unmatched"
            assert await native(gateway, id, "accepted", index=1) == "unmatched"
        assert (await recorded(gateway, id)).verdict is Verdict.ACCEPTED
        kept = gateway.feedback_rows()
        assert [(one["status"], one["deadline"]) for one in kept] == [("matched", 50.0), ("unmatched", 60.0)]
        metrics = (await gateway.client.get("/metrics")).text
    assert 'onlinerl_joins_total{by="under_way",source="native"}' in metrics
