"""What an offline run leaves: report.json, report.md, curve.png."""

from __future__ import annotations

import importlib.metadata
import json
import math
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from onlinerl import config
from onlinerl.validate.estimates import Estimate
from onlinerl.validate.evaluate import as_json
from onlinerl.validate.forgetting import Loss

LIBRARIES = ("onlinerl", "torch", "transformers", "tokenizers", "numpy", "peft")
COLUMNS: Mapping[str, str] = {
    "judge/train": "judge (train)",
    "judge/report": "judge (report)",
    "accept": "accepted of all",
    "accept_shown": "accepted of shown",
    "shown": "shown",
    "reward": "reward per opportunity",
    "exact": "exact match",
    "similarity": "edit similarity",
    "characters": "characters",
    "parses": "parses",
}
"""Metrics of the table, by their names in report.json."""


@dataclass(frozen=True, slots=True)
class Stage:
    """One row of the table. Made by the course."""

    name: str
    """base, warm start or RL."""
    step: int
    """Steps of learning from rewards in its weights."""
    completions: int
    """Sampled to learn from until then."""
    samples: int
    """Completions of the warm start."""
    metrics: Mapping[str, Mapping[str, Estimate]]
    """By `greedy` (temperature 0) and `sampled` (as served), then by metric."""
    gains: Mapping[str, Mapping[str, Estimate]]
    """Over the base, paired by prompt; empty for the base."""
    losses: Mapping[str, Loss]
    """left_to_right and middle, nats per token; empty where they were not asked for."""
    examples: Sequence[tuple[str, str]]
    """(greedy completion, what the author wrote)."""

    def summary(self) -> dict[str, float]:
        """The means, for the log."""
        return {
            f"{how}/{name}": round(one.mean, 4)
            for how, found in self.metrics.items()
            for name, one in found.items()
            if not math.isnan(one.mean)
        }


@dataclass(frozen=True, slots=True)
class Point:
    """A point of the learning curve, on fewer prompts than the table."""

    step: int
    completions: int
    metrics: Mapping[str, Mapping[str, Estimate]]


