"""`onlinerl demo`: the whole ring on this machine, finite, with an account of what it measured.

The server, the training run, the roll-back and the HTTP traffic are the real ones; only the developers
are simulated, and their taste is printed. The story: traffic on version 0, a run that follows the
feedback and publishes version after version, traffic on the last one, roll back, forward again, and
both ends of the line compared on held-out files.
"""

from __future__ import annotations

import asyncio
import json
import math
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import aiohttp
import uvloop
import yaml
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from onlinerl.config import WHOLE, Settings
from onlinerl.datasets import fim
from onlinerl.datasets.fim import FimPrompt, Kind
from onlinerl.datasets.simulate import Outcome, developers, play
from onlinerl.datasets.users import TASTES, Habits, User
from onlinerl.datasets.wires import Client, Continue, Fork, Native, Wire
from onlinerl.demo.account import (
    POLICY,
    HeldOut,
    Journal,
    difference,
    draw,
    exam_table,
    held_out_scores,
    reward_per_opportunity,
    traffic_totals,
    version_table,
)
from onlinerl.errors import Conflict, OnlineRLError, RunError, SettingsError
from onlinerl.loop import run as runs_command
from onlinerl.observe import configure_logging
from onlinerl.records import VersionState
from onlinerl.serve import Server, home_lock, running
from onlinerl.store import interactions, runs, versions
from onlinerl.store.interactions import VersionCounts

HOME = Path("onlinerl-demo")
MARKER = "this-is-an-onlinerl-demo"
OWN = (
    "weights",
    "runs",
    "logs",
    "onlinerl.db",
    "onlinerl.db-wal",
    "onlinerl.db-shm",
    "admin.key",
    "serve.lock",
    "serve.json",
    "demo.yaml",
    "demo.json",
    "demo.png",
)
"""What a demo leaves in its home, and the only things that the next one removes."""
TASTE = "line"
QWEN = "Qwen2.5-Coder-1.5B"
"""As Continue must call its model, so that it uses the Qwen template."""
CHARACTERS = 320
"""Prefix and suffix together: about 90 tokens, so that two cores manage the traffic and the training."""
SPEED = 20.0
"""The developers read and pause so many times faster than people do."""
WATCH = 0.02
"""Seconds between two looks at which version new requests get."""
PATIENCE = 60.0
"""Seconds that a change of the live version may take before the demo gives up."""


@dataclass(frozen=True, slots=True)
class Budget:
    """How much is done. The default fits two cores in well under twelve minutes."""

    baseline: int = 280
    """Requests on version 0 before anything is learned."""
    steps: int = 36
    """Batches of the training run."""
    seconds: float = 400.0
    """After so long the run is asked to stop, however many batches it has done."""
    final: int = 280
    """Requests on the last version, before and after the roll-back together."""
    rolled_back: int = 40
    """Requests while the version before it is live again."""
    held_out: int = 64
    """Held-out prompts answered greedily by version 0 and by the last one."""


# ------------------------------------------------------------------------------------- home, settings


def prepare_home(home: Path) -> None:
    """Make `home` fresh. Removes only what an earlier demo left there; SettingsError for a folder that
    is not a demo's, or one that a server is using."""
    if home.is_dir() and any(home.iterdir()) and not (home / MARKER).is_file():
        raise SettingsError(
            f"{home} exists and was not made by `onlinerl demo`: nothing was touched; choose another --home"
        )
    with home_lock(home):
        (home / MARKER).write_text("`onlinerl demo` removes its own files here when it starts anew.\n")
        for name in OWN:
            if name != "serve.lock":
                _remove(home / name)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        for entry in path.iterdir():
            _remove(entry)
        path.rmdir()
    else:
        path.unlink(missing_ok=True)


def demo_settings(given: Settings) -> Settings:
    """The demo's defaults, overridden by whatever the person set."""
    asked = given.model_dump(mode="json", exclude_unset=True, context=WHOLE)
    names = list(asked.get("policies", {}))
    if names not in ([], [POLICY]):
        raise SettingsError(f"the demo has one policy named {POLICY!r}; the settings name {', '.join(names)}")
    defaults: dict[str, Any] = {
        "home": str(HOME),
        "server": {"port": 0, "feedback_port": 0},
        "policies": {
            POLICY: {
                "publish": "immediately",
                "engine": {"threads": 1, "resident": 4},
                "sampling": {"temperature": 1.0, "max_tokens": 24},
                # Reading times are divided by SPEED, and so is the rest of a timeout.
                "joins": {"rest": 30.0 / SPEED},
                "train": {
                    "threads": 1,
                    "lr": 1e-4,
                    "batch": 32,
                    # Measured over three seeds: one optimiser step a batch learns as much as two and keeps
                    # three times the entropy, and at this rate the policy moves far within a few batches,
                    # so young samples teach most.
                    "minibatches": 1,
                    "warmup": 0,  # of three dozen steps, ten are too many to begin slowly
                    "version_every": 3,
                    "staleness": 1,
                    "holdout": 0.05,
                    "patience": 0,
                    # The taste is far from what the base model writes: a healthy run here comes to 0.6
                    # nats a token (measured), and to a quarter of the length, which is what these
                    # developers want. The default bands are for finer steps.
                    "guards": {"kl": 2.0, "length_low": 0.1},
                },
            }
        },
    }
    return Settings.model_validate(_merge(defaults, asked))


