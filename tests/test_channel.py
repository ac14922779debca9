"""Channels and workers: back-pressure, ends, errors; several producers and consumers."""

from __future__ import annotations

import threading
import time
from collections import Counter

import pytest

from onlinerl.errors import ChannelClosed, RunError
from onlinerl.flow.channel import Channel
from onlinerl.flow.worker import Worker, WorkerGroup


class Count(Worker[None, int]):
    def __init__(self, start: int, stop: int, fail_at: int | None = None) -> None:
        self.numbers = range(start, stop)
        self.fail_at = fail_at
        self.done = 0

    def run(self, input: Channel[None] | None, output: Channel[int] | None) -> None:
        assert output is not None
        for number in self.numbers:
            if number == self.fail_at:
                raise RunError("the source is broken")
            output.put(number)
            self.done += 1


class Double(Worker[int, int]):
    def run(self, input: Channel[int] | None, output: Channel[int] | None) -> None:
        assert input is not None
        assert output is not None
        for number in input:
            output.put(2 * number)


class Collect(Worker[int, None]):
    def __init__(self, limit: int | None = None) -> None:
        self.seen: list[int] = []
        self.limit = limit

    def run(self, input: Channel[int] | None, output: Channel[None] | None) -> None:
        assert input is not None
        for number in input:
            self.seen.append(number)
            if self.limit is not None and len(self.seen) >= self.limit:
                return


def test_order_and_end() -> None:
    channel: Channel[int] = Channel.create("numbers", capacity=8)
    for number in range(5):
        channel.put(number)
    channel.close()
    assert list(channel) == [0, 1, 2, 3, 4]
    with pytest.raises(ChannelClosed, match="numbers"):
        channel.get()
    with pytest.raises(ChannelClosed):
        channel.put(6)


def test_full_channel_makes_the_producer_wait() -> None:
    channel: Channel[int] = Channel.create("narrow", capacity=3)
    source = Count(0, 100)
    group = source.start(output=channel)
    deadline = time.monotonic() + 5
    while source.done < 3 and time.monotonic() < deadline:
        time.sleep(0.005)
    time.sleep(0.1)
    assert source.done == 3
    assert len(channel) == 3
    assert list(channel) == list(range(100))
    assert group.wait(5)


def test_timeouts() -> None:
    channel: Channel[int] = Channel.create("slow", capacity=1)
    with pytest.raises(TimeoutError, match="empty"):
        channel.get(0.01)
    channel.put(1)
    with pytest.raises(TimeoutError, match="full"):
        channel.put(2, 0.01)
    assert channel.get() == 1


def test_item_type_is_enforced() -> None:
    channel: Channel[int] = Channel.create("typed", item=int)
    with pytest.raises(TypeError, match="carries int, not str"):
        channel.put("one")  # type: ignore[arg-type]
    assert len(channel) == 0


def test_take_collects_a_batch_and_the_rest() -> None:
    channel: Channel[int] = Channel.create("batches", capacity=10)
    for number in range(7):
        channel.put(number)
    assert channel.take(4) == [0, 1, 2, 3]
    assert channel.take(4, timeout=0.01) == [4, 5, 6]
    assert channel.take(4, timeout=0.01) == []
    assert not channel.closed
    channel.close()
    assert channel.take(4) == []
    assert channel.closed


def test_several_producers_and_consumers_lose_and_repeat_nothing() -> None:
    numbers: Channel[int] = Channel.create("numbers", capacity=4, producers=3)
    doubled: Channel[int] = Channel.create("doubled", capacity=4, producers=2)
    sources = WorkerGroup.start([Count(i * 500, (i + 1) * 500) for i in range(3)], output=numbers)
    middle = WorkerGroup.start([Double(), Double()], input=numbers, output=doubled)
    sinks = [Collect(), Collect()]
    ends = WorkerGroup.start(sinks, input=doubled)
    assert sources.wait(20)
    assert middle.wait(20)
    assert ends.wait(20)
    assert Counter(n for sink in sinks for n in sink.seen) == Counter(2 * n for n in range(1500))


def test_error_reaches_the_far_end_after_what_came_before() -> None:
    numbers: Channel[int] = Channel.create("numbers", capacity=4)
    doubled: Channel[int] = Channel.create("doubled", capacity=4)
    sink = Collect()
    source = Count(0, 10, fail_at=6).start(output=numbers)
    middle = Double().start(input=numbers, output=doubled)
    end = sink.start(input=doubled)
    with pytest.raises(RunError, match="the source is broken"):
        end.wait(5)
    assert sink.seen == [0, 2, 4, 6, 8, 10]
    for group in (source, middle):
        with pytest.raises(RunError, match="the source is broken"):
            group.wait(5)


def test_take_gives_what_came_before_an_error_first() -> None:
    channel: Channel[int] = Channel.create("broken")
    channel.put(1)
    channel.fail(RunError("no more"))
    assert channel.take(5) == [1]
    with pytest.raises(RunError, match="no more"):
        channel.take(5)


def test_consumer_that_leaves_frees_its_producer() -> None:
    numbers: Channel[int] = Channel.create("numbers", capacity=2)
    source = Count(0, 10_000)
    group = source.start(output=numbers)
    sink = Collect(limit=5)
    end = sink.start(input=numbers)
    assert end.wait(5)
    assert group.wait(5), "the producer must not hang on a queue that nobody empties"
    assert source.done < 10_000
    assert sink.seen == [0, 1, 2, 3, 4]


def test_cancel_wakes_a_waiting_producer() -> None:
    channel: Channel[int] = Channel.create("full", capacity=1)
    channel.put(1)
    woken = threading.Event()

    def produce() -> None:
        try:
            channel.put(2)
        except ChannelClosed:
            woken.set()

    thread = threading.Thread(target=produce)
    thread.start()
    time.sleep(0.02)
    channel.cancel()
    thread.join(5)
    assert woken.is_set()


def test_wait_says_when_it_is_too_early() -> None:
    channel: Channel[int] = Channel.create("open")
    group = Collect().start(input=channel)
    assert group.wait(0.05) is False
    assert group.alive
    channel.close()
    assert group.wait(5)
    assert not group.alive


@pytest.mark.parametrize(("capacity", "producers"), [(0, 1), (1, 0)])
def test_impossible_channels_are_refused(capacity: int, producers: int) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        Channel.create("odd", capacity=capacity, producers=producers)
