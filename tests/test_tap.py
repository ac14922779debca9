"""The tap: what LiteLLM and vLLM tell becomes interactions, and their host never notices."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import socket
import subprocess
import sys
import threading
import time
import types
from collections.abc import AsyncIterator
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, cast

import pytest

from onlinerl import tap as module
from onlinerl.client import Client
from onlinerl.interface import Pushed
from onlinerl.tap import Tap, interactions, litellm_callback
from tests import vllm_double
from tests.controllers import ANSWER, PROMPT, controlled, pushed
from tests.gateways import ADMIN_KEY, Gateway, until
from tests.vllm_double import IDS, LOGPROBS, PROMPT_IDS

ROOT = Path(__file__).parents[1]


@pytest.fixture
async def gateway(tmp_path: Path) -> AsyncIterator[Gateway]:
    async with controlled(tmp_path) as one:
        yield one


def item(id: str, **changes: Any) -> Pushed:
    return cast(Pushed, pushed(id, **changes))


def test_what_vllm_answers_is_pushed_with_its_tokens() -> None:
    cases: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({"model": "tab@7", "messages": [{"role": "user", "content": "hi"}]}, vllm_double.chat("tab@7")),
        ({"model": "tab@7", "prompt": PROMPT}, vllm_double.text("tab@7")),
    ]
    for request, answer in cases:
        asked = {**request, "temperature": 0.8, "user": "ann"}
        (one,) = interactions(asked, answer, version=None, seconds=0.5)
        assert (one["id"], one["version"], one["user"]) == (answer["id"], 7, "ann")
        assert (one["prompt_ids"], one["completion_ids"]) == (PROMPT_IDS, IDS)
        assert one["behavior_logprobs"] == LOGPROBS
        assert (one["completion"], one["temperature"], one["top_p"]) == (ANSWER, 0.8, 1.0)
        assert (one["finish"], one["age"], one["duration"]) == ("stop", 0.5, 0.5)
        assert one.get("prompt") == request.get("prompt")


def test_litellms_rendering_of_it_is_understood_too() -> None:
    """As LiteLLM 1.104 hands a chat completion to its callbacks: the tokens are in a field of their own."""
    answer = vllm_double.chat("tab@7")
    (choice,) = answer["choices"]
    choice["provider_specific_fields"] = {"token_ids": choice.pop("token_ids"), "stop_reason": None}
    (one,) = interactions({}, answer, version=None, seconds=0.0)
    assert (one["completion_ids"], one["behavior_logprobs"]) == (IDS, LOGPROBS)


def test_the_version_is_the_answers_own_or_the_one_that_was_given_or_nothing_is_pushed() -> None:
    answer = vllm_double.chat("qwen")
    assert interactions({}, answer, version=None, seconds=0.0) == []
    assert interactions({}, answer, version=3, seconds=0.0)[0]["version"] == 3
    answer["system_fingerprint"] = "tab@5"
    assert interactions({}, answer, version=3, seconds=0.0)[0]["version"] == 5


def test_an_answer_without_tokens_is_pushed_as_text() -> None:
    answer = vllm_double.chat("tab@0")
    for name in ("token_ids", "logprobs"):
        answer["choices"][0][name] = None
    del answer["prompt_token_ids"]
    asked = {"messages": [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]}
    (one,) = interactions(asked, answer, version=None, seconds=0.0)
    assert one["prompt"] == "system: be brief\nuser: hi"
    assert "completion_ids" not in one


async def test_what_is_put_arrives_and_its_age_counts_on(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    tap = Tap(gateway.url, ADMIN_KEY, "tab")
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now - 30.0)
    tap._thread = threading.Thread()  # none of its own yet
    tap.put(item("a", age=2.0))
    monkeypatch.undo()
    tap._thread = None
    for number in range(300):
        tap.put(item(f"b{number}"))
    tap.put(item("bad", version=9))
    await until(lambda: tap.pushed + tap.dropped == 302)
    assert (tap.pushed, tap.dropped) == (301, 1)
    (one,) = gateway.interactions("a")
    assert 31 < time.time() - one.at < 60
    assert (one.completion, one.untrainable) == (ANSWER, "")
    await asyncio.to_thread(tap.close)


async def test_a_batch_beyond_the_servers_limit_is_cut_in_halves(tmp_path: Path) -> None:
    async with controlled(tmp_path, "body_limit=3000") as gateway:
        tap = Tap(gateway.url, ADMIN_KEY, "tab")
        for number in range(40):
            tap.put(item(f"a{number}"))
        tap.put(item("big", prompt_ids=[40] * 2000))
        await until(lambda: tap.pushed + tap.dropped == 41)
        assert (tap.pushed, tap.dropped) == (40, 1)
        await asyncio.to_thread(tap.close)


async def test_a_server_that_is_not_there_costs_the_host_nothing(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "FIRST_DELAY", 0.01)
    monkeypatch.setattr(module, "LONGEST_DELAY", 0.05)
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))  # does not listen
        tap = Tap(f"http://127.0.0.1:{silent.getsockname()[1]}", ADMIN_KEY, "tab", capacity=100)
        started = time.monotonic()
        for number in range(1000):
            tap.put(item(f"a{number}"))
        assert time.monotonic() - started < 1
        assert tap.dropped >= 1000 - 100 - module.BATCH
        await asyncio.to_thread(tap.close)
        assert (tap.pushed, tap.dropped) == (0, 1000)


async def test_what_waited_for_the_server_is_pushed_when_it_is_back(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "FIRST_DELAY", 0.01)
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        tap = Tap(f"http://127.0.0.1:{silent.getsockname()[1]}", ADMIN_KEY, "tab")
        sent = 0

        def push(client: Any, *arguments: Any) -> Any:
            nonlocal sent
            sent += 1
            if sent == 3:
                client._http.base_url = gateway.url
            return original(client, *arguments)

        original = Client.push
        monkeypatch.setattr(Client, "push", push)
        tap.put(item("a"))
        await until(lambda: tap.pushed == 1)
        assert sent == 3
        await asyncio.to_thread(tap.close)
    assert gateway.interactions("a")


# ------------------------------------------------------------------------------------------ LiteLLM


class Answered:
    """What LiteLLM hands over: something with `model_dump`."""

    def __init__(self, body: dict[str, Any]) -> None:
        self._body = body

    def model_dump(self) -> dict[str, Any]:
        return self._body


async def test_the_callback_feeds_the_tap_and_swallows_what_it_cannot_understand(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Over a stand-in for LiteLLM's base class; the test below has LiteLLM itself."""
    custom_logger: Any = types.ModuleType("litellm.integrations.custom_logger")
    custom_logger.CustomLogger = type("CustomLogger", (), {})
    for name in ("litellm", "litellm.integrations"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, custom_logger.__name__, custom_logger)
    tap = Tap(gateway.url, ADMIN_KEY, "tab")
    callback = litellm_callback(tap)
    assert isinstance(callback, custom_logger.CustomLogger)
    start = datetime(2025, 1, 1)
    end = start + timedelta(seconds=0.3)
    kwargs = {
        "model": "tab@0",
        "messages": [{"role": "user", "content": PROMPT}],
        "optional_params": {"temperature": 0.7},
        "call_type": "atext_completion",
        "user": "ann",
    }
    body = vllm_double.text("tab@0")
    await callback.async_log_success_event(kwargs, Answered(body), start, end)
    with caplog.at_level(logging.ERROR):
        await callback.async_log_success_event(kwargs, None, start, end)
        callback.log_success_event({}, Answered({"choices": [{}]}), start, end)
    await until(lambda: tap.pushed == 1)
    assert tap.dropped == 2
    assert "could not be understood" in caplog.text
    (one,) = gateway.interactions(body["id"])
    assert (one.prompt, one.user, one.temperature, one.untrainable) == (PROMPT, "ann", 0.7, "")
    assert one.behavior_logprobs == pytest.approx(LOGPROBS)
    assert one.finished_at - one.at == pytest.approx(0.3)
    await asyncio.to_thread(tap.close)


