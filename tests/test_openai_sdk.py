"""The real `openai` SDK, as applications use it, against a real server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import openai
import pytest

from tests.doubles import scripted
from tests.gateways import CODEC, Gateway, ids_of, running, says


@pytest.fixture
async def gateway(tmp_path: Path) -> AsyncIterator[Gateway]:
    async with running(tmp_path, versions_=(0, 1)) as one:
        yield one


@pytest.fixture
async def sdk(gateway: Gateway) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="sk-test", max_retries=0) as client:
        yield client


def answer(prompt: str, version: int = 0) -> str:
    decoder = CODEC.decoder(())
    return "".join(decoder.push(id) for id in scripted(ids_of(prompt), version))


async def test_completion(gateway: Gateway, sdk: openai.AsyncOpenAI) -> None:
    done = await sdk.completions.create(model="tab", prompt="def f():", user="u1", seed=3, logprobs=2)
    assert done.choices[0].text == answer("def f():")
    assert done.choices[0].finish_reason == "stop"
    assert done.system_fingerprint == "tab@0"
    assert done.usage is not None
    assert done.usage.total_tokens == done.usage.prompt_tokens + done.usage.completion_tokens
    logprobs = done.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens is not None
    assert len(logprobs.tokens) == 6
    assert gateway.interactions(done.id)[0].user == "u1"


async def test_streaming(gateway: Gateway, sdk: openai.AsyncOpenAI) -> None:
    text, ends, usage, chunks = "", [], None, 0
    stream = await sdk.completions.create(
        model="tab", prompt="def f():", stream=True, stream_options={"include_usage": True}
    )
    async for chunk in stream:
        chunks += 1
        usage = chunk.usage or usage
        for choice in chunk.choices:
            text += choice.text
            ends += [choice.finish_reason] if choice.finish_reason else []
    assert text == answer("def f():")
    assert ends == ["stop"]
    assert usage is not None
    assert usage.completion_tokens == 7
    assert chunks >= 5
    assert stream.response.headers["x-onlinerl-version"] == "0"


async def test_n_and_lists(sdk: openai.AsyncOpenAI) -> None:
    done = await sdk.completions.create(model="tab@1", prompt=["a = ", "b = "], n=3)
    assert [choice.index for choice in done.choices] == list(range(6))
    assert done.choices[5].text == answer("b = ", 1)
    tokens = await sdk.completions.create(model="tab", prompt=[ids_of("a = ")])
    assert tokens.choices[0].text == answer("a = ")


async def test_stop_and_suffix(gateway: Gateway, sdk: openai.AsyncOpenAI) -> None:
    gateway.engine.script = says("x + 1\n", "y = 2")
    done = await sdk.completions.create(model="tab", prompt="return ", suffix="\n", stop=["\n"])
    assert (done.choices[0].text, done.choices[0].finish_reason) == ("x + 1", "stop")


async def test_models(sdk: openai.AsyncOpenAI) -> None:
    assert [model.id async for model in sdk.models.list()] == ["tab", "tab@0"]
    assert (await sdk.models.retrieve("tab@0")).owned_by == "onlinerl"


async def test_errors(gateway: Gateway, sdk: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="max_tokens") as bad:
        await sdk.completions.create(model="tab", prompt="x", max_tokens=0)
    assert bad.value.param == "max_tokens"
    with pytest.raises(openai.BadRequestError, match=r"2,?048|2048") as long:
        await sdk.completions.create(model="tab", prompt="x = 1\n" * 2000)
    assert long.value.code == "context_length_exceeded"
    with pytest.raises(openai.NotFoundError):
        await sdk.completions.create(model="tab@77", prompt="x")
    with pytest.raises(openai.BadRequestError, match="echo"):
        await sdk.completions.create(model="tab", prompt="x", echo=True)
    with pytest.raises(openai.BadRequestError, match="presence_penalty"):
        await sdk.completions.create(model="tab", prompt="x", presence_penalty=0.5)
    gateway.engine.down = True
    with pytest.raises(openai.InternalServerError) as away:
        await sdk.completions.create(model="tab", prompt="x")
    assert away.value.status_code == 503
    gateway.engine.down = False
    gateway.engine.die_after = 2
    with pytest.raises(openai.APIError, match="mid-stream"):
        async for _ in await sdk.completions.create(model="tab", prompt="x", stream=True):
            pass


async def test_the_blocking_client_retries_until_the_engine_is_back(gateway: Gateway) -> None:
    gateway.engine.down = True

    def call() -> str:
        with openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="sk-test", max_retries=3) as client:
            return client.completions.create(model="tab", prompt="x").choices[0].text

    asking = asyncio.create_task(asyncio.to_thread(call))
    await asyncio.sleep(0.3)
    gateway.engine.down = False
    assert await asking == answer("x")