def _merge(under: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(under)
    for name, value in over.items():
        below = merged.get(name)
        merged[name] = _merge(below, value) if isinstance(below, dict) and isinstance(value, dict) else value
    return merged


# -------------------------------------------------------------------------------------------- the story


def run(settings: Settings, out: Path | None = None, *, budget: Budget | None = None) -> None:
    """Turn the ring; print the table, write `demo.png` and `demo.json` to `out` (default: the home).

    Returns only when the ring really turned: several versions went live, the roll-back and the way
    forward took effect, feedback was joined. Raises RunError (exit code 1) otherwise.
    """
    settings = demo_settings(settings)
    prepare_home(settings.home)
    settings = settings.model_copy(update={"home": settings.home.resolve()})
    out = settings.home if out is None else out
    out.mkdir(parents=True, exist_ok=True)
    file = settings.home / "demo.yaml"
    file.write_text(yaml.safe_dump(settings.model_dump(mode="json", context=WHOLE), sort_keys=False))
    (settings.home / "logs").mkdir(exist_ok=True)
    configure_logging(file=settings.home / "logs" / "demo.log")
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_Demo(settings, file, out, budget or Budget(), Console()).tell())


class _Demo:
    """One telling of the story."""

    def __init__(self, settings: Settings, file: Path, out: Path, budget: Budget, console: Console) -> None:
        self.settings = settings
        self.file = file
        self.out = out
        self.budget = budget
        self.console = console
        self.taste = TASTES[TASTE]
        self.journal = Journal()
        self.served = 0
        kinds = (Kind.REST, Kind.LINE)
        most = budget.baseline + budget.final + budget.rolled_back + 128 * budget.steps
        prompts = list(fim.collect(split="train", limit=most, characters=CHARACTERS, kinds=kinds).prompts)
        # `collect` goes round the files, and small ones run out: shuffled, every version gets prompts
        # of the same kind, and the comparison of versions is one of versions.
        random.Random(0).shuffle(prompts)
        self.prompts = prompts
        self.exam = fim.collect(
            split="test", limit=budget.held_out, characters=CHARACTERS, kinds=kinds
        ).prompts

    async def tell(self) -> None:
        """From start to table."""
        say = self.console.print
        say(f"[bold]onlinerl demo[/bold]: serve, rate, learn, publish, roll back, in {self.settings.home}")
        say(f"The simulated developers like {self.taste.words}.")
        say(
            "They work on standard-library files that the model never saw, in three wire forms: "
            "onlinerl's own (8 people), Continue's (2) and its fork's (2)."
        )
        async with running(self.settings) as server:
            await server.until_ready()
            watching = asyncio.create_task(self._watch(server))
            try:
                await self._act(server)
            finally:
                watching.cancel()
                with suppress(asyncio.CancelledError):
                    await watching

    async def _act(self, server: Server) -> None:
        with self._bar("version 0 serves", self.budget.baseline) as advance:
            await self._traffic(server, self.budget.baseline, advance)
        tau = await self._train(server)
        last = self._live(server)
        half = self.budget.final // 2
        with self._bar(f"version {last} serves", half) as advance:
            await self._traffic(server, half, advance)
        await self._switch(server, "rollback")
        before = self._live(server)
        with self._bar(f"rolled back to {before}", self.budget.rolled_back) as advance:
            await self._traffic(server, self.budget.rolled_back, advance)
        await self._switch(server, "promote", str(last))
        with self._bar(f"forward to {last} again", self.budget.final - half) as advance:
            await self._traffic(server, self.budget.final - half, advance)
        # The report is read before the examination, whose pinned requests are interactions too.
        with server.database.read() as c:
            counts = interactions.report(c, policy=POLICY)
        with self._bar("held-out files", 2 * len(self.exam)) as advance:
            exams = {version: await self._examine(server, version, advance) for version in (0, last)}
        self._conclude(counts, tau, last, exams)

    # ------------------------------------------------------------------------------------- the parts

    async def _traffic(self, server: Server, requests: int, advance: Callable[[], None]) -> None:
        """Let the developers make `requests` requests in all."""
        few = requests * 3 // 20
        clients = {
            name: Client(model, temperature=1.0, key=name)
            for name, model in (("native", POLICY), ("continue", QWEN), ("fork", QWEN))
        }
        shares: list[tuple[Wire, str, int, int]] = [
            (Native(clients["native"]), "native", 8, requests - 2 * few),
            (Continue(clients["continue"]), "continue", 2, few),
            (Fork(clients["fork"]), "fork", 2, few),
        ]

        def watch(outcome: Outcome) -> None:
            self.journal.outcomes.append(outcome)
            advance()

        days = []
        for dialect, name, people, share in shares:
            if share == 0:
                continue
            users: list[User] = developers(people, self.taste, Habits(), prefix=name)
            prompts = [self.prompts[(self.served + i) % len(self.prompts)] for i in range(share)]
            day = play(
                dialect,
                server.url,
                server.feedback_url,
                users,
                prompts,
                requests=share,
                seed=self.served,
                speed=SPEED,
                watch=watch,
            )
            days.append(day)
            self.served += share
        self.journal.reports += await asyncio.gather(*days)

    async def _train(self, server: Server) -> float:
        """Follow the feedback for the budget's batches while the developers go on; the run's τ."""
        batch = self.settings.policies[POLICY].train.batch
        process = runs_command.start(self.settings, POLICY, max_steps=self.budget.steps, follow=True)
        try:
            with self._bar("the run learns, batches", self.budget.steps) as advance:
                done, started, asked = 0, time.perf_counter(), False
                while process.poll() is None:
                    with server.database.read() as c:
                        waiting = interactions.counts(c, policy=POLICY).waiting
                        known = runs.list_(c, POLICY)
                    if known and not asked and time.perf_counter() - started > self.budget.seconds:
                        asked = True
                        # It may have ended just now.
                        with suppress(Conflict), server.database.write() as c:
                            runs.wish(c, POLICY, known[-1].id, "stop")
                    for _ in range(done, known[-1].step if known else 0):
                        advance()
                        done += 1
                    # What waits long is stale when it is trained on.
                    if waiting < batch:
                        await self._traffic(server, batch, lambda: None)
                    else:
                        await asyncio.sleep(0.2)
        finally:
            if process.poll() is None:
                process.terminate()
                await asyncio.to_thread(process.wait)
        with server.database.read() as c:
            known = runs.list_(c, POLICY)
            made = [one.id for one in versions.list_(c, POLICY) if one.state is not VersionState.REJECTED]
        where = self.settings.home / "runs"
        if not known:
            raise RunError(f"the training run did not even begin; its output is in {where}")
        done_by = known[-1]
        if max(made) == 0:
            raise RunError(f"the run published no version ({done_by.message}); its log is in {where}")
        self.console.print(
            f"run {done_by.id} {done_by.state} after {done_by.step} batches: {done_by.message or 'all done'}"
        )
        await self._until(server, lambda live: live == max(made), f"version {max(made)} did not go live")
        return done_by.tau

    async def _switch(self, server: Server, verb: str, *arguments: str) -> None:
        """`onlinerl versions VERB`, as a person would type it; waits until it has taken effect."""
        before = self._live(server)
        command = ["versions", verb, *arguments, "-c", str(self.file)]
        line = [sys.executable, "-c", "from onlinerl.cli import main; main()", *command]
        process = await asyncio.create_subprocess_exec(
            *line,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=runs_command.child_environment({}),
        )
        output, _ = await process.communicate()
        if process.returncode != 0:
            raise RunError(f"`onlinerl versions {verb}` failed: {output.decode(errors='replace').strip()}")
        await self._until(
            server, lambda live: live != before, f"`onlinerl versions {verb}` did not take effect"
        )
        live = self._live(server)
        with server.database.read() as c:
            switched = versions.get(c, POLICY, live).live_at or math.nan
        await asyncio.sleep(2 * WATCH)  # until the watch has seen it, too
        took = self.journal.live[-1][0] - switched
        self.journal.switches[verb] = took
        self.console.print(
            f"`onlinerl {' '.join(command[:-2])}`: version {before} → {live}, "
            f"new requests got it {took:.2f} s after the switch"
        )

    async def _examine(self, server: Server, version: int, advance: Callable[[], None]) -> HeldOut:
        """Greedy answers of a pinned version to the held-out prompts."""
        gate = asyncio.Semaphore(4)
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=300)) as session:

            async def ask(prompt: FimPrompt) -> tuple[str, str]:
                body = {
                    "model": f"{POLICY}@{version}",
                    "prompt": prompt.prefix,
                    "suffix": prompt.suffix,
                    "max_tokens": 24,
                    "temperature": 0,
                }
                async with gate, session.post(f"{server.url}/v1/completions", json=body) as response:
                    if response.status != 200:
                        raise OnlineRLError(
                            f"version {version} did not answer a held-out prompt: HTTP {response.status}"
                        )
                    answer = await response.json()
                advance()
                return answer["choices"][0]["text"], prompt.middle

            return held_out_scores(await asyncio.gather(*map(ask, self.exam)), self.taste)

    async def _watch(self, server: Server) -> None:
        """Note when new requests begin to get another version."""
        while True:
            live = server.publishers[POLICY].live
            if live is not None and (not self.journal.live or self.journal.live[-1][1] != live):
                self.journal.live.append((time.time(), live))
            await asyncio.sleep(WATCH)

    async def _until(self, server: Server, fits: Callable[[int], bool], otherwise: str) -> None:
        """Wait until the version that new requests get fits."""
        started = time.perf_counter()
        while not fits(self._live(server)):
            if time.perf_counter() - started > PATIENCE:
                raise RunError(f"{otherwise} within {PATIENCE:.0f} s")
            await asyncio.sleep(0.005)

    def _live(self, server: Server) -> int:
        live = server.publishers[POLICY].live
        if live is None:
            raise OnlineRLError(
                "no engine serves any more; the logs are in " + str(self.settings.home / "logs")
            )
        return live

    @contextmanager
    def _bar(self, words: str, total: int) -> Iterator[Callable[[], None]]:
        columns = (
            TextColumn("{task.description:28}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
        )
        with Progress(*columns, console=self.console) as bar:
            row = bar.add_task(words, total=total)
            yield lambda: bar.advance(row)

    # ---------------------------------------------------------------------------------------- the end

    def _conclude(
        self, counts: Sequence[VersionCounts], tau: float, last: int, exams: Mapping[int, HeldOut]
    ) -> None:
        say = self.console.print
        rewards = {row.version: reward_per_opportunity(row, tau) for row in counts}
        say(version_table(counts, rewards, tau))
        say(exam_table(exams))
        gain = difference(rewards[last], rewards[0])
        say(f"Version {last} against version 0, reward per opportunity at τ = {tau:.3f}: [bold]{gain}[/bold]")
        if gain.low > 0:
            say("The 95 % interval of the difference lies above 0: the developers are better served.")
        else:
            say(
                f"The 95 % interval of the difference reaches {gain.low:+.3f} and so does not clear 0: "
                f"with {sum(row.opportunities for row in counts)} interactions on this machine the gain was "
                "too small for its noise. Nothing was proven in this run."
            )
        seconds = time.time() - self.journal.started
        totals = traffic_totals(self.journal.reports)
        say(
            f"{totals['requests']} requests, {totals['errors']} errors, feedback: "
            + ", ".join(f"{name} {number}" for name, number in sorted(totals["feedback"].items()))
        )
        plot = self.out / "demo.png"
        draw(self.journal, plot)
        record = {
            "taste": self.taste.words,
            "tau": tau,
            "seconds": seconds,
            "versions": [
                {**asdict(row), "reward_per_opportunity": asdict(rewards[row.version])} for row in counts
            ],
            "difference": asdict(gain),
            "held_out": {str(version): asdict(scores) for version, scores in exams.items()},
            "switch_seconds": self.journal.switches,
            "traffic": totals,
        }
        (self.out / "demo.json").write_text(json.dumps(record, indent=2, ensure_ascii=False) + "\n")
        say(f"{seconds / 60:.1f} minutes. Plot: {plot}, numbers: {self.out / 'demo.json'}")
        self._verify(counts, totals)

    def _verify(self, counts: Sequence[VersionCounts], totals: Mapping[str, Any]) -> None:
        """RunError unless the ring really turned."""
        lived = {version for _, version in self.journal.live}
        faults = []
        if len(lived - {0}) < 2:
            faults.append(f"only versions {sorted(lived)} were live")
        if not {"rollback", "promote"} <= self.journal.switches.keys():
            faults.append("the roll-back did not happen")
        if not totals["feedback"].get("matched"):
            faults.append("no feedback was joined")
        if totals["errors"] > totals["requests"] // 50:
            faults.append(
                f"{totals['errors']} errors in {totals['requests']} requests: {totals['error_kinds']}"
            )
        if faults:
            raise RunError("the ring did not turn as it should: " + "; ".join(faults))
