"""The bytes on the wire are those of PROTOCOLS.md, and the totals are what the server saw."""

from __future__ import annotations

import asyncio
import doctest
import json
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from onlinerl.datasets import simulate
from onlinerl.datasets.fim import FimPrompt, collect
from onlinerl.datasets.simulate import play, run
from onlinerl.datasets.users import TASTES, Act, Habits, Reaction, Taste, User
from onlinerl.datasets.wires import Client, Continue, Display, Fork, Native, Wire, WireForm, wire
from onlinerl.errors import RequestError, SettingsError
from onlinerl.store import interactions
from tests import gateways

PROMPT = FimPrompt("def é(x):\n    ", "\n", "return x", "pkg/a.py", "python")
USER = User("dev-1", TASTES["line"])
CALM = Habits(cancel=0, timeout=0, late=0, unrated=0, cache=0, reading=0.5, pause=0.01)
AT = datetime(2020, 1, 2, 3, 4, 5, 678900, tzinfo=UTC)


def shown(text: str = "return x") -> Display:
    return Display(USER, PROMPT, text, "cmpl-7", "id-1", "id-2", 0.1234, AT)


# ------------------------------------------------------------------------------------------- bytes


def test_native_bytes() -> None:
    call = Native(Client(temperature=1.0)).request(PROMPT, USER)
    assert call.path == "/v1/completions"
    assert call.body == (
        b'{"model":"tab","prompt":"def \xc3\xa9(x):\\n    ","suffix":"\\n","max_tokens":24,'
        b'"temperature":1.0,"stream":true,"user":"dev-1"}'
    )
    calls = Native().reports(shown(), Reaction(Act.LATE_ACCEPT, 2.0))
    assert [(json.loads(call.body)["event"], call.after) for call in calls] == [
        ("shown", 0.0),
        ("ignored", 10.0),
        ("accepted", 12.0),
    ]
    assert calls[2].path == "/v1/feedback"
    assert calls[2].body == (
        b'{"id":"cmpl-7","index":0,"event":"accepted","displayed_text":"return x","user":"dev-1"}'
    )


def test_continue_request_bytes() -> None:
    call = Continue(Client("Qwen2.5-Coder-1.5B", 4096, 0.01, key="K")).request(PROMPT, USER)
    assert call.path == "/v1/completions"
    assert dict(call.headers) == {
        "Content-Type": "application/json",
        "Authorization": "Bearer K",
        "api-key": "K",
        "X-User-ID": "dev-1",
    }
    assert call.body == (
        b'{"model":"Qwen2.5-Coder-1.5B","max_tokens":4096,"temperature":0.01,"stream":true,"stop":['
        b'"<|endoftext|>","<|fim_prefix|>","<|fim_middle|>","<|fim_suffix|>","<|fim_pad|>","<|repo_name|>",'
        b'"<|file_sep|>","<|im_start|>","<|im_end|>","/src/","#- coding: utf-8","```"],'
        b'"prompt":"<|fim_prefix|>def \xc3\xa9(x):\\n    <|fim_suffix|>\\n<|fim_middle|>"}'
    )
    assert len(json.loads(call.body)["stop"]) == 12