def test_neither_the_client_nor_the_tap_loads_anything_heavy() -> None:
    script = (
        "import sys, onlinerl.client, onlinerl.tap\n"
        "ours = {m for m in sys.modules if m.startswith('onlinerl.')}\n"
        "heavy = {'torch', 'numpy', 'pydantic', 'sqlalchemy', 'fastapi', 'litellm', 'tokenizers'}\n"
        "print(sorted(ours), sorted(heavy & sys.modules.keys()))"
    )
    line = [sys.executable, "-c", script]
    done = subprocess.run(
        line, capture_output=True, text=True, env={"PYTHONPATH": str(ROOT / "src")}, check=True
    )
    assert done.stdout.strip() == "['onlinerl.client', 'onlinerl.interface', 'onlinerl.tap'] []"


LITELLM = os.environ.get("LITELLM_PYTHON", "")


@pytest.mark.skipif(not LITELLM, reason="LITELLM_PYTHON names no interpreter that has LiteLLM")
async def test_litellm_itself(gateway: Gateway) -> None:
    with vllm_double.serving() as engine:
        process = await asyncio.create_subprocess_exec(
            *(LITELLM, str(ROOT / "tests/litellm_host.py"), engine, gateway.url, ADMIN_KEY),
            env={"PYTHONPATH": str(ROOT / "src"), "PATH": os.environ["PATH"]},
            stdout=asyncio.subprocess.PIPE,
        )
        output, _ = await process.communicate()
    told = json.loads(output.splitlines()[-1])
    assert (told["pushed"], told["dropped"]) == (4, 0)
    for kind, user in (("chat", "ann"), ("text", "ben"), ("sync", "")):
        (one,) = gateway.interactions(told[kind])
        assert (one.completion_ids, one.prompt_ids, one.untrainable) == (tuple(IDS), tuple(PROMPT_IDS), ""), (
            kind
        )
        assert one.behavior_logprobs == pytest.approx(LOGPROBS)
        assert (one.user, one.completion) == (user, ANSWER)
    (streamed,) = gateway.interactions(told["stream"])
    # LiteLLM forgets the tokens of what it streams: it is counted, and not learned from.
    assert (streamed.completion, streamed.untrainable) == (ANSWER, "no token ids")
