"""Workers: what stands between two channels, and groups of them.

    receiver = DataReceiver(...).start(output=samples)
    rewards = ComputeReward(...).start(input=samples, output=scored)
    trainer = Trainer(...).start(input=scored)
    trainer.wait()

`start` returns at once; the worker runs on a thread of its own. However it ends, its channels learn
of it: the output is closed, or fails with the worker's exception, and an input that it left before the
end is cancelled, so that no neighbour waits for ever.
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Generic, TypeVar

from onlinerl.errors import ChannelClosed
from onlinerl.flow.channel import Channel

In = TypeVar("In")
Out = TypeVar("Out")


class Worker(ABC, Generic[In, Out]):
    """One stage. Subclasses write `run`; whoever wires calls `start`."""

    @property
    def name(self) -> str:
        """For thread names and messages."""
        return type(self).__name__

    @abstractmethod
    def run(self, input: Channel[In] | None, output: Channel[Out] | None) -> None:
        """Do the work: read `input` to its end, `put` into `output`; return when done, raise to fail.

        ChannelClosed out of `output.put` need not be caught: it means that nobody reads any more, and
        ends the worker quietly.
        """

    def start(self, *, input: Channel[In] | None = None, output: Channel[Out] | None = None) -> WorkerGroup:
        """Run on a thread of its own."""
        return WorkerGroup.start([self], input=input, output=output)


class WorkerGroup:
    """Workers of one stage that share its channels. `Channel.create(producers=…)` counts them."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._threads: list[threading.Thread] = []
        self._errors: list[BaseException] = []
        self._lock = threading.Lock()
        self._left = 0

    @classmethod
    def start(
        cls,
        workers: Sequence[Worker[In, Out]],
        *,
        input: Channel[In] | None = None,
        output: Channel[Out] | None = None,
    ) -> WorkerGroup:
        """Start all of `workers` between the same two channels."""
        group = cls(workers[0].name)
        for number, worker in enumerate(workers):
            thread = threading.Thread(
                target=group._work,
                args=(worker, input, output),
                name=f"{worker.name}-{number}",
                daemon=True,  # a stuck worker must not keep a process alive that was told to go
            )
            group._threads.append(thread)
        for thread in group._threads:
            thread.start()
        return group

    @property
    def alive(self) -> bool:
        """True while one of them works."""
        return any(thread.is_alive() for thread in self._threads)

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until all have ended; raises the first one's exception. False: still at work after
        `timeout` seconds."""
        until = None if timeout is None else time.monotonic() + timeout
        for thread in self._threads:
            thread.join(None if until is None else max(0.0, until - time.monotonic()))
            if thread.is_alive():
                return False
        if self._errors:
            raise self._errors[0]
        return True

    def _work(self, worker: Worker[In, Out], input: Channel[In] | None, output: Channel[Out] | None) -> None:
        try:
            worker.run(input, output)
        except ChannelClosed:
            # Nobody reads the output any more: the reader knows why, this worker has nothing to add.
            self._leave(input, output)
        except BaseException as error:  # noqa: BLE001 - a thread's exception must reach who waits for it
            self._errors.append(error)
            if output is not None:
                output.fail(error)
            if input is not None:
                input.cancel()
        else:
            self._leave(input, output)

    def _leave(self, input: Channel[In] | None, output: Channel[Out] | None) -> None:
        if output is not None:
            output.close()
        with self._lock:
            self._left += 1
            last = self._left == len(self._threads)
        if input is not None and last:
            input.cancel()  # the others of the group, if any, have left too
