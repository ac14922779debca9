"""Bounded, typed queues between the workers of a run.

    DataReceiver ──samples──▶ ComputeReward ──scored──▶ Trainer

A channel carries items one way. When it is full, producers wait (back-pressure); when every producer
has closed it, consumers drain what is left and then end. Two kinds of bad news travel through it:

- a producer fails: `fail(error)`. Consumers get what was put before, then that same error, so that the
  reason of a failure reaches whoever waits at the far end;
- the consumers are gone: `cancel()`. What was queued is discarded and producers get ChannelClosed, so
  that none of them waits for ever on a queue that nobody empties.

The one kind here joins threads of one process. Workers use nothing but these methods, so another kind
can take its place without a change in them.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator
from typing import Generic, TypeVar

from onlinerl.errors import ChannelClosed

Item = TypeVar("Item")


class Channel(Generic[Item]):
    """A queue of at most `capacity` items of one type.

    >>> numbers: Channel[int] = Channel.create("numbers", capacity=2, item=int)
    >>> numbers.put(1); numbers.put(2); numbers.close()
    >>> list(numbers)
    [1, 2]
    """

    def __init__(self, name: str, capacity: int, item: type[Item] | None, producers: int) -> None:
        if capacity < 1 or producers < 1:
            raise ValueError(f"channel {name!r} needs a capacity and a number of producers of at least 1")
        self.name = name
        self.capacity = capacity
        self._type = item
        self._items: deque[Item] = deque()
        self._producers = producers
        self._cancelled = False
        self._error: BaseException | None = None
        self._changed = threading.Condition()

    @classmethod
    def create(
        cls, name: str, *, capacity: int = 64, item: type[Item] | None = None, producers: int = 1
    ) -> Channel[Item]:
        """Make a channel.

        `item` is the type that `put` enforces (None: no check). The channel ends for its consumers
        when `close` was called `producers` times.
        """
        return cls(name, capacity, item, producers)

    def __len__(self) -> int:
        """Items that wait."""
        with self._changed:
            return len(self._items)

    @property
    def closed(self) -> bool:
        """True when no more items can be put."""
        with self._changed:
            return self._ended()

    def put(self, item: Item, timeout: float | None = None) -> None:
        """Add an item, waiting while the channel is full.

        Raises ChannelClosed when it is closed, failed or cancelled (also while waiting), TimeoutError
        after `timeout` seconds, TypeError for an item of another type.
        """
        if self._type is not None and not isinstance(item, self._type):
            raise TypeError(f"channel {self.name!r} carries {self._type.__name__}, not {type(item).__name__}")
        with self._changed:
            free = self._changed.wait_for(
                lambda: self._ended() or len(self._items) < self.capacity, timeout=timeout
            )
            if self._ended():
                raise ChannelClosed(f"channel {self.name!r} is closed")
            if not free:
                raise TimeoutError(f"channel {self.name!r} stayed full for {timeout} s")
            self._items.append(item)
            self._changed.notify_all()

    def get(self, timeout: float | None = None) -> Item:
        """Take the oldest item, waiting while the channel is empty and open.

        Raises ChannelClosed when it is closed and empty, a producer's own error when it failed and is
        empty, TimeoutError after `timeout` seconds.
        """
        with self._changed:
            some = self._changed.wait_for(lambda: self._items or self._ended(), timeout=timeout)
            if self._items:
                item = self._items.popleft()
                self._changed.notify_all()
                return item
            if self._error is not None:
                raise self._error
            if not some:
                raise TimeoutError(f"channel {self.name!r} stayed empty for {timeout} s")
            raise ChannelClosed(f"channel {self.name!r} is closed")

    def take(self, limit: int, timeout: float | None = None) -> list[Item]:
        """Up to `limit` items: waits for all of them until the end of the channel or `timeout` seconds.

        An empty list means: ended, or nothing came in time (`closed` tells which). Raises a producer's
        error once nothing is left before it.
        """
        until = None if timeout is None else time.monotonic() + timeout
        items: list[Item] = []
        while len(items) < limit:
            left = None if until is None else max(0.0, until - time.monotonic())
            try:
                items.append(self.get(left))
            except (ChannelClosed, TimeoutError):
                break
            except BaseException:  # a producer's error, of any kind: what came before it is handed out first
                if items:
                    break  # the next call meets the same error with nothing before it
                raise
        return items

    def __iter__(self) -> Iterator[Item]:
        """Items until the end; raises a producer's error."""
        while True:
            try:
                item = self.get()
            except ChannelClosed:
                return
            yield item

    def close(self) -> None:
        """One producer is done. Consumers end once all are and the queue is drained."""
        with self._changed:
            self._producers = max(0, self._producers - 1)
            self._changed.notify_all()

    def fail(self, error: BaseException) -> None:
        """A producer failed: nothing more goes in, and consumers get `error` after what is queued.

        The first error stays.
        """
        with self._changed:
            if self._error is None:
                self._error = error
            self._changed.notify_all()

    def cancel(self) -> None:
        """The consumers are gone: discard what is queued, wake producers with ChannelClosed."""
        with self._changed:
            self._cancelled = True
            self._items.clear()
            self._changed.notify_all()

    def _ended(self) -> bool:
        return self._producers == 0 or self._cancelled or self._error is not None
