"""Persistent worker processes that share a machine: one queue, one run a worker at a time, a time budget.

A worker imports torch once. Workers are spread over the GPUs; each has one thread, since the runs beside it
use the other cores. A worker that dies costs its run and is replaced.
"""

from __future__ import annotations

import multiprocessing
import os
import shutil
import subprocess
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from pathlib import Path

from studies.plan import Outcome, Run, State, order, ready

Work = Callable[[Run], Outcome]
"""What a worker does with a run."""
Prepare = Callable[[Path], Work]
"""Made in the worker, once: gets the output folder, imports what is heavy, returns the work."""

PATIENCE = 20.0
"""Seconds that workers get to end by themselves."""
FIRST_GUESS = 60.0
"""Seconds of a run of cost 1 before one has been measured."""
ONE_THREAD = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")


@dataclass(slots=True)
class Worker:
    """A process and what it is doing."""

    process: SpawnProcess
    connection: Connection
    gpu: int | None
    ready: bool = False
    """Its imports are done."""
    run: Run | None = None
    began: float = 0.0


@dataclass(slots=True)
class Tally:
    """How a call of `work_off` ended."""

    finished: list[Outcome] = field(default_factory=list)
    missing: list[Run] = field(default_factory=list)
    """Runs that were not made, for want of time or of the model that they start from."""


def _serve(connection: Connection, prepare: Prepare, folder: Path) -> None:
    """A worker's life: take a run, send its outcome, until None comes."""
    work = prepare(folder)
    connection.send(None)  # ready
    while True:
        try:
            run = connection.recv()
        except EOFError:  # the parent is gone
            return
        if run is None:
            return
        began = time.perf_counter()
        try:
            outcome = work(run)
        except Exception:  # noqa: BLE001 - one run must not take the others with it; it says what broke
            outcome = Outcome(
                run.study,
                run.arm,
                run.seed,
                "failed",
                traceback.format_exc(limit=-6),
                time.perf_counter() - began,
                run.overrides,
            )
        connection.send(outcome)


class Crew:
    """The workers. `close` ends them."""

    def __init__(self, count: int, gpus: int, prepare: Prepare, folder: Path) -> None:
        self._context = multiprocessing.get_context("spawn")
        self._prepare = prepare
        self._folder = folder
        self.workers = [self._start(number % gpus if gpus else None) for number in range(count)]

    def _start(self, gpu: int | None) -> Worker:
        own, theirs = self._context.Pipe()
        process = self._context.Process(
            target=_serve, args=(theirs, self._prepare, self._folder), daemon=True
        )
        wanted = dict.fromkeys(ONE_THREAD, "1") | {
            "TOKENIZERS_PARALLELISM": "false",
            "CUDA_VISIBLE_DEVICES": "" if gpu is None else str(gpu),
        }
        # A spawned process reads these when it imports torch: they must be there before it begins.
        before = {name: os.environ.get(name) for name in wanted}
        os.environ.update(wanted)
        try:
            process.start()
        finally:
            for name, value in before.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value
        theirs.close()
        return Worker(process, own, gpu)

    def give(self, worker: Worker, run: Run) -> None:
        """Start `run` on an idle worker."""
        worker.run, worker.began = run, time.monotonic()
        worker.connection.send(run)

    def collect(self, timeout: float) -> list[Outcome]:
        """Outcomes that came within `timeout` seconds, as soon as there is one. Dead workers are replaced.

        Raises RuntimeError when a worker dies before its first run: the next one would too.
        """
        outcomes = []
        ready = wait([worker.connection for worker in self.workers], timeout=timeout)
        for worker in [worker for worker in self.workers if worker.connection in ready]:
            run = worker.run
            try:
                message: Outcome | None = worker.connection.recv()
                worker.ready, worker.run = True, None
                if message is not None:
                    outcomes.append(message)
            except (EOFError, ConnectionResetError):
                worker.process.join(PATIENCE)
                if run is None:
                    raise RuntimeError(
                        f"a worker ended with code {worker.process.exitcode} and without a run: see its error"
                    ) from None
                outcomes.append(
                    Outcome(
                        run.study,
                        run.arm,
                        run.seed,
                        "failed",
                        f"its process ended with code {worker.process.exitcode}",
                        time.monotonic() - worker.began,
                        run.overrides,
                    )
                )
                worker.connection.close()
                self.workers[self.workers.index(worker)] = self._start(worker.gpu)
        return outcomes

    def close(self) -> list[Run]:
        """End all workers; returns the runs that this cut off."""
        cut = []
        for worker in self.workers:
            if worker.run is not None:
                cut.append(worker.run)
                worker.process.terminate()
            else:
                try:
                    worker.connection.send(None)
                except (BrokenPipeError, ConnectionResetError):
                    continue
        deadline = time.monotonic() + PATIENCE
        for worker in self.workers:
            worker.process.join(max(0.1, deadline - time.monotonic()))
            if worker.process.is_alive():
                worker.process.kill()
                worker.process.join()
            worker.connection.close()
        return cut


