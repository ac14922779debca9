"""What travels here: studies as lists of runs, and the outcome of each run as one JSON line."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

State = Literal["finished", "guard", "failed"]
"""finished: all its completions; guard: a band stopped it; failed: an error, see the message."""


@dataclass(frozen=True, slots=True)
class Run:
    """One learning run. Made by `catalogue`, eaten by a worker."""

    study: str
    arm: str
    """What is varied. " · " parts a label from the panel that it is drawn in."""
    seed: int
    overrides: tuple[str, ...] = ()
    """Dotted settings of `onlinerl.validate`, `name=value`."""
    cost: float = 1.0
    """Expected time, in units of one run of the headline; orders the queue and gives the ETA."""
    rank: int = 0
    """Runs of a lower rank come first: 0 what a table needs, 1 further seeds, 2 what is nice to have."""
    start: str | None = None
    """Key of the run whose saved model this one starts from; it waits for it. None: the base model."""
    save: bool = False
    """Keep the final weights in the folder `models` of the output, for runs that start from them."""
    extras: tuple[str, ...] = ()
    """What else is measured at the end, by the names in `performer.EXTRAS`."""
    sabotage: str = ""
    """What goes wrong on purpose, by the names in `sabotage.KINDS`."""

    @property
    def key(self) -> str:
        """Study, arm and seed: unique."""
        return f"{self.study}/{self.arm}/{self.seed}"

    @staticmethod
    def example() -> Run:
        """A small one, for tests and documentation."""
        return Run("headline", "ours", 0, ("train.lr=3e-5",))


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a study's table: a metric of the outcome and how it is written."""

    metric: str
    """Key in `Outcome.final` or, with `at`, in `Outcome.extras`."""
    title: str
    form: str = ".3f"
    """Format of the number, `.1%` for shares."""
    at: Literal["final", "start", "gain", "extras"] = "final"
    """The end, the start, the end minus the start within each run, or what was measured besides."""


@dataclass(frozen=True, slots=True)
class Study:
    """A question and the runs that answer it."""

    name: str
    title: str
    """One sentence, for the heading of its table and plot."""
    runs: tuple[Run, ...]
    columns: tuple[Column, ...]
    compare: tuple[tuple[str, str], ...] = ()
    """Pairs of arms whose difference is reported."""
    compared: tuple[str, ...] = ()
    """Metrics of those differences."""
    reach: tuple[str, ...] = ()
    """Metrics of which is told when the one's mean curve reaches the other's final level."""
    curves: tuple[str, ...] = ()
    """Metrics of the learning curves that are plotted."""
    floor: tuple[str, float] | None = None
    """A curve's metric, and the share of its start that it must not fall below: a line in the plot."""
    one_start: bool = True
    """All arms begin alike: their table has a row for it."""
    units: Literal["seeds", "users"] = "seeds"
    """What the runs of an arm differ in."""

    @property
    def arms(self) -> tuple[str, ...]:
        """Names in the order of the list."""
        return tuple(dict.fromkeys(run.arm for run in self.runs))


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one run said. One JSON line of `DIR/STUDY.jsonl`; eaten by `report`."""

    study: str
    arm: str
    seed: int
    state: State
    message: str
    """Why it ended, when it did not end by itself."""
    seconds: float
    overrides: tuple[str, ...] = ()
    start: Mapping[str, float] = field(default_factory=dict)
    """Metrics before the first step."""
    final: Mapping[str, float] = field(default_factory=dict)
    """Metrics of the last good weights."""
    errors: Mapping[str, float] = field(default_factory=dict)
    """Standard errors of `final` over prompts, clustered by file."""
    curve: tuple[Mapping[str, float], ...] = ()
    """Metrics at a number of `completions`, in order."""
    extras: Mapping[str, Any] = field(default_factory=dict)

    @property
    def key(self) -> str:
        """As `Run.key`."""
        return f"{self.study}/{self.arm}/{self.seed}"

    @staticmethod
    def example() -> Outcome:
        """A small one, for tests and documentation."""
        return Outcome("headline", "ours", 0, "finished", "", 60.0, final={"greedy.reward": 0.1})


def append(folder: Path, outcome: Outcome) -> None:
    """Add a line to the study's file, in the place of one that a kill cut short."""
    folder.mkdir(parents=True, exist_ok=True)
    line = json.dumps(asdict(outcome), allow_nan=True, separators=(",", ":")) + "\n"
    with (folder / f"{outcome.study}.jsonl").open("ab+") as file:
        file.seek(0)
        file.truncate(file.read().rfind(b"\n") + 1)
        file.write(line.encode())


def read(folder: Path, studies: Iterable[str]) -> list[Outcome]:
    """All outcomes of `studies`; of several with one key the last. A last line cut by a kill is left out."""
    found: dict[str, Outcome] = {}
    for study in studies:
        path = folder / f"{study}.jsonl"
        if not path.exists():
            continue
        lines = path.read_text(encoding="utf-8").split("\n")
        for number, line in enumerate(lines):
            if not line:
                continue
            try:
                row = json.loads(line)
            except json.JSONDecodeError:
                if number == len(lines) - 1:  # no newline after it: it was being written
                    continue
                raise
            row["overrides"], row["curve"] = tuple(row["overrides"]), tuple(row["curve"])
            outcome = Outcome(**row)
            found[outcome.key] = outcome
    return list(found.values())


def ready(waiting: Sequence[Run], done: Mapping[str, State]) -> list[Run]:
    """Runs that can begin now: those whose start is the base model, or a run that left good weights."""
    return [run for run in waiting if run.start is None or done.get(run.start) in ("finished", "guard")]


def order(runs: Iterable[Run]) -> list[Run]:
    """The queue: by rank, then by study as listed, then what others wait for, then the longest."""
    listed = list(runs)
    wanted = {run.start for run in listed}
    places = {study: place for place, study in enumerate(dict.fromkeys(run.study for run in listed))}
    return sorted(listed, key=lambda run: (run.rank, places[run.study], run.key not in wanted, -run.cost))
