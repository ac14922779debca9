"""An offline run with its folder: `home/validation/NAME`."""

from __future__ import annotations

import contextlib
import fcntl
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from onlinerl import config
from onlinerl.datasets.fim import LONGEST_MIDDLE
from onlinerl.errors import RunBusy, RunError
from onlinerl.learning.judges import estimate
from onlinerl.learning.log import RunLog
from onlinerl.validate.course import Course, check, policy_of
from onlinerl.validate.report import COLUMNS, Report, shown
from onlinerl.validate.save import save, staged
from onlinerl.weights.models import resolve_model


def run(settings: config.Settings, *, quiet: bool = False, starts: Path | None = None) -> dict[str, Any]:
    """Do what `settings.validation` says; returns what report.json holds.

    `quiet`: nothing on standard output. `starts`: folder of what models were worth before they learned, for
    runs that begin alike: the first measures it. An older report of the same name is replaced. Raises
    SettingsError, ModelError, RunError, RunBusy where another run of that name goes on; a guard that trips is
    no error here: the report tells it.
    """
    check(settings)
    mine = settings.validation
    model = resolve_model(settings.policies[policy_of(settings)].model)
    folder = settings.home / "validation" / mine.name
    saving = contextlib.nullcontext() if mine.save is None else staged(mine.save)
    try:
        with _alone(folder), saving as staging:
            return _run(settings, model, folder, staging, quiet=quiet, starts=starts)
    except OSError as error:  # the disk is full, or may not be written to
        raise RunError(f"the files of the run: {error}") from error


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """The folder is this run's until the process ends, however it ends."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RunBusy(
                f"another validation writes into {folder}: give this one another name with validation.name"
            ) from None
        yield


def _run(
    settings: config.Settings,
    model: Path,
    folder: Path,
    staging: Path | None,
    *,
    quiet: bool,
    starts: Path | None,
) -> dict[str, Any]:
    mine = settings.validation
    for old in ("report.json", "report.md", "curve.png", "log.jsonl"):
        (folder / old).unlink(missing_ok=True)
    shutil.rmtree(folder / "tensorboard", ignore_errors=True)
    batch = settings.policies[policy_of(settings)].train.batch
    with RunLog(folder, total=mine.completions // batch) as log:
        for words in costs(settings):
            log.event("cost", text=words)
            print(words, file=sys.stderr)
        course = Course(settings, model, log, starts)
        try:
            report = course.go()
            tree = report.write(folder, settings, course.device)
            if mine.save is not None and staging is not None:
                save(model, course.tensors(), staging, mine.save)
        except KeyboardInterrupt:
            log.event("end", batch=course.step, message="interrupted")
            raise
        finally:
            course.close()
    if not quiet:
        tell(report, folder)
    return tree


def costs(settings: config.Settings) -> list[str]:
    """What the LLM judges will cost at most, a sentence each; [] where none is asked."""
    mine = settings.validation
    policy = settings.policies[policy_of(settings)]
    steps = mine.completions // policy.train.batch
    points = steps // mine.evaluate_every + 2 if mine.evaluate_every else 0
    stages = 3 if mine.warmstart.source != "none" else 2
    held_out = 2 * (stages * mine.test_prompts + points * mine.evaluate_prompts)
    learned = mine.completions if mine.rater == "judge" else 0
    if mine.rater == "judge" and mine.warmstart.source == "accepted":
        learned += mine.warmstart.completions
    # what the author wrote and the completion stand in the question too
    characters = mine.characters + 2 * LONGEST_MIDDLE
    asked = (("to train", mine.judge, learned + held_out), ("to report", mine.report_judge, held_out))
    return [
        f"judge {words}: {estimate(judge, pairs, characters).words}"
        for words, judge, pairs in asked
        if judge.kind == "llm"
    ]


def tell(report: Report, folder: Path) -> None:
    """The table, for people."""
    console = Console()
    for how, words in (("greedy", "at temperature 0"), ("sampled", "as served")):
        table = Table(title=f"held-out prompts, {words} [95 %]")
        table.add_column("")
        for stage in report.stages:
            table.add_column(stage.name, justify="right")
        for name, title in COLUMNS.items():
            table.add_row(title, *(shown(stage.metrics[how][name]) for stage in report.stages))
        console.print(table)
    console.print(f"{report.steps} steps, {report.completions} completions; {report.ended}")
    console.print(f"report: {folder / 'report.md'}", soft_wrap=True)