def test_continue_feedback_bytes() -> None:
    (call,) = Continue(Client("Qwen2.5-Coder-1.5B", key="K", project="demo")).reports(
        shown(), Reaction(Act.REJECT, 1.0)
    )
    assert call.path == "/api/training/submit"
    assert call.after == 10.0  # it has no dismissal: its clock runs out
    assert dict(call.headers) == {
        "Content-Type": "application/json",
        "Authorization": "Bearer K",
        "X-Project-ID": "demo",
    }
    machine = json.loads(call.body)["data"]["uniqueId"]
    assert call.body.decode() == (
        '{"name":"autocomplete","data":{"timestamp":"2020-01-02T03:04:15.678Z","userId":"",'
        '"userAgent":"Visual Studio Code/1.104.0 (Continue/2.0.0)","selectedProfileId":"local",'
        '"eventName":"autocomplete","schema":"0.2.0","accepted":false,"time":123,'
        '"prefix":"def é(x):\\n    ","suffix":"\\n",'
        '"prompt":"<|fim_prefix|>def é(x):\\n    <|fim_suffix|>\\n<|fim_middle|>",'
        '"completion":"return x","modelProvider":"openai","modelName":"Qwen2.5-Coder-1.5B",'
        '"cacheHit":false,"filepath":"file:///project/pkg/a.py","completionId":"id-1",'
        f'"uniqueId":"{machine}","disable":false,"useCache":true,"onlyMyCode":true,'
        '"useRecentlyEdited":true,"debounceDelay":60,"maxPromptTokens":1024},'
        '"schema":"0.2.0","level":"all","profileId":"local"}'
    )


def test_fork_bytes() -> None:
    request = Fork(Client("Qwen2.5-Coder-1.5B")).request(PROMPT, USER)
    assert request.body == Continue(Client("Qwen2.5-Coder-1.5B")).request(PROMPT, USER).body
    assert "X-User-ID" not in request.headers
    (call,) = Fork(Client("Qwen2.5-Coder-1.5B", key="K", project="demo")).reports(
        shown("a\nb"), Reaction(Act.ACCEPT, 1.0)
    )
    assert call.path == "/api/training/submit"
    assert dict(call.headers) == {
        "Content-Type": "application/json",
        "Authorization": "Bearer test-token",
        "X-Project-ID": "demo",
    }
    machine = json.loads(call.body)["uniqueId"]
    assert call.body.decode() == (
        '{"completionId":"id-1","filepath":"file:///project/pkg/a.py","prefix":"def é(x):\\n    ",'
        '"suffix":"\\n","prompt":"<|fim_prefix|>def é(x):\\n    <|fim_suffix|>\\n<|fim_middle|>",'
        '"completion":"a\\nb","modelProvider":"openai","modelName":"Qwen2.5-Coder-1.5B","accepted":true,'
        f'"timestamp":"2020-01-02T03:04:06.678Z","time":123,"uniqueId":"{machine}","numLines":2,'
        '"cacheHit":false}'
    )


@pytest.mark.parametrize("form", [Continue(), Fork()])
def test_late_accept_keeps_the_completion_id(form: Continue | Fork) -> None:
    calls = form.reports(shown(), Reaction(Act.LATE_ACCEPT, 2.0))
    bodies = [json.loads(call.body) for call in calls]
    data = [body.get("data", body) for body in bodies]
    assert [entry["accepted"] for entry in data] == [False, True]
    assert {entry["completionId"] for entry in data} == {"id-1"}
    assert [call.after for call in calls] == [10.0, 12.0]


@pytest.mark.parametrize("form", [Continue(), Fork()])
def test_typing_through_reports_a_prompt_that_was_never_sent(form: Continue | Fork) -> None:
    (call,) = form.reports(shown(), Reaction(Act.ACCEPT, 1.0, cached=True, typed=3))
    body = json.loads(call.body)
    data = body.get("data", body)
    assert data["cacheHit"] is True
    assert data["completionId"] == "id-2"
    assert data["prefix"] == PROMPT.prefix + "ret"
    assert data["completion"] == "urn x"
    assert data["prompt"].startswith("<|fim_prefix|>def é(x):\n    ret<|fim_suffix|>")
    assert data["prefix"] + data["completion"] == PROMPT.prefix + "return x"


def test_what_continue_shows() -> None:
    assert Continue().display("  x") == " x"
    assert Continue().display(" x ") == "x "
    assert Continue().display("\n ") == ""
    assert Native().display(" x") == " x"


