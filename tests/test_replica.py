"""The embedded engine: a real process on the real base model, through its real client."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import stat
import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from onlinerl.engines.embedded import EmbeddedEngine
from onlinerl.errors import EngineError, EngineFull, EngineUnavailable, RequestError, VersionNotLoaded
from onlinerl.records import Finish, FinishReason, Generation, Token
from tests.replicas import MODEL, Replica, Shelf, plain, prompts, reference, replica, tokens_of

Items = list[Token | Finish]


@pytest.fixture(scope="module")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> Shelf:
    torch.set_num_threads(1)
    shelf = Shelf(tmp_path_factory.mktemp("weights"))
    shelf.disturb(1, 0.05)
    shelf.disturb(9, float("nan"))
    # The base again under other numbers: enough where the weights do not matter.
    shelf.versions |= {id: plain(MODEL, id) for id in (2, 3, 4)}
    return shelf


@pytest.fixture(scope="module")
def running() -> Iterator[Replica]:
    with replica(resident=2) as one:
        yield one


@pytest.fixture
async def engine(running: Replica, shelf: Shelf) -> AsyncIterator[EmbeddedEngine]:
    """The shared replica with version 0 only."""
    client = EmbeddedEngine("tab-0", running.socket)
    await client.load(shelf.versions[0])
    for version in (await client.status()).versions - {0}:
        await client.unload(version)
    yield client
    await client.close()


def ask(prompt: tuple[int, ...], **fields: object) -> Generation:
    base = Generation(id="cmpl-1", policy="tab", version=0, prompt_ids=prompt, max_tokens=24, seed=1)
    return replace(base, **fields)  # type: ignore[arg-type]


async def collect(engine: EmbeddedEngine, request: Generation) -> Items:
    return [item async for item in engine.generate(request)]


async def drain(stream: AsyncGenerator[Token | Finish, None]) -> None:
    async for _ in stream:
        pass


def check(shelf: Shelf, request: Generation, items: Items) -> None:
    """Whole, on one version, and with the log-probabilities that this version gives them."""
    tokens = tokens_of(items)
    assert isinstance(items[-1], Finish)
    assert len(tokens) == len(items) - 1
    assert {token.version for token in tokens} == {request.version}
    expected = reference(shelf.dense(request.version), request, [token.id for token in tokens])
    got = torch.tensor([token.logprob for token in tokens])
    assert (got - expected).abs().max().item() < 1e-4


async def test_behaviour_logprobs_equal_a_dense_pass(engine: EmbeddedEngine, shelf: Shelf) -> None:
    kinds = [(0.3, 1.0), (0.8, 1.0), (1.0, 1.0), (1.0, 0.9), (0.8, 0.5), (0.0, 1.0)]
    texts = prompts(8, 150) + prompts(4, 40)
    requests = [
        ask(text, temperature=t, top_p=p, seed=i, max_tokens=12 + i % 7)
        for i, (text, (t, p)) in enumerate(zip(texts, kinds * 2, strict=True))
    ]
    answers = await asyncio.gather(*(collect(engine, request) for request in requests))
    for request, items in zip(requests, answers, strict=True):
        check(shelf, request, items)


async def test_a_switch_under_streams_fails_and_blocks_nobody(engine: EmbeddedEngine, shelf: Shelf) -> None:
    gaps: list[float] = []

    async def stream(request: Generation, started: asyncio.Event) -> Items:
        items: Items = []
        before = time.monotonic()
        async for item in engine.generate(request):
            items.append(item)
            gaps.append(time.monotonic() - before)
            before = time.monotonic()
            started.set()
        return items

    texts = prompts(16, 100)
    old = [ask(text, seed=i, max_tokens=100, temperature=0.8) for i, text in enumerate(texts[:8])]
    starts = [asyncio.Event() for _ in old]
    running = [asyncio.create_task(stream(r, s)) for r, s in zip(old, starts, strict=True)]
    await asyncio.gather(*(start.wait() for start in starts))
    await engine.load(shelf.versions[1])
    assert not all(task.done() for task in running), "nothing was in flight any more: the test shows nothing"
    new = [ask(text, version=1, seed=i, temperature=0.8) for i, text in enumerate(texts[8:])]
    answers = await asyncio.gather(*(stream(request, asyncio.Event()) for request in new))
    status = await engine.status()
    assert status.versions == {0, 1}
    for request, items in zip(old + new, await asyncio.gather(*running) + answers, strict=True):
        check(shelf, request, items)
    # Generous, since other work shares the cores; bench/engine.py measures it properly.
    assert max(gaps) < 20


async def test_a_seed_gives_the_same_answer_alone_and_in_company(engine: EmbeddedEngine) -> None:
    texts = prompts(8, 60)
    requests = [ask(text, seed=100 + i) for i, text in enumerate(texts)]
    together = await asyncio.gather(*(collect(engine, request) for request in requests))
    for request, items in zip(requests[:3], together[:3], strict=True):
        alone = await collect(engine, request)
        assert [t.id for t in tokens_of(alone)] == [t.id for t in tokens_of(items)]
    other = await collect(engine, replace(requests[0], seed=7))
    assert [t.id for t in tokens_of(other)] != [t.id for t in tokens_of(together[0])]
    unseeded = [await collect(engine, replace(requests[0], seed=None)) for _ in range(2)]
    assert [t.id for t in tokens_of(unseeded[0])] != [t.id for t in tokens_of(unseeded[1])]


async def test_stop_ids_length_and_alternatives(engine: EmbeddedEngine) -> None:
    [prompt] = prompts(1, 60)
    plain_answer = tokens_of(await collect(engine, ask(prompt, temperature=0.0, top_logprobs=3)))
    assert len(plain_answer) == 24
    for token in plain_answer:
        assert [len(token.top), token.top[0]] == [3, (token.id, pytest.approx(token.logprob))]
    stop = plain_answer[5].id
    first = [t.id for t in plain_answer].index(stop)
    stopped = await collect(engine, ask(prompt, temperature=0.0, stop_ids=(stop,)))
    assert [t.id for t in tokens_of(stopped)] == [t.id for t in plain_answer[: first + 1]]
    assert stopped[-1] == Finish(FinishReason.STOP)
    short = await collect(engine, ask(prompt, temperature=0.0, max_tokens=3))
    assert [len(short), short[-1]] == [4, Finish(FinishReason.LENGTH)]


async def test_requests_that_cannot_be_are_refused(engine: EmbeddedEngine) -> None:
    for wrong in (
        ask(()),
        ask((1,) * 2048),
        ask((8192,)),
        ask((-1,)),
        ask((1,), max_tokens=0),
        ask((1,), temperature=-1.0),
        ask((1,), top_p=0.0),
    ):
        with pytest.raises(RequestError):
            await collect(engine, wrong)
    with pytest.raises(VersionNotLoaded):
        await collect(engine, ask((1,), version=77))
    full = await collect(engine, ask((1,) * 2045, max_tokens=50))
    assert [len(tokens_of(full)), full[-1]] == [3, Finish(FinishReason.LENGTH)]


async def test_leaving_frees_the_row_at_once(engine: EmbeddedEngine, shelf: Shelf) -> None:
    texts = prompts(2, 60)
    stays = asyncio.create_task(collect(engine, ask(texts[1], max_tokens=40)))
    stream = engine.generate(ask(texts[0], max_tokens=1900))
    for _ in range(3):
        await anext(stream)
    await stream.aclose()
    deadline = time.monotonic() + 2
    while (await engine.status()).running > 1:
        assert time.monotonic() < deadline, "the row is still taken"
        await asyncio.sleep(0.01)
    check(shelf, ask(texts[1], max_tokens=40), await stays)
    assert (await engine.status()).running == 0


async def test_unload_waits_for_its_sequences(engine: EmbeddedEngine, shelf: Shelf) -> None:
    await engine.load(shelf.versions[2])
    request = ask(prompts(1, 60)[0], version=2, max_tokens=40)
    stream = engine.generate(request)
    items: Items = [await anext(stream)]
    unloading = asyncio.create_task(engine.unload(2))
    for _ in range(5):
        if 2 in (await engine.status()).versions:
            await asyncio.sleep(0.01)
    assert not unloading.done()
    with pytest.raises(VersionNotLoaded):
        await collect(engine, request)
    items += [item async for item in stream]
    check(shelf, request, items)
    await asyncio.wait_for(unloading, 5)
    await engine.unload(2)


async def test_versions_beyond_the_bound_are_refused(engine: EmbeddedEngine, shelf: Shelf) -> None:
    for id in (1, 2, 3):
        await engine.load(shelf.versions[id])
    await engine.load(shelf.versions[3])
    with pytest.raises(EngineError, match="unload one first"):
        await engine.load(shelf.versions[4])
    assert (await engine.status()).versions == {0, 1, 2, 3}


async def test_weights_of_nan_fail_their_own_requests_only(engine: EmbeddedEngine, shelf: Shelf) -> None:
    await engine.load(shelf.versions[9])
    texts = prompts(2, 60)
    good = asyncio.create_task(collect(engine, ask(texts[0])))
    with pytest.raises(EngineError, match="no finite"):
        await collect(engine, ask(texts[1], version=9))
    check(shelf, ask(texts[0]), await good)


async def test_broken_versions_change_nothing(engine: EmbeddedEngine, shelf: Shelf, tmp_path: Path) -> None:
    source = shelf.versions[1]

    def copy(name: str) -> Path:
        return Path(shutil.copytree(source.url, tmp_path / name))

    flipped = copy("flipped")
    weights = bytearray((flipped / "model.safetensors").read_bytes())
    weights[-1000] ^= 1
    (flipped / "model.safetensors").unlink()
    (flipped / "model.safetensors").write_bytes(weights)
    short = copy("short")
    (short / "model.safetensors").unlink()
    (short / "model.safetensors").write_bytes(weights[: len(weights) // 2])
    lacking = copy("lacking")
    tensors = load_file(lacking / "model.safetensors")
    del tensors["model.norm.weight"]
    (lacking / "model.safetensors").unlink()
    save_file(tensors, lacking / "model.safetensors")
    bare = copy("bare")
    (bare / "model.safetensors").unlink()
    other = copy("other")
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").unlink()
    (other / "config.json").write_text(
        json.dumps(config | {"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}})
    )
    for folder, digest, reason in (
        (tmp_path / "nowhere", "", "not a folder"),
        (flipped, source.digest, "not the file that its manifest names"),
        (copy("changed"), "0" * 64, "not the one that was registered"),
        (MODEL, "0" * 64, "no manifest"),
        (short, source.digest, "bytes instead of"),
        (short, "", "broken|usable"),
        (lacking, "", "lacks the tensor model.norm.weight"),
        (bare, "", "no usable weights"),
        (other, "", "another architecture.*rope"),
    ):
        with pytest.raises(EngineError, match=reason):
            await engine.load(replace(plain(folder, 8), digest=digest))
    assert (await engine.status()).versions == {0}
    request = ask(prompts(1, 60)[0])
    check(shelf, request, await collect(engine, request))


async def test_the_socket_is_private(running: Replica) -> None:
    assert stat.S_IMODE(running.socket.stat().st_mode) == 0o600


async def test_a_full_queue_says_when_to_come_back(shelf: Shelf) -> None:
    with replica(concurrency=1, queue=1) as small:
        engine = EmbeddedEngine("small", small.socket)
        await engine.load(shelf.versions[0])
        texts = prompts(6, 60)
        answers = await asyncio.gather(
            *(collect(engine, ask(text, max_tokens=8)) for text in texts), return_exceptions=True
        )
        full = [a for a in answers if isinstance(a, EngineFull)]
        served = [a for a in answers if isinstance(a, list)]
        assert len(full) + len(served) == 6
        assert full
        assert served
        assert all(error.retry_after > 0 for error in full)
        await engine.close()


async def test_a_killed_process_ends_its_streams_and_refuses_new_ones(shelf: Shelf) -> None:
    with replica() as victim:
        engine = EmbeddedEngine("victim", victim.socket)
        await engine.load(shelf.versions[0])
        texts = prompts(4, 60)
        streams = [engine.generate(ask(text, max_tokens=1500)) for text in texts]
        for stream in streams:
            await anext(stream)
        victim.process.kill()
        for stream in streams:
            with pytest.raises(EngineError) as caught:
                await asyncio.wait_for(drain(stream), 5)
            assert not isinstance(caught.value, EngineUnavailable)
        async with asyncio.timeout(5):
            with pytest.raises(EngineUnavailable):
                await collect(engine, ask(texts[0]))
            with pytest.raises(EngineUnavailable):
                await engine.status()
            with pytest.raises(EngineUnavailable):
                await engine.load(shelf.versions[0])
        await engine.close()


async def test_a_term_signal_and_the_parents_death_end_it_cleanly(shelf: Shelf) -> None:
    for end in ("signal", "stdin"):
        with replica() as one:
            engine = EmbeddedEngine("one", one.socket)
            await engine.load(shelf.versions[0])
            stream = engine.generate(ask((1, 2, 3), max_tokens=1500))
            await anext(stream)
            if end == "signal":
                os.kill(one.process.pid, signal.SIGTERM)
            else:
                assert one.process.stdin is not None
                one.process.stdin.close()
            with pytest.raises(EngineError):
                await drain(stream)
            assert await asyncio.to_thread(one.process.wait, 10) == 0
            assert not one.socket.exists()
            await engine.close()
