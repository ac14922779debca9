"""An offline run with its folder: `home/validation/NAME`."""

from __future__ import annotations

import contextlib
import fcntl
import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from onlinerl import config
from onlinerl.datasets.fim import FimPrompt
from onlinerl.errors import RunBusy, RunError
from onlinerl.learning.judges import CHARACTERS_PER_TOKEN, estimate
from onlinerl.learning.log import RunLog
from onlinerl.validate.course import Course, check, policy_of
from onlinerl.validate.ground import Ground, laid
from onlinerl.validate.report import COLUMNS, Report, shown
from onlinerl.validate.save import save, staged
from onlinerl.weights.models import resolve_model


def run(settings: config.Settings, *, quiet: bool = False, starts: Path | None = None) -> dict[str, Any]:
    """Do what `settings.validation` says; returns what report.json holds.

    `quiet`: nothing on standard output. `starts`: folder of what models were worth before they learned, for
    runs that begin alike: the first measures it. An older report of the same name is replaced, once all that
    this run needs was found to be good. Raises SettingsError, ModelError, RunError, RunBusy where another run
    of that name goes on; a guard that trips is no error here: the report tells it.
    """
    check(settings)
    mine = settings.validation
    name = policy_of(settings)
    model = resolve_model(settings.policies[name].model)
    folder = settings.home / "validation" / mine.name
    saving = contextlib.nullcontext() if mine.save is None else staged(mine.save)
    try:
        with _alone(folder), saving as staging, laid(settings, model, name) as ground:
            return _run(settings, ground, folder, staging, quiet=quiet, starts=starts)
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
    ground: Ground,
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
    batch = settings.policies[ground.name].train.batch
    with RunLog(folder, total=mine.completions // batch) as log:
        for words in costs(settings, ground):
            log.event("cost", text=words)
            print(words, file=sys.stderr)
        course = Course(settings, ground, log, starts)
        try:
            report = course.go()
            tree = report.write(folder, settings, ground.device)
            if mine.save is not None and staging is not None:
                share = save(ground.model, course.tensors(), staging, mine.save)
                log.event("saved", batch=course.step, changed=share)
                if not share:
                    words = (
                        f"{mine.save} has the very weights of {ground.model}: what {course.step} steps "
                        "taught is nothing, or too small for their number format (train.lr)"
                    )
                    log.event("warning", batch=course.step, text=words)
                    print(words, file=sys.stderr)
        except KeyboardInterrupt:
            log.event("end", batch=course.step, message="interrupted")
            raise
        finally:
            course.close()
    if not quiet:
        tell(report, folder)
    return tree


def costs(settings: config.Settings, ground: Ground) -> list[str]:
    """What the LLM judges will cost at most, a sentence each; [] where none is asked.

    By the lengths of the very prompts; of an answer's nothing is known but its most tokens.
    """
    mine = settings.validation
    policy = settings.policies[ground.name]
    steps = mine.completions // policy.train.batch
    warm = mine.warmstart.source
    stages = 1 + (warm != "none") + (steps > 0)  # what has not moved is not measured again
    points = steps // mine.evaluate_every if mine.evaluate_every else 0  # the first is of the base's answers
    answer = policy.sampling.max_tokens * CHARACTERS_PER_TOKEN

    def asked(*kinds: tuple[Sequence[FimPrompt], float]) -> tuple[int, float]:
        """(pairs, their mean characters) of prompts that get so many answers each."""
        pairs = sum(times * len(prompts) for prompts, times in kinds)
        characters = sum(
            times * sum(len(p.prefix) + len(p.suffix) + len(p.middle) for p in prompts)
            for prompts, times in kinds
        )
        return round(pairs), characters / pairs + answer

    held_out = ((ground.test, 2 * stages), (ground.test[: mine.evaluate_prompts], 2 * points))
    learned = mine.completions if mine.rater == "judge" else 0
    if mine.rater == "judge" and warm == "accepted":
        learned += mine.warmstart.completions
    judges = (
        ("to train", mine.judge, asked(*held_out, (ground.train, learned / len(ground.train)))),
        ("to report", mine.report_judge, asked(*held_out)),
    )
    return [
        f"judge {words}: {estimate(judge, pairs, characters).words}"
        for words, judge, (pairs, characters) in judges
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
