"""Bad input over HTTP: a 4xx with a reason in OpenAI's shape, nothing recorded, the server still up."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from onlinerl.gateway.completions import CompletionRequest
from onlinerl.gateway.feedback import ContinueEvent, NativeFeedback
from onlinerl.store import versions
from tests.gateways import ADMIN_KEY, Gateway, ids_of, running

POSTS = ("/v1/completions", "/v1/feedback", "/api/training/submit")
JSON = {"content-type": "application/json"}


@pytest.fixture
async def gateway(tmp_path: Path) -> AsyncIterator[Gateway]:
    async with running(tmp_path, versions_=(0, 1)) as one:
        yield one
        assert one.feedback_rows() == []
        assert one.last() is None
        assert (await one.client.get("/health")).status_code == 200


def refused(reply: httpx.Response, status: int = 400) -> str:
    """The reason; the status and the shape must be right."""
    assert reply.status_code == status, reply.text
    error = reply.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"].endswith("_error")
    assert "Traceback" not in reply.text
    return str(error["message"])


MALFORMED: list[bytes] = [
    b"",
    b"{",
    b"nonsense",
    b'{"prompt": "x", }',
    b'{"prompt": "\xff\xfe"}',
    b'{"prompt": "\\ud800"}',
    b'{"id": NaN}',
    b"[]",
    b"[1, 2]",
    b'"text"',
    b"null",
    b"7",
    b"[" * 100_000,
    b'{"a":' * 3000 + b"1" + b"}" * 3000,
    b'{"id": "x", "event": "accepted", "accepted": true, "prompt": "x", "a": '
    + b"[" * 600
    + b"]" * 600
    + b"}",
]


@pytest.mark.parametrize("path", POSTS)
async def test_malformed_bodies(gateway: Gateway, path: str) -> None:
    for body in MALFORMED:
        if (path, body) == ("/v1/feedback", b"[1, 2]"):
            continue  # a list of verdicts, each refused by itself: `test_intake`
        refused(await gateway.client.post(path, content=body, headers=JSON))


@pytest.mark.parametrize("path", POSTS)
async def test_bodies_that_a_web_page_can_send_without_asking(gateway: Gateway, path: str) -> None:
    body = b'{"prompt": "x", "id": "x", "event": "accepted", "accepted": true}'
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", ""):
        refused(await gateway.client.post(path, content=body, headers={"content-type": kind}), 415)
    reply = await gateway.client.post(path, content=body, headers={**JSON, "content-encoding": "gzip"})
    refused(reply, 415)


@pytest.mark.parametrize("path", POSTS)
async def test_twenty_megabytes(gateway: Gateway, path: str) -> None:
    big = b'{"prompt": "' + b"x" * 20_000_000 + b'"}'
    assert "4000000" in refused(await gateway.client.post(path, content=big, headers=JSON), 413)

    async def chunks() -> AsyncIterator[bytes]:
        for start in range(0, len(big), 65536):
            yield big[start : start + 65536]

    refused(await gateway.client.post(path, content=chunks(), headers=JSON), 413)


FIELDS: list[tuple[dict[str, Any], str]] = [
    ({"prompt": None}, "prompt must be given"),
    ({"prompt": ""}, "empty"),
    ({"prompt": []}, "empty"),
    ({"prompt": [""]}, "empty"),
    ({"prompt": [[]]}, "empty"),
    ({"prompt": ["x", 1]}, "prompt must be"),
    ({"prompt": [1, "x"]}, "prompt must be"),
    ({"prompt": [[1], ["x"]]}, "prompt must be"),
    ({"prompt": [True, False]}, "prompt must be"),
    ({"prompt": [1.5]}, "prompt must be"),
    ({"prompt": 5}, "prompt must be"),
    ({"prompt": {"text": "x"}}, "prompt must be"),
    ({"prompt": [-1]}, "outside of the vocabulary"),
    ({"prompt": [8192]}, "outside of the vocabulary"),
    ({"prompt": [10**30]}, "prompt must be"),
    ({"prompt": ["x"] * 129}, "129 prompts"),
    ({"prompt": ["x"] * 64, "n": 3}, "192 answers"),
    ({"prompt": [1, 2], "suffix": "y"}, "suffix"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": -5}, "max_tokens"),
    ({"max_tokens": 1.5}, "max_tokens"),
    ({"max_tokens": "16"}, "max_tokens"),
    ({"max_tokens": True}, "max_tokens"),
    ({"temperature": -0.1}, "temperature"),
    ({"temperature": 2.1}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_p": 1.1}, "top_p"),
    ({"n": 0}, "n:"),
    ({"n": 129}, "n:"),
    ({"n": 2.5}, "n:"),
    ({"seed": "x"}, "seed"),
    ({"seed": 2**63}, "seed"),
    ({"logprobs": 6}, "logprobs"),
    ({"logprobs": -1}, "logprobs"),
    ({"logprobs": True}, "logprobs"),
    ({"stream": "yes"}, "stream"),
    ({"stream": 1}, "stream"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": True, "stream_options": {"include_usage": "yes"}}, "include_usage"),
    ({"stream": True, "stream_options": {"speed": 2}}, "speed"),
    ({"stop": [""]}, "stop"),
    ({"stop": ""}, "stop"),
    ({"stop": 5}, "stop"),
    ({"stop": [5]}, "stop"),
    ({"stop": ["x"] * 17}, "stop"),
    ({"stop": "x" * 300}, "stop"),
    ({"echo": True}, "echo"),
    ({"best_of": 2}, "best_of"),
    ({"frequency_penalty": 0.1}, "frequency_penalty"),
    ({"presence_penalty": -1}, "presence_penalty"),
    ({"logit_bias": {"5": 1}}, "logit_bias"),
    ({"top_k": 40}, "top_k"),
    ({"min_tokens": 4}, "min_tokens"),
    ({"guided_json": {}, "typo": 1}, "guided_json, typo"),
    ({"user": 5}, "user"),
    ({"user": "x" * 300}, "user"),
    ({"suffix": 5}, "suffix"),
    ({"model": 5}, "model"),
]


async def test_completion_fields(gateway: Gateway) -> None:
    for fields, reason in FIELDS:
        # the standard library writes integers of any size
        content = json.dumps({"prompt": "x", **fields}).encode()
        streamed = [] if any("stream" in name for name in fields) else [b'{"stream":true,' + content[1:]]
        for sent in (content, *streamed):
            message = refused(await gateway.client.post("/v1/completions", content=sent, headers=JSON))
            assert reason in message, fields
    assert gateway.engine.requests == []


async def test_a_prompt_beyond_the_context_tells_both_lengths(gateway: Gateway) -> None:
    text = "x = 1\n" * 2000
    for prompt in (text, ["ok", text], ids_of(text), [ids_of(text)]):
        message = refused(await gateway.complete(prompt))
        assert str(len(ids_of(text))) in message
        assert "2048" in message
    assert "2048" in refused(await gateway.complete([5] * 2048))
    assert "2048" in refused(await gateway.complete("x" * 3_900_000))
    assert gateway.engine.requests == []


async def test_unknown_versions_and_paths(gateway: Gateway) -> None:
    refused(await gateway.complete(model="tab@5"), 404)
    refused(await gateway.client.get("/v1/models/tab@5"), 404)
    refused(await gateway.client.get("/nothing"), 404)
    refused(await gateway.client.get("/v1/completions"), 405)
    refused(await gateway.client.get("/../../etc/passwd"), 404)


NATIVE: list[dict[str, Any]] = [
    {},
    {"event": "accepted"},
    {"id": "x"},
    {"id": "", "event": "accepted"},
    {"id": 5, "event": "accepted"},
    {"id": "x" * 200, "event": "accepted"},
    {"id": "x", "event": "loved"},
    {"id": "x", "event": 1},
    {"id": "x", "event": "accepted", "index": -1},
    {"id": "x", "event": "accepted", "index": "0"},
    {"id": "x", "event": "accepted", "index": 2**40},
    {"id": "x", "event": "accepted", "score": "good"},
    {"id": "x", "event": "accepted", "retained_characters": -1},
    {"id": "x", "event": "accepted", "displayed_text": 5},
    {"id": "x", "event": "accepted", "user": ["u"]},
]


async def test_native_feedback(gateway: Gateway) -> None:
    for body in NATIVE:
        refused(await gateway.client.post("/v1/feedback", json=body))


CONTINUE: list[dict[str, Any]] = [
    {},
    {"completionId": "x"},
    {"accepted": "yes"},
    {"accepted": 1},
    {"accepted": True, "prefix": 5},
    {"accepted": True, "completionId": "x" * 300},
    {"name": "autocomplete", "data": []},
    {"name": "autocomplete", "data": "x"},
    {"name": 5, "data": {"accepted": True}},
    {"name": "autocomplete", "data": {"accepted": "no"}},
    {"name": "chatInteraction", "data": {"prompt": "x"}},
]


async def test_continue_feedback(gateway: Gateway) -> None:
    for body in CONTINUE:
        refused(await gateway.client.post("/api/training/submit", json=body))


async def test_foreign_hosts_and_origins(gateway: Gateway) -> None:
    body = {"id": "x", "event": "accepted"}
    for host in ("evil.example", "127.0.0.1.evil.example", "10.0.0.7", "localhost.evil.example:80", "[", ""):
        reply = await gateway.client.post("/v1/feedback", json=body, headers={"host": host})
        assert reply.status_code in (400, 403), host
    own = gateway.url.removeprefix("http://")
    for origin in (
        "http://evil.example",
        "null",
        "https://localhost",
        "http://127.0.0.1:1",
        "file://",
        "http://[",
        "http://[x]/",
    ):
        reply = await gateway.client.post("/v1/feedback", json=body, headers={"origin": origin})
        refused(reply, 403)
        assert (await gateway.client.get("/v1/models", headers={"origin": origin})).status_code == 403
    port = own.rpartition(":")[2]
    for host in (own, f"localhost:{port}", f"LOCALHOST:{port}", f"[::1]:{port}"):
        headers = {"host": host, "origin": f"http://{host}"}
        assert (await gateway.client.get("/v1/models", headers=headers)).status_code == 200


async def test_admin_needs_its_key(gateway: Gateway) -> None:
    calls = [
        ("GET", "/admin/v1/policies/tab/versions"),
        ("POST", "/admin/v1/policies/tab/versions/1/promote"),
        ("POST", "/admin/v1/policies/tab/rollback"),
        ("GET", "/admin/v1/replicas"),
    ]
    for method, path in calls:
        refused(await gateway.client.request(method, path), 401)
        wrong = {"authorization": "Bearer wrong"}
        refused(await gateway.client.request(method, path, headers=wrong), 403)
        latin = {"x-admin-key": b"caf\xe9"}
        refused(await gateway.client.request(method, path, headers=latin), 403)  # type: ignore[arg-type]
    key = {"authorization": f"Bearer {ADMIN_KEY}"}
    base = "/admin/v1/policies/tab"
    refused(await gateway.client.get("/admin/v1/policies/none/versions", headers=key), 404)
    refused(await gateway.client.post(f"{base}/versions/9/promote", headers=key), 404)
    refused(await gateway.client.post(f"{base}/versions/x/promote", headers=key), 400)
    refused(await gateway.client.post(f"{base}/rollback", headers=key), 409)
    for body in ({"to": "x"}, {"to": -1}, {"to": True}, {"where": 1}):
        refused(await gateway.client.post(f"{base}/rollback", headers=key, json=body), 400)
    with gateway.database.read() as c:
        assert versions.live(c, "tab").id == 0


async def test_slow_half_requests_do_not_stop_others(gateway: Gateway) -> None:
    host, port = gateway.url.removeprefix("http://").split(":")
    half = []
    for _ in range(20):
        connection = socket.create_connection((host, int(port)))
        connection.sendall(
            b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
            b'content-length: 100\r\n\r\n{"prom'
        )
        half.append(connection)
    await asyncio.sleep(0.1)
    assert (await gateway.client.get("/health")).status_code == 200
    for connection in half:
        connection.close()
    await asyncio.sleep(0.1)


_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=10),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=4),
    max_leaves=8,
)
_names = st.sampled_from(
    sorted(
        {
            *CompletionRequest.model_fields,
            *NativeFeedback.model_fields,
            *ContinueEvent.model_fields,
            "data",
            "name",
        }
    )
)


async def test_anything_at_all_gets_an_answer_below_500(tmp_path: Path) -> None:
    async with running(tmp_path) as gateway:
        loop = asyncio.get_running_loop()

        @settings(max_examples=120, deadline=None, suppress_health_check=list(HealthCheck))
        @given(path=st.sampled_from(POSTS), body=st.dictionaries(_names, _json, max_size=6))
        def check(path: str, body: dict[str, Any]) -> None:
            content = json.dumps(body).encode()
            sending = gateway.client.post(path, content=content, headers=JSON)
            reply = asyncio.run_coroutine_threadsafe(sending, loop).result(20)
            assert reply.status_code < 500, (path, body, reply.text)

        await asyncio.to_thread(check)
        assert (await gateway.complete()).status_code == 200
