"""An offline run with its folder: `home/validation/NAME`."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from onlinerl import config
from onlinerl.learning.log import RunLog
from onlinerl.validate.course import Course, check
from onlinerl.validate.report import COLUMNS, Report, shown
from onlinerl.validate.save import save
from onlinerl.weights.models import resolve_model


def run(settings: config.Settings, *, quiet: bool = False) -> dict[str, Any]:
    """Do what `settings.validation` says; returns what report.json holds.

    `quiet`: nothing on standard output. An older report of the same name is replaced. Raises SettingsError,
    ModelError, RunError; a guard that trips is no error here: the report tells it.
    """
    check(settings)
    mine = settings.validation
    folder = settings.home / "validation" / mine.name
    folder.mkdir(parents=True, exist_ok=True)
    for old in ("report.json", "report.md", "curve.png", "log.jsonl"):
        (folder / old).unlink(missing_ok=True)
    shutil.rmtree(folder / "tensorboard", ignore_errors=True)
    policy = settings.policies[mine.policy or next(iter(settings.policies))]
    model = resolve_model(policy.model)
    with RunLog(folder, total=mine.completions // policy.train.batch) as log:
        course = Course(settings, model, folder, log)
        try:
            report = course.go()
            tree = report.write(folder, settings, course.device)
            if mine.save is not None:
                save(model, course.tensors(), mine.save)
        finally:
            course.close()
    if not quiet:
        tell(report, folder)
    return tree


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