def test_nobody_reports_an_unrated_or_empty_display() -> None:
    assert Continue().reports(shown(), Reaction(Act.UNRATED, 1.0)) == ()
    assert Fork().reports(shown(), Reaction(Act.NOTHING, 0.0)) == ()
    assert Native().reports(shown(), Reaction(Act.NOTHING, 0.0)) == ()
    (only,) = Native().reports(shown(), Reaction(Act.UNRATED, 1.0))
    assert json.loads(only.body)["event"] == "shown"


def test_tabby_is_a_clear_not_yet() -> None:
    with pytest.raises(RequestError, match="not spoken yet"):
        wire(WireForm.TABBY, Client())
    with pytest.raises(RequestError, match="not spoken yet"):
        run("http://127.0.0.1:1", protocol="tabby")


# ------------------------------------------------------------------------------------------ playing


@dataclass
class Server:
    """Speaks the contract, remembers everything."""

    url: str = ""
    answers: tuple[str, ...] = ("return x",)
    delay: float = 0.0
    """Seconds between two events."""
    pieces: int = 1
    """Events that an answer is cut into."""
    status: int = 200
    requests: list[dict[str, Any]] = field(default_factory=list)
    events: list[dict[str, Any]] = field(default_factory=list)
    closed: int = 0

    async def complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        number = len(self.requests)
        self.requests.append(body)
        if self.status != 200:
            return web.json_response({"error": {"message": "no"}}, status=self.status)
        response = web.StreamResponse(
            headers={"Content-Type": "text/event-stream", "x-onlinerl-version": "3"}
        )
        await response.prepare(request)
        text = self.answers[number % len(self.answers)]
        size = max(1, -(-len(text) // self.pieces))
        try:
            for start in range(0, max(len(text), 1), size):
                chunk = {
                    "id": f"cmpl-{number}",
                    "choices": [{"index": 0, "text": text[start : start + size]}],
                }
                await response.write(b"data: " + json.dumps(chunk).encode() + b"\n\n")
                await asyncio.sleep(self.delay)
            await response.write(b"data: [DONE]\n\n")
        except (ConnectionError, asyncio.CancelledError):
            self.closed += 1
            raise
        return response

    async def feedback(self, request: web.Request) -> web.Response:
        self.events.append(await request.json())
        return web.json_response({"status": "matched"})

    async def submit(self, request: web.Request) -> web.Response:
        self.events.append(await request.json())
        return web.json_response(
            {"status": "submitted", "message": "", "queue_position": 1, "feedback": "matched"}
        )


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    state = Server()
    app = web.Application()
    app.router.add_post("/v1/completions", state.complete)
    app.router.add_post("/v1/feedback", state.feedback)
    app.router.add_post("/api/training/submit", state.submit)
    runner = web.AppRunner(app, handler_cancellation=True)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    host, port = runner.addresses[0][:2]
    state.url = f"http://{host}:{port}"
    yield state
    await runner.cleanup()


async def test_native_loop_counts_what_the_server_saw(server: Server) -> None:
    server.answers = ("return self", "x", "")
    watched: list[simulate.Outcome] = []
    report = await play(
        Native(),
        server.url,
        server.url,
        simulate.developers(3, Taste("", shortest=8), CALM),
        [PROMPT],
        requests=30,
        speed=50,
        watch=watched.append,
    )
    events = Counter(event["event"] for event in server.events)
    assert report.requests == len(server.requests) == len(watched) == 30
    assert (report.shown, report.silent, report.accepted, report.rejected) == (20, 10, 10, 10)
    assert events == {"shown": 20, "accepted": 10, "rejected": 10}
    assert report.feedback == {"matched": 40}
    assert report.errors == 0
    assert {outcome.version for outcome in report.outcomes} == {3}
    assert 0 < report.first_p50 <= report.first_p95 < 5
    assert 0 < report.latency_p50 <= report.latency_p95 < 5
    assert {body["user"] for body in server.requests} == {"dev-1", "dev-2", "dev-3"}
    json.dumps(report.as_json())
    assert report.table().row_count == len(report.as_json())


async def test_same_seed_same_acts(server: Server) -> None:
    async def acts(seed: int) -> list[tuple[str, Act | None]]:
        users = simulate.developers(2, Taste("", noise=0.5), Habits(cancel=0.1, pause=0.01, reading=0.5))
        report = await play(
            Native(), server.url, server.url, users, [PROMPT], requests=40, seed=seed, speed=100
        )
        return sorted((outcome.user, outcome.act) for outcome in report.outcomes if outcome.act)

    assert await acts(5) == await acts(5)
    assert await acts(5) != await acts(6)


@pytest.mark.parametrize("form", [Continue(), Fork()])
async def test_continue_cuts_a_slow_stream(server: Server, form: Continue | Fork) -> None:
    server.answers, server.pieces, server.delay = ("abcdefghijklmnopqrstuvwxyzabcd",), 30, 0.03
    report = await play(
        form,
        server.url,
        server.url,
        simulate.developers(1, Taste(""), CALM),
        [PROMPT],
        requests=1,
        speed=100,
    )
    assert report.cut == 1
    # 10 events take 0.3 s, 20 take 0.6 s: the second look closes the socket.
    data = server.events[0].get("data", server.events[0])
    assert data["completion"] == "abcdefghijklmnopqrst"
    for _ in range(100):
        if server.closed:
            break
        await asyncio.sleep(0.02)
    assert server.closed == 1


async def test_continue_does_not_cut_a_fast_one_and_strips_the_space(server: Server) -> None:
    server.answers, server.pieces = (" return self.something(1)",), 25
    report = await play(
        Continue(),
        server.url,
        server.url,
        simulate.developers(1, Taste(""), CALM),
        [PROMPT],
        requests=1,
        speed=100,
    )
    assert report.cut == 0
    assert server.events[0]["data"]["completion"] == "return self.something(1)"
    assert report.feedback == {"matched": 1}


async def test_refusals_arrive_when_the_clients_clock_runs_out(server: Server) -> None:
    loop = asyncio.get_running_loop()
    start = loop.time()
    report = await play(
        Continue(),
        server.url,
        server.url,
        simulate.developers(1, Taste("", shortest=99), CALM),
        [PROMPT],
        requests=1,
        speed=20,
    )
    assert 0.5 <= loop.time() - start < 3
    assert server.events[0]["data"]["accepted"] is False
    assert report.accepted == 0


async def test_cancelling_closes_the_socket(server: Server) -> None:
    server.pieces, server.delay = 8, 1.0
    report = await play(
        Native(),
        server.url,
        server.url,
        simulate.developers(2, Taste(""), Habits(cancel=1.0, pause=0.01)),
        [PROMPT],
        requests=4,
        speed=100,
    )
    assert (report.cancelled, report.shown, report.errors) == (4, 0, 0)
    for _ in range(500):  # the server notices when it next writes
        if server.closed == 4:
            break
        await asyncio.sleep(0.02)
    assert server.closed == 4
    assert server.events == []


async def test_errors_are_counted_by_kind(server: Server) -> None:
    server.status = 503
    report = await play(
        Native(),
        server.url,
        server.url,
        simulate.developers(2, Taste(""), CALM),
        [PROMPT],
        requests=4,
        speed=100,
    )
    assert report.error_kinds == {"HTTP 503": 4}
    assert (report.errors, report.shown) == (4, 0)
    assert all(outcome.failed for outcome in report.outcomes)


async def test_stop_ends_the_day(server: Server) -> None:
    stop = asyncio.Event()

    def watch(outcome: simulate.Outcome) -> None:
        stop.set()

    report = await play(
        Native(),
        server.url,
        server.url,
        simulate.developers(2, Taste(""), CALM),
        [PROMPT],
        requests=10_000,
        speed=100,
        stop=stop,
        watch=watch,
    )
    assert report.requests <= 4


def test_a_server_that_is_not_there_and_wrong_arguments(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("value = compute(1)\n")
    with pytest.raises(SettingsError, match=r"nothing answers at http://127\.0\.0\.1:9"):
        run("http://127.0.0.1:9", requests=1, code=tmp_path, progress=False)
    with pytest.raises(SettingsError, match="not a URL"):
        run("http:///x", requests=1, code=tmp_path, progress=False)
    with pytest.raises(SettingsError, match="unknown taste"):
        run("http://127.0.0.1:9", taste="sour")
    with pytest.raises(SettingsError, match="at least 1"):
        run("http://127.0.0.1:9", users=0)
    with pytest.raises(SettingsError, match="above 0"):
        run("http://127.0.0.1:9", speed=0)


def test_percentiles() -> None:
    values = [4.0, 1.0, 3.0, 2.0]
    assert simulate.percentile(values, 0.5) == 2.5
    assert simulate.percentile(values, 0.95) == pytest.approx(3.85)
    assert simulate.percentile([], 0.5) == 0
    assert simulate.percentile([7.0], 0.95) == 7


# --------------------------------------------------------------------------- against the real gateway

LINES = ("return self.name", "return x + 1", "value = other.value", "print(x)")


def line_by_prompt(prompt_ids: Sequence[int], version: int) -> Sequence[int]:
    """A script for the double engine: each prompt has its answer."""
    return gateways.ids_of(LINES[sum(prompt_ids) % len(LINES)])


@pytest.mark.parametrize("form", [Native(), Continue(), Fork()])
async def test_the_real_gateway_joins_everything(tmp_path: Path, form: Wire) -> None:
    prompts = collect(limit=80, characters=320).prompts
    habits = Habits(cancel=0, timeout=0.3, late=0.3, unrated=0.1, cache=0.4, reading=0.6, pause=0.05)
    async with gateways.running(tmp_path) as gateway:
        gateway.engine.script = line_by_prompt
        report = await play(
            form,
            gateway.url,
            gateway.url,
            simulate.developers(4, Taste("", no_repetition=True, noise=0.4), habits),
            prompts,
            requests=80,
            speed=100,
        )
        with gateway.database.read() as c:
            counts = interactions.counts(c, policy="tab")
    assert report.errors == 0, report.error_kinds
    assert report.requests == report.shown == counts.shown == 80
    assert report.accepted == counts.accepted > 20
    assert report.cached > 10
    assert report.late > 3
    assert "unmatched" not in report.feedback
    if form == Native():
        # a second look is reported again; the late accept of an ignored answer replaces it
        assert set(report.feedback) == {"matched", "duplicate"}
        assert (report.rejected, report.timeouts) == (counts.rejected, counts.timeout)
    else:
        assert set(report.feedback) == {"matched"}
        assert report.rejected + report.timeouts == counts.timeout


async def test_the_gateway_joins_a_stripped_answer_that_was_typed_through(tmp_path: Path) -> None:
    async with gateways.running(tmp_path) as gateway:
        gateway.engine.script = lambda prompt_ids, version: gateways.ids_of(" return x + 1")
        form = Continue()
        request = form.request(PROMPT, USER)
        answer = await gateway.client.post(
            request.path,
            content=request.body.replace(b'"stream":true', b'"stream":false'),
            headers=dict(request.headers),
        )
        text = form.display(answer.json()["choices"][0]["text"])
        assert text == "return x + 1"
        (report,) = form.reports(shown(text), Reaction(Act.ACCEPT, 1.0, cached=True, typed=3))
        reply = await gateway.client.post(report.path, content=report.body, headers=dict(report.headers))
        assert reply.json()["feedback"] == "matched"


def test_examples_in_the_docstrings() -> None:
    result = doctest.testmod(simulate)
    assert result.attempted
    assert not result.failed
