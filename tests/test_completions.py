"""POST /v1/completions over HTTP: every field of the contract, what is recorded, what breaks."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from onlinerl.gateway.answers import Stops
from onlinerl.records import FinishReason
from tests.doubles import scripted, scripted_logprob
from tests.gateways import CODEC, Gateway, ids_of, running, says, until

EOS = CODEC.eos_ids[0]


@pytest.fixture
async def gateway(tmp_path: Path) -> AsyncIterator[Gateway]:
    async with running(tmp_path, versions_=(0, 1, 2)) as one:
        yield one


def events(response: httpx.Response) -> list[dict[str, Any]]:
    """The data of all server-sent events; the last must be [DONE]."""
    assert response.headers["content-type"].startswith("text/event-stream")
    parts = [part for part in response.text.split("\n\n") if part]
    assert parts[-1] == "data: [DONE]"
    return [json.loads(part.removeprefix("data: ")) for part in parts[:-1]]


async def test_a_text_prompt_is_answered_and_recorded_as_served(gateway: Gateway) -> None:
    prompt = "def f(x):\n    return"
    reply = await gateway.complete(prompt, headers={"x-user-id": "u7", "x-project-id": "demo"})
    assert reply.status_code == 200
    body = reply.json()
    ids = scripted(ids_of(prompt), 0)
    assert body["choices"] == [
        {"text": CODEC.tokenizer.decode(list(ids)), "index": 0, "logprobs": None, "finish_reason": "stop"}
    ]
    assert body["object"] == "text_completion"
    assert body["model"] == "tab"
    assert body["system_fingerprint"] == "tab@0"
    assert body["usage"] == {
        "prompt_tokens": len(ids_of(prompt)),
        "completion_tokens": 7,
        "total_tokens": len(ids_of(prompt)) + 7,
    }
    assert (reply.headers["x-onlinerl-version"], reply.headers["x-onlinerl-arm"]) == ("0", "live")
    (one,) = gateway.interactions(body["id"])
    assert one.completion_ids == (*ids, EOS)
    assert one.prompt == prompt
    assert one.prompt_ids == tuple(ids_of(prompt))
    assert one.completion == body["choices"][0]["text"]
    assert one.offsets[-1] == one.offsets[-2] == len(one.completion)
    expected = [scripted_logprob(id, place) for place, id in enumerate((*ids, EOS))]
    assert one.behavior_logprobs == pytest.approx(expected, abs=1e-6)
    assert (one.user, one.label, one.project, one.arm) == ("u7", "demo", "default", "live")
    assert (one.version, one.version_end, one.finish) == (0, 0, FinishReason.STOP)
    assert one.untrainable == ""
    assert 0 < one.at <= one.finished_at


async def test_the_four_forms_of_prompts(gateway: Gateway) -> None:
    texts = ["def one():", "class Two:"]
    tokens = [ids_of(text) for text in texts]
    single = (await gateway.complete(texts[0])).json()["choices"][0]["text"]
    by_ids = await gateway.complete(tokens[0])
    assert by_ids.json()["choices"][0]["text"] == single
    (one,) = gateway.interactions(by_ids.json()["id"])
    assert one.prompt == texts[0]
    many = (await gateway.complete(texts, n=2)).json()
    assert [choice["index"] for choice in many["choices"]] == [0, 1, 2, 3]
    assert many["choices"][0]["text"] == many["choices"][1]["text"] == single
    listed = (await gateway.complete(tokens)).json()
    assert [choice["text"] for choice in listed["choices"]] == [
        many["choices"][0]["text"],
        many["choices"][2]["text"],
    ]
    rows = gateway.interactions(many["id"], 4)
    assert [row.prompt for row in rows] == [texts[0], texts[0], texts[1], texts[1]]
    assert many["usage"]["prompt_tokens"] == len(tokens[0]) + len(tokens[1])


async def test_sampling_settings_reach_the_engine(gateway: Gateway) -> None:
    await gateway.complete("x = ", temperature=0.7, top_p=0.9, seed=2**63 - 1, n=2, max_tokens=5)
    first, second = gateway.engine.requests[-2:]
    assert (first.temperature, first.top_p, first.max_tokens) == (0.7, 0.9, 5)
    assert {first.seed, second.seed} == {2**63 - 1, 0}
    await gateway.complete("x = ", temperature=None, top_p=None, seed=None, max_tokens=None)
    request = gateway.engine.requests[-1]
    assert (request.temperature, request.top_p, request.max_tokens, request.seed) == (1.0, 1.0, 128, None)
    await gateway.complete("x = ", max_tokens=4096)
    assert gateway.engine.requests[-1].max_tokens == 2048 - len(ids_of("x = "))


async def test_explored_requests_sample_at_temperature_one_and_say_so(tmp_path: Path) -> None:
    cold = {"temperature": 0.01, "top_p": 0.5}  # as Continue sends by default
    overrides = ("policies.tab.exploration.users=[ann]", "policies.tab.exploration.share=1")
    async with running(tmp_path, *overrides) as gateway:

        async def served(user: str, **fields: object) -> tuple[str, float, float, float]:
            """(arm, temperature, top-p, propensity) as recorded; the engine and the header agree."""
            reply = await gateway.complete("x = ", user=user, **fields)
            (one,) = gateway.interactions(reply.json()["id"])
            request = gateway.engine.requests[-1]
            assert (request.temperature, request.top_p) == (one.temperature, one.top_p)
            assert reply.headers["x-onlinerl-arm"] == one.arm
            assert one.untrainable == ""
            return one.arm, one.temperature, one.top_p, one.propensity

        assert await served("ann", **cold) == ("explore", 1.0, 1.0, 1.0)
        assert await served("ann") == ("explore", 1.0, 1.0, 1.0)
        assert await served("bob", **cold) == ("live", 0.01, 0.5, 1.0), "did not opt in"
        # what asks to be repeatable is served as asked
        assert await served("ann", seed=7, **cold) == ("live", 0.01, 0.5, 1.0)
        assert await served("ann", temperature=0) == ("live", 0.0, 1.0, 1.0)
        assert await served("ann", model="tab@0", **cold) == ("pinned", 0.01, 0.5, 1.0)
        streamed = await gateway.complete("x = ", user="ann", stream=True, n=2, **cold)
        assert streamed.headers["x-onlinerl-arm"] == "explore"
        rows = gateway.interactions(events(streamed)[0]["id"], 2)
        assert [(row.arm, row.temperature) for row in rows] == [("explore", 1.0)] * 2


async def test_a_share_explores_and_both_arms_record_their_propensity(tmp_path: Path) -> None:
    overrides = ("policies.tab.exploration.users=all", "policies.tab.exploration.share=0.25")
    async with running(tmp_path, *overrides) as gateway:
        arms: dict[str, set[tuple[str, float, float]]] = {}
        for user in [f"u{number}" for number in range(30)] * 2:
            reply = await gateway.complete("x = ", user=user, temperature=0.2)
            (one,) = gateway.interactions(reply.json()["id"])
            arms.setdefault(user, set()).add((one.arm, one.temperature, one.propensity))
    assert all(len(seen) == 1 for seen in arms.values()), "a user stays in an arm"
    assert set.union(*arms.values()) == {("explore", 1.0, 0.25), ("live", 0.2, 0.75)}


async def test_streaming_sends_one_event_a_token(gateway: Gateway) -> None:
    gateway.engine.script = says("return", " x", " +", " 1")
    reply = await gateway.complete(stream=True, stream_options={"include_usage": True})
    all_ = events(reply)
    texts = [event["choices"][0]["text"] for event in all_[:-2]]
    assert texts == ["return", " x", " +", " 1"] or len(texts) == len(ids_of("return x + 1"))
    assert len(texts) >= 3
    assert "".join(texts) == "return x + 1"
    assert all(event["choices"][0]["finish_reason"] is None for event in all_[:-2])
    assert all(event["usage"] is None for event in all_[:-1])
    assert all_[-2]["choices"][0] == {"index": 0, "text": "", "logprobs": None, "finish_reason": "stop"}
    assert all_[-1]["choices"] == []
    assert all_[-1]["usage"]["completion_tokens"] == len(texts) + 1
    assert {event["id"] for event in all_} == {all_[0]["id"]}
    assert {event["system_fingerprint"] for event in all_} == {"tab@0"}
    assert reply.headers["x-onlinerl-version"] == "0"
    (one,) = gateway.interactions(all_[0]["id"])
    assert one.completion == "return x + 1"


async def test_tokens_arrive_while_the_rest_is_sampled(gateway: Gateway) -> None:
    gateway.engine.gap = 0.05
    body = {"model": "tab", "prompt": "x", "stream": True}
    seen: list[str] = []
    async with gateway.client.stream("POST", "/v1/completions", json=body) as reply:
        async for line in reply.aiter_lines():
            if line.startswith("data: {"):
                seen.append(line)
                if len(seen) == 1:
                    assert gateway.engine.running == 1
                    assert not gateway.engine.finished
    assert len(seen) >= 5


async def test_streaming_several_choices(gateway: Gateway) -> None:
    reply = await gateway.complete(["def one():", "class Two:"], n=2, stream=True)
    all_ = events(reply)
    whole = (await gateway.complete(["def one():", "class Two:"], n=2)).json()["choices"]
    for choice in whole:
        mine = [event["choices"][0] for event in all_ if event["choices"][0]["index"] == choice["index"]]
        assert "".join(one["text"] for one in mine) == choice["text"]
        assert [one["finish_reason"] for one in mine][-1] == "stop"
    assert len(gateway.interactions(all_[0]["id"], 4)) == 4


async def test_the_interaction_is_on_disk_before_the_end_is_told(gateway: Gateway) -> None:
    body = {"model": "tab", "prompt": "x", "stream": True}
    async with gateway.client.stream("POST", "/v1/completions", json=body) as reply:
        async for line in reply.aiter_lines():
            if '"finish_reason":"stop"' in line:
                assert gateway.interactions(json.loads(line.removeprefix("data: "))["id"])
                return
    pytest.fail("no finish event")


@pytest.mark.parametrize("stream", [False, True])
async def test_stop_strings_cut_the_text_and_end_the_stream(gateway: Gateway, stream: bool) -> None:
    gateway.engine.script = says("value = compute(data)\n\n", "def other():\n    pass\n")
    reply = await gateway.complete(stop=["\n\ndef", "never"], stream=stream)
    if stream:
        all_ = events(reply)
        text = "".join(event["choices"][0]["text"] for event in all_)
        id = all_[0]["id"]
    else:
        text, id = reply.json()["choices"][0]["text"], reply.json()["id"]
    assert text == "value = compute(data)"
    (one,) = gateway.interactions(id)
    assert one.completion == text
    assert one.finish is FinishReason.STOP
    sampled = CODEC.tokenizer.decode(list(one.completion_ids))
    assert sampled.startswith("value = compute(data)\n\ndef")
    assert "pass" not in sampled
    assert max(one.offsets) == len(text)
    assert gateway.engine.running == 0
    assert gateway.engine.aborted


async def test_sixteen_stop_strings_and_what_looks_like_the_beginning_of_one(gateway: Gateway) -> None:
    stops = [f"<stop {number}>" for number in range(16)]
    gateway.engine.script = says("a <stop", " 99> b <sto")
    reply = await gateway.complete(stop=stops, stream=True)
    assert "".join(event["choices"][0]["text"] for event in events(reply)) == "a <stop 99> b <sto"
    assert (await gateway.complete(stop=[*stops, "x"])).status_code == 400


async def test_a_special_token_as_stop_string_ends_by_its_id(gateway: Gateway) -> None:
    marker = CODEC.added["<|file_sep|>"]
    gateway.engine.script = lambda _p, _v: [*ids_of("x = 1"), marker, *ids_of("secret")]
    reply = await gateway.complete(stop=["<|file_sep|>", "\n"])
    assert marker in gateway.engine.requests[-1].stop_ids
    # the double goes on after a stop id, as an engine never would; the marker at least is never shown
    assert "<|file_sep|>" not in reply.json()["choices"][0]["text"]
    (one,) = gateway.interactions(reply.json()["id"])
    assert not one.multiline


async def test_length_and_silence(gateway: Gateway) -> None:
    reply = await gateway.complete(max_tokens=3)
    assert reply.json()["choices"][0]["finish_reason"] == "length"
    assert reply.json()["usage"]["completion_tokens"] == 3
    gateway.engine.script = lambda _p, _v: []
    for stream in (False, True):
        reply = await gateway.complete(stream=stream)
        id = events(reply)[0]["id"] if stream else reply.json()["id"]
        (one,) = gateway.interactions(id)
        assert one.silent
        assert one.completion_ids == (EOS,)


async def test_logprobs_in_the_legacy_shape(gateway: Gateway) -> None:
    gateway.engine.script = says("naïve €", " x\n\nend")
    whole = (await gateway.complete(logprobs=2, stop="\n\nend")).json()["choices"][0]
    shape = whole["logprobs"]
    assert whole["text"] == "naïve € x"
    count = len(shape["tokens"])
    assert count == len(shape["token_logprobs"]) == len(shape["top_logprobs"]) == len(shape["text_offset"])
    assert shape["text_offset"][0] == 0
    for place, token in enumerate(shape["tokens"]):
        if not token.startswith("bytes:"):
            begin = shape["text_offset"][place]
            assert whole["text"][begin : begin + len(token)] == token[: len(whole["text"]) - begin]
        assert shape["top_logprobs"][place][token] == shape["token_logprobs"][place]
    streamed = events(await gateway.complete(logprobs=2, stop="\n\nend", stream=True))
    parts = [event["choices"][0]["logprobs"] for event in streamed[:-1]]
    for name in shape:
        assert [item for part in parts for item in part[name]] == shape[name]
    only = (await gateway.complete(logprobs=0)).json()["choices"][0]["logprobs"]
    assert all(len(best) == 1 for best in only["top_logprobs"])


async def test_suffix_is_rendered_and_its_hash_kept(gateway: Gateway) -> None:
    reply = await gateway.complete("def f(", suffix="):\n    pass\n")
    (one,) = gateway.interactions(reply.json()["id"])
    assert one.prompt == "<|fim_prefix|>def f(<|fim_suffix|>):\n    pass\n<|fim_middle|>"
    assert one.prompt_ids[0] == CODEC.added["<|fim_prefix|>"]
    assert one.suffix_hash
    plain = (await gateway.complete("def f(")).json()
    assert gateway.interactions(plain["id"])[0].suffix_hash == ""


async def test_models_aliases_and_pins(gateway: Gateway) -> None:
    assert (await gateway.complete(model="any name of a client")).json()["model"] == "any name of a client"
    reply = await gateway.complete(model="tab@2")
    assert gateway.ensured == [2]
    assert reply.json()["system_fingerprint"] == "tab@2"
    assert (reply.headers["x-onlinerl-version"], reply.headers["x-onlinerl-arm"]) == ("2", "pinned")
    assert gateway.interactions(reply.json()["id"])[0].version == 2
    for missing in ("tab@9", "tab@x", "tab@", "tab@-1", "tab@99999999999999999999"):
        reply = await gateway.complete(model=missing)
        assert (reply.status_code, reply.json()["error"]["code"]) == (404, "model_not_found")
    gateway.live["tab"] = 2
    assert (await gateway.complete()).json()["system_fingerprint"] == "tab@2"
    listed = (await gateway.client.get("/v1/models")).json()
    assert [one["id"] for one in listed["data"]] == ["tab", "tab@0", "tab@2"]
    assert (await gateway.client.get("/v1/models/tab@1")).json()["id"] == "tab@1"
    assert (await gateway.client.get("/v1/models/nobody")).status_code == 404


async def test_several_policies_need_a_name(tmp_path: Path) -> None:
    async with running(tmp_path, "alias=qwen-coder", policies=("tab", "chat")) as gateway:
        assert (await gateway.complete(model="qwen-coder")).json()["system_fingerprint"] == "tab@0"
        assert (await gateway.complete(model="chat@0")).json()["system_fingerprint"] == "chat@0"
        unknown = await gateway.complete(model="gpt-4")
        assert unknown.status_code == 404
        assert "'tab'" in unknown.json()["error"]["message"]
        assert (await gateway.client.post("/v1/completions", json={"prompt": "x"})).status_code == 400


async def test_the_sticky_key(gateway: Gateway) -> None:
    async def user(headers: dict[str, str], **fields: object) -> str:
        reply = await gateway.complete("x", headers=headers, max_tokens=1, **fields)
        return gateway.interactions(reply.json()["id"])[0].user

    key = {"authorization": "Bearer sk-secret"}
    assert await user({**key, "x-user-id": "h"}, user="b") == "b"
    assert await user({**key, "x-user-id": "h"}) == "h"
    named = await user(key)
    assert named.startswith("key-")
    assert "secret" not in named
    assert await user({"api-key": "sk-secret"}) == named
    assert await user({}) == ""


async def test_an_engine_that_is_away_is_a_503_with_retry_after(gateway: Gateway) -> None:
    gateway.engine.down = True
    for stream in (False, True):
        reply = await gateway.complete(stream=stream)
        assert reply.status_code == 503
        assert int(reply.headers["retry-after"]) >= 1
        assert reply.json()["error"]["type"] == "server_error"
    assert gateway.last() is None
    ready = await gateway.client.get("/ready")
    assert ready.status_code == 503
    assert "tab" in ready.json()["reasons"]
    gateway.engine.down = False
    assert (await gateway.client.get("/ready")).json() == {"status": "ready", "live": {"tab": 0}}
    gateway.live["tab"] = None
    assert (await gateway.complete()).status_code == 503
    assert (await gateway.client.get("/ready")).status_code == 503


async def test_full_queues_are_a_429(gateway: Gateway) -> None:
    gateway.engine.full = 2.4
    for stream in (False, True):
        reply = await gateway.complete(stream=stream)
        assert (reply.status_code, reply.headers["retry-after"]) == (429, "2")
        assert reply.json()["error"]["type"] == "rate_limit_error"
    assert gateway.last() is None


async def test_an_engine_that_dies_in_mid_stream(gateway: Gateway) -> None:
    gateway.engine.die_after = 3
    reply = await gateway.complete(stream=True)
    parts = [part.removeprefix("data: ") for part in reply.text.split("\n\n") if part]
    assert reply.status_code == 200
    assert json.loads(parts[-1])["error"]["type"] == "server_error"
    assert "[DONE]" not in reply.text
    (one,) = gateway.interactions(json.loads(parts[0])["id"])
    assert one.finish is FinishReason.ERROR
    assert len(one.completion_ids) == 3
    whole = await gateway.complete("other")
    assert whole.status_code == 503
    last = gateway.last()
    assert last is not None
    assert (last.prompt, last.finish) == ("other", FinishReason.ERROR)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_frees_the_engine_and_leaves_a_record(
    gateway: Gateway, stream: bool
) -> None:
    gateway.engine.gap = 0.05
    gateway.engine.script = lambda _p, _v: ids_of(" again") * 1000

    async def ask() -> None:
        body = {"model": "tab", "prompt": "x", "stream": stream, "max_tokens": 1000, "n": 2}
        async with gateway.client.stream("POST", "/v1/completions", json=body) as reply:
            async for _ in reply.aiter_lines():
                await asyncio.sleep(0)

    asking = asyncio.create_task(ask())
    await until(lambda: gateway.engine.running == 2)
    await asyncio.sleep(0.2)
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    await until(lambda: not gateway.engine.running and gateway.last() is not None)
    last = gateway.last()
    assert last is not None
    for one in gateway.interactions(last.id, 2):
        assert one.finish is FinishReason.ABORT
        assert 1 <= len(one.completion_ids) < 100
        assert one.completion == CODEC.tokenizer.decode(list(one.completion_ids))
        assert len(one.offsets) == len(one.behavior_logprobs) == len(one.completion_ids)


@asynccontextmanager
async def asked(
    gateway: Gateway, body: dict[str, Any], *, version: str, headers: tuple[str, ...] = ()
) -> AsyncIterator[asyncio.StreamReader]:
    """The raw answer to POST /v1/completions by a client of that version of HTTP."""
    host, port = gateway.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    content = json.dumps({"prompt": "x", **body}).encode()
    head = [
        f"POST /v1/completions HTTP/{version}", f"host: {host}", "content-type: application/json",
        f"content-length: {len(content)}", *headers,
    ]  # fmt: skip
    try:
        writer.write("\r\n".join([*head, "", ""]).encode() + content)
        yield reader
    finally:
        writer.close()
        await writer.wait_closed()


def fields(head: bytes) -> dict[str, str]:
    """The headers of a raw answer, whose status must be 200."""
    first, *lines = head.decode().removesuffix("\r\n\r\n").split("\r\n")
    assert first == "HTTP/1.1 200 OK"
    return dict(line.split(": ", 1) for line in lines)


async def test_a_stream_in_http_1_0_ends_where_the_connection_does(gateway: Gateway) -> None:
    expected = [one["choices"][0]["text"] for one in events(await gateway.complete("x", stream=True))]
    async with asked(gateway, {"stream": True}, version="1.0") as reader:
        told = fields(await reader.readuntil(b"\r\n\r\n"))
        assert (told["connection"], told["content-type"]) == ("close", "text/event-stream; charset=utf-8")
        assert told.keys().isdisjoint({"transfer-encoding", "content-length"})
        body = await asyncio.wait_for(reader.read(), 10)
    parts = body.decode().split("\n\n")
    assert parts[-2:] == ["data: [DONE]", ""]
    shown = [json.loads(part.removeprefix("data: "))["choices"][0]["text"] for part in parts[:-2]]
    assert shown == expected


async def test_a_stream_in_http_1_0_comes_piece_by_piece(gateway: Gateway) -> None:
    gateway.engine.gap = 0.05
    gateway.engine.script = lambda _p, _v: ids_of(" again") * 1000
    async with asked(gateway, {"stream": True, "max_tokens": 1000}, version="1.0") as reader:
        for _ in range(3):
            await asyncio.wait_for(reader.readuntil(b"\n\n"), 10)
        assert gateway.engine.running == 1
    await until(lambda: gateway.engine.running == 0 and gateway.last() is not None)
    last = gateway.last()
    assert last is not None
    assert last.finish is FinishReason.ABORT


async def test_other_answers_in_http_1_0_tell_their_length(gateway: Gateway) -> None:
    for headers in ((), ("expect: 100-continue",), ("connection: keep-alive",)):
        async with asked(gateway, {}, version="1.0", headers=headers) as reader:
            told = fields(await reader.readuntil(b"\r\n\r\n"))
            assert "transfer-encoding" not in told
            body = await asyncio.wait_for(reader.read(), 10)
            assert len(body) == int(told["content-length"])
            assert json.loads(body)["object"] == "text_completion"


async def test_a_stream_in_http_1_1_is_chunked_and_the_connection_stays(gateway: Gateway) -> None:
    async with asked(gateway, {"stream": True}, version="1.1") as reader:
        told = fields(await reader.readuntil(b"\r\n\r\n"))
        assert told["transfer-encoding"] == "chunked"
        assert "connection" not in told
        assert (await asyncio.wait_for(reader.readuntil(b"\r\n0\r\n\r\n"), 10)).count(b"[DONE]") == 1


async def test_one_that_left_before_the_first_token_is_an_opportunity_too(gateway: Gateway) -> None:
    gateway.engine.gap = 0.5
    with pytest.raises(httpx.ReadTimeout):
        await gateway.client.post("/v1/completions", json={"prompt": "x"}, timeout=0.1)
    await until(lambda: gateway.last() is not None)
    last = gateway.last()
    assert last is not None
    assert (last.completion_ids, last.finish) == ((), FinishReason.ABORT)
    assert last.untrainable


async def test_no_logprobs_makes_it_untrainable(gateway: Gateway, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.doubles.scripted_logprob", lambda token, place: float("nan"))
    reply = await gateway.complete(logprobs=1)
    assert reply.status_code == 200
    assert "log-prob" in gateway.interactions(reply.json()["id"])[0].untrainable


async def test_the_served_ids_are_recorded_though_encoding_the_text_gives_others(gateway: Gateway) -> None:
    ids = [id for letter in "return x" for id in ids_of(letter)]
    gateway.engine.script = lambda _p, _v: ids
    reply = await gateway.complete()
    text = reply.json()["choices"][0]["text"]
    assert text == "return x"
    assert ids_of(text) != ids
    assert gateway.interactions(reply.json()["id"])[0].completion_ids == (*ids, EOS)


async def test_language_and_multiline(gateway: Gateway) -> None:
    prompt = "<|repo_name|>r\n<|file_sep|>a/b.ts\n<|fim_prefix|>x<|fim_suffix|>y<|fim_middle|>"
    reply = await gateway.complete(prompt, stop=["\n"])
    (one,) = gateway.interactions(reply.json()["id"])
    assert (one.language, one.multiline) == ("typescript", False)
    reply = await gateway.complete("x", stop=["\n\n"])
    (one,) = gateway.interactions(reply.json()["id"])
    assert (one.language, one.multiline) == ("", True)


async def test_many_at_once(gateway: Gateway) -> None:
    gateway.engine.gap = 0.002
    replies = await asyncio.gather(*(gateway.complete(f"x{n}", stream=n % 2 == 0) for n in range(64)))
    assert [reply.status_code for reply in replies] == [200] * 64
    assert gateway.engine.running == 0
    metrics = (await gateway.client.get("/metrics")).text
    assert 'onlinerl_open_answers{policy="tab"} 0.0' in metrics
    assert 'route="/v1/completions"' in metrics


def test_stops_never_show_a_part_of_a_stop_string_wherever_the_text_is_cut() -> None:
    text, stops = "ab abc abcd e", ("abcd", "bca")
    for size in range(1, len(text)):
        finder = Stops(stops)
        shown = ""
        for place in range(0, len(text), size):
            shown += finder.feed(text[place : place + size])
            if finder.found:
                break
        assert finder.found
        assert shown == "ab abc "


def test_the_first_complete_stop_string_wins() -> None:
    finder = Stops(("abc", "b"))
    assert finder.feed("xabc") == "xa"