@dataclass(frozen=True, slots=True)
class Report:
    """An offline run. Made by the course, eaten by people and by studies."""

    stages: Sequence[Stage]
    curve: Sequence[Point]
    tau: float
    """Of the rewards that were learned from."""
    tau_report: float
    """Of the reported reward per opportunity."""
    steps: int
    completions: int
    stopped: str
    """What a guard or the judge's failure said; "" when the run reached its end."""
    ended: str
    left_out: Mapping[str, int]
    """Completions that were not learned from, by reason."""
    judges: Mapping[str, str]
    """Names of the judges to train and to report with."""
    judge_faults: Mapping[str, str]
    """What the judges failed on while held-out answers were scored."""
    data: Mapping[str, Any]
    seconds: Mapping[str, float]

    def as_json(self, settings: config.Settings, device: torch.device) -> dict[str, Any]:
        """Plain containers, with all that is needed to repeat the run."""
        return {
            "name": settings.validation.name,
            "seed": settings.validation.seed,
            "ended": self.ended,
            "stopped_by": self.stopped or None,
            "stages": [
                {
                    "name": one.name,
                    "step": one.step,
                    "completions": one.completions,
                    "samples": one.samples,
                    "metrics": {how: as_json(found) for how, found in one.metrics.items()},
                    "gains": {how: as_json(found) for how, found in one.gains.items()},
                    "losses": {name: _loss(loss) for name, loss in one.losses.items()},
                    "examples": [{"completion": c, "author": a} for c, a in one.examples],
                }
                for one in self.stages
            ],
            "curve": [
                {
                    "step": one.step,
                    "completions": one.completions,
                    "metrics": {how: as_json(found) for how, found in one.metrics.items()},
                }
                for one in self.curve
            ],
            "tau": self.tau,
            "tau_report": self.tau_report,
            "steps": self.steps,
            "completions": self.completions,
            "left_out": dict(self.left_out),
            "judges": dict(self.judges),
            "judge_faults": dict(self.judge_faults),
            "data": dict(self.data),
            "seconds": {name: round(value, 3) for name, value in self.seconds.items()},
            "seconds_per_step": self._per_step(),
            "hardware": hardware(device),
            "libraries": libraries(),
            "settings": settings.model_dump(mode="json", exclude={"server", "store"}),
        }

    def _per_step(self) -> dict[str, float] | None:
        if not self.steps:
            return None
        spent = ("rollouts", "rating", "training", "publishing")
        return {name: round(self.seconds.get(name, 0.0) / self.steps, 4) for name in spent}

    def as_markdown(self, name: str) -> str:
        """A table of the stages at temperature 0 and as served."""
        lines = [f"# Offline validation: {name}", ""]
        for how, words in (("greedy", "temperature 0"), ("sampled", "the serving temperature")):
            lines += [f"Held-out prompts, {words}; 95 % intervals, prompts clustered by file.", ""]
            lines += ["| | " + " | ".join(one.name for one in self.stages) + " | gain |"]
            lines += ["|---" * (len(self.stages) + 2) + "|"]
            for metric, title in COLUMNS.items():
                cells = [shown(one.metrics[how][metric]) for one in self.stages]
                gain = self.stages[-1].gains.get(how, {}).get(metric)
                lines.append(f"| {title} | {' | '.join(cells)} | {shown(gain) if gain else ''} |")
            lines.append("")
        losses = [
            f"{one.name} {name} {loss.mean:.4f}" for one in self.stages for name, loss in one.losses.items()
        ]
        lines += [f"Loss in nats per token: {', '.join(losses)}.", ""] if losses else []
        lines += [f"Judge: {fault}." for fault in self.judge_faults.values()]
        lines += [
            f"Steps {self.steps}, completions {self.completions}; τ of the rewards {self.tau:.4f}, of the "
            f"reported reward {self.tau_report:.4f}. Judges: {self.judges['train']} to train, "
            f"{self.judges['report']} to report. Ended: {self.ended}.",
            "",
            f"Left out: {', '.join(f'{n} {why}' for why, n in self.left_out.items()) or 'nothing'}.",
            "",
        ]
        return "\n".join(lines)

    def write(self, folder: Path, settings: config.Settings, device: torch.device) -> dict[str, Any]:
        """Into `folder`; returns what report.json holds."""
        tree = self.as_json(settings, device)
        (folder / "report.json").write_text(json.dumps(tree, indent=1, allow_nan=False) + "\n", "utf-8")
        (folder / "report.md").write_text(self.as_markdown(settings.validation.name), "utf-8")
        if len(self.curve) > 1:
            draw(self.curve, folder / "curve.png")
        return tree


def _loss(loss: Loss) -> dict[str, float | None]:
    error = None if math.isnan(loss.standard_error) else loss.standard_error
    return {"mean": loss.mean, "standard_error": error, "tokens": loss.tokens}


def shown(one: Estimate) -> str:
    """For people.

    >>> shown(Estimate(0.5, 0.05)), shown(Estimate(4.25, math.nan))
    ('0.500 [0.402, 0.598]', '4.250')
    """
    if math.isnan(one.mean):
        return "–"
    if math.isnan(one.error):
        return f"{one.mean:.3f}"
    return f"{one.mean:.3f} [{one.low:.3f}, {one.high:.3f}]"


def draw(curve: Sequence[Point], path: Path) -> None:
    """Judge, reward per opportunity and rates over the completions used, as a PNG."""
    figure = Figure(figsize=(11, 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    plots = figure.subplots(1, 3)
    groups = (("judge/train", "judge/report"), ("reward",), ("accept_shown", "shown"))
    for axes, names in zip(plots, groups, strict=True):
        for name in names:
            kept = [
                (one.completions, found)
                for one in curve
                if not math.isnan((found := one.metrics["sampled"][name]).mean)
            ]
            at = [completions for completions, _ in kept]
            axes.plot(at, [found.mean for _, found in kept], label=COLUMNS[name], marker=".")
            low, high = [found.low for _, found in kept], [found.high for _, found in kept]
            axes.fill_between(at, low, high, alpha=0.2)
        axes.set_xlabel("completions used")
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
    figure.savefig(path, dpi=120)


def hardware(device: torch.device) -> str:
    """What it ran on, without a name."""
    if device.type == "cuda":
        return f"{torch.cuda.get_device_name(device)}, CUDA {torch.version.cuda}"
    return f"{platform.machine()} CPU, {torch.get_num_threads()} torch threads"


def libraries() -> dict[str, str]:
    """Versions of what decides the numbers."""
    found = {"python": platform.python_version()}
    for name in LIBRARIES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue  # run from a source tree, or not needed here
    return found