def work_off(
    runs: Sequence[Run],
    *,
    prepare: Prepare,
    folder: Path,
    processes: int,
    gpus: int,
    budget: float,
    done: Mapping[str, State] | None = None,
    keep: Callable[[Outcome], None] = lambda outcome: None,
    say: Callable[[str], None] = print,
) -> Tally:
    """Make `runs` on `processes` workers within `budget` seconds.

    No run begins that would, by what the finished ones took, end after the budget; what still runs when it
    is used up is cut off. `keep` gets each outcome as it comes. `done` names runs made before, for those
    that start from their models.
    """
    began = time.monotonic()
    states = dict(done or {})
    waiting = order(runs)
    tally = Tally()
    costs: list[tuple[float, float]] = []
    total = sum(run.cost for run in waiting)
    crew = Crew(min(processes, len(waiting)), gpus, prepare, folder)
    try:
        while True:
            used = time.monotonic() - began
            for worker in crew.workers:
                if worker.run is not None or not worker.ready:
                    continue
                fits = [r for r in ready(waiting, states) if used + _rate(costs) * r.cost <= budget]
                if not fits:
                    break
                waiting.remove(fits[0])
                crew.give(worker, fits[0])
            starting = any(not worker.ready for worker in crew.workers) and bool(ready(waiting, states))
            if used >= budget or not (starting or any(worker.run for worker in crew.workers)):
                break
            for outcome in crew.collect(min(5.0, max(0.1, budget - used))):
                states[outcome.key] = outcome.state
                keep(outcome)
                tally.finished.append(outcome)
                cost = next((run.cost for run in runs if run.key == outcome.key), 1.0)
                if outcome.state == "finished":
                    costs.append((outcome.seconds, cost))
                total -= cost
                say(
                    _progress(
                        outcome,
                        len(tally.finished),
                        len(runs),
                        time.monotonic() - began,
                        _rate(costs) * max(0.0, total) / len(crew.workers),
                    )
                )
    finally:
        cut = crew.close()
    tally.missing = [*cut, *waiting]
    return tally


def _rate(costs: Sequence[tuple[float, float]]) -> float:
    """Seconds of a run of cost 1, by what was measured."""
    return sum(s for s, _ in costs) / sum(c for _, c in costs) if costs else FIRST_GUESS


def _progress(outcome: Outcome, number: int, count: int, used: float, left: float) -> str:
    words = outcome.message.strip().splitlines()[-1][:100] if outcome.message else ""
    shown = outcome.final.get("greedy.reward")
    reward = f" reward {shown:+.3f}" if shown is not None else ""
    return (
        f"[{number}/{count} {used:.0f} s, about {left:.0f} s left] {outcome.key}: {outcome.state}"
        f" in {outcome.seconds:.0f} s{reward} {words}".rstrip()
    )


@contextmanager
def mps(wanted: bool, say: Callable[[str], None] = print) -> Iterator[None]:
    """NVIDIA's multi-process service while the block runs: kernels of several processes share a GPU at one
    time instead of taking turns. Without the program, or when it does not start, the block runs without."""
    program = shutil.which("nvidia-cuda-mps-control") if wanted else None
    if program is None:
        if wanted:
            say("no nvidia-cuda-mps-control here: processes take turns on the GPU")
        yield
        return
    with tempfile.TemporaryDirectory(prefix="mps-") as folder:
        names = {"CUDA_MPS_PIPE_DIRECTORY": f"{folder}/pipe", "CUDA_MPS_LOG_DIRECTORY": f"{folder}/log"}
        for path in names.values():
            Path(path).mkdir()
        started = subprocess.run([program, "-d"], env=os.environ | names, check=False, timeout=30).returncode
        if started != 0:
            say(f"nvidia-cuda-mps-control ended with {started}: processes take turns on the GPU")
            yield
            return
        os.environ.update(names)
        try:
            yield
        finally:
            for name in names:
                del os.environ[name]
            subprocess.run(
                [program], input="quit\n", text=True, env=os.environ | names, check=False, timeout=60
            )
