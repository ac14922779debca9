"""The pool, with doubles as engines: choice, moving on before the first token, waiting, what it knows."""

from __future__ import annotations

import asyncio
import time

import pytest

from onlinerl.engines.pool import Pool
from onlinerl.errors import EngineError, EngineFull, EngineUnavailable
from onlinerl.records import Finish, Generation, Token, Version, VersionState
from tests.doubles import DoubleEngine, scripted


def ask(version: int = 0, prompt: int = 5) -> Generation:
    return Generation(id="c", policy="tab", version=version, prompt_ids=(prompt,), max_tokens=16)


def version(id: int) -> Version:
    return Version("tab", id, VersionState.LIVE, None, None, 0.0, "/nowhere", "")


async def collect(pool: Pool, request: Generation) -> list[Token | Finish]:
    return [item async for item in pool.generate(request)]


def ids(items: list[Token | Finish]) -> tuple[int, ...]:
    return tuple(item.id for item in items if isinstance(item, Token))


async def pool_of(*engines: DoubleEngine, patience: float = 0.3) -> Pool:
    pool = Pool("tab", patience=patience)
    for engine in engines:
        pool.add(engine)
    await pool.statuses()
    return pool


async def test_goes_to_the_least_loaded_that_holds_the_version() -> None:
    a, b, c = DoubleEngine("a", gap=0.02), DoubleEngine("b", gap=0.02), DoubleEngine("c", versions=(1,))
    pool = await pool_of(a, b, c)
    answers = await asyncio.gather(*(collect(pool, ask(prompt=i)) for i in range(6)))
    assert [ids(answer) for answer in answers] == [scripted((i,), 0) for i in range(6)]
    assert [len(a.requests), len(b.requests), len(c.requests)] == [3, 3, 0]
    await collect(pool, ask(1))
    assert len(c.requests) == 1


@pytest.mark.parametrize("fault", ["down", "dies", "full", "forgot"])
async def test_moves_to_another_before_the_first_token(fault: str) -> None:
    bad, good = DoubleEngine("bad"), DoubleEngine("good")
    pool = await pool_of(bad, good)
    bad.down = fault == "down"
    bad.die_after = 0 if fault == "dies" else None
    bad.full = 1.0 if fault == "full" else None
    bad.versions = set() if fault == "forgot" else {0}
    assert ids(await collect(pool, ask())) == scripted((5,), 0)
    assert len(good.requests) == 1


async def test_does_not_move_after_the_first_token() -> None:
    bad, good = DoubleEngine("bad"), DoubleEngine("good")
    pool = await pool_of(bad, good)
    bad.die_after = 2
    stream = pool.generate(ask())
    assert ids([await anext(stream), await anext(stream)]) == scripted((5,), 0)[:2]
    with pytest.raises(EngineError) as caught:
        await anext(stream)
    assert not isinstance(caught.value, EngineUnavailable)
    assert good.requests == []


async def test_waits_for_an_engine_that_is_being_restarted() -> None:
    engine = DoubleEngine("a")
    pool = await pool_of(engine, patience=5)
    engine.down = True
    waiting = [asyncio.create_task(collect(pool, ask(prompt=i))) for i in range(20)]
    await asyncio.sleep(0.15)
    assert pool.servable() == frozenset()
    # It comes back without its versions, and somebody loads them.
    engine.down, engine.versions = False, set()
    await asyncio.sleep(0.15)
    await pool.load(version(0))
    answers = await asyncio.gather(*waiting)
    assert [ids(answer) for answer in answers] == [scripted((i,), 0) for i in range(20)]


async def test_unavailable_when_nobody_comes_back() -> None:
    engine = DoubleEngine("a")
    pool = await pool_of(engine)
    engine.down = True
    before = time.monotonic()
    with pytest.raises(EngineUnavailable) as caught:
        await collect(pool, ask())
    assert not isinstance(caught.value, EngineFull)
    assert caught.value.retry_after > 0
    assert 0.25 < time.monotonic() - before < 2
    with pytest.raises(EngineUnavailable):
        await collect(await pool_of(), ask())


async def test_full_everywhere_is_said_at_once_with_the_shortest_wait() -> None:
    a, b = DoubleEngine("a"), DoubleEngine("b")
    pool = await pool_of(a, b, patience=30)
    a.full, b.full = 7.0, 3.0
    with pytest.raises(EngineFull) as caught:
        await asyncio.wait_for(collect(pool, ask()), 2)
    assert caught.value.retry_after == 3.0


async def test_closing_the_stream_aborts_at_the_engine() -> None:
    engine = DoubleEngine("a", gap=0.01)
    pool = await pool_of(engine)
    stream = pool.generate(ask())
    await anext(stream)
    await stream.aclose()
    assert [engine.aborted, engine.running, pool.engines[0].inflight] == [["c"], 0, 0]


async def test_knows_who_holds_what() -> None:
    a, b, c = DoubleEngine("a"), DoubleEngine("b", versions=(0, 1)), DoubleEngine("c")
    c.down = True
    pool = await pool_of(a, b, c)
    assert [pool.resident(), pool.servable()] == [{0}, {0, 1}]
    await pool.load(version(2))
    assert [pool.resident(), pool.servable()] == [{0, 2}, {0, 1, 2}]
    await pool.unload(0)
    assert [pool.resident(), a.unloads, b.unloads] == [{2}, [0], [0]]
    assert set(await pool.statuses()) == {"a", "b"}
    # The publisher may go to the members directly; the pool sees that too.
    c.down = False
    await pool.engines[2].load(version(2))
    assert pool.resident() == {2}
    await pool.engines[0].unload(2)
    assert [pool.resident(), pool.servable()] == [frozenset(), {1, 2}]


async def test_a_failed_load_is_raised_after_all_have_answered() -> None:
    a, b = DoubleEngine("a"), DoubleEngine("b")
    pool = await pool_of(a, b)
    a.load_error, b.load_time = "no room", 0.05
    with pytest.raises(EngineError, match="no room"):
        await pool.load(version(1))
    assert [pool.resident(), pool.servable()] == [{0}, {0, 1}]
    a.down = b.down = True
    with pytest.raises(EngineUnavailable):
        await pool.load(version(2))


async def test_members_come_and_go() -> None:
    a, b = DoubleEngine("a", gap=0.02), DoubleEngine("b")
    pool = await pool_of(a)
    running = asyncio.create_task(collect(pool, ask()))
    await asyncio.sleep(0.03)
    pool.add(b)
    assert pool.remove("a") is a
    assert pool.remove("a") is None
    assert ids(await running) == scripted((5,), 0)
    await collect(pool, ask())
    assert len(b.requests) == 1
    with pytest.raises(ValueError, match="already has"):
        pool.add(DoubleEngine("b"))
