"""What an offline run stands on. Loading it proves that the run's inputs are good: until then nothing of an
earlier run is touched."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers.utils import logging as transformers_logging

from onlinerl import config
from onlinerl.datasets.fim import FimPrompt
from onlinerl.errors import SettingsError
from onlinerl.learning.batches import PolicyModel
from onlinerl.learning.devices import device_of, dtype_of, threads_of
from onlinerl.learning.judges import Judge, make_judge
from onlinerl.records import Sample
from onlinerl.validate import data, warmstart
from onlinerl.validate.engine import LocalEngine
from onlinerl.validate.rollouts import Rollouts
from onlinerl.validate.save import check_writable

SCORES = "judge-scores.jsonl"
"""File of the LLM judges' grades, which no later run pays for again."""


@dataclass(frozen=True, slots=True)
class Ground:
    """Made by `laid`, eaten by the course."""

    name: str
    """Of the policy."""
    model: Path
    device: torch.device
    dtype: torch.dtype
    """Of the trainer's matrix products."""
    engine: LocalEngine
    """Has the model as version 0."""
    live: PolicyModel
    """The weights to train."""
    rollouts: Rollouts
    train: Sequence[FimPrompt]
    """To learn from; every prompt leaves room for its answer."""
    test: Sequence[FimPrompt]
    """Held out."""
    account: Mapping[str, Any]
    """Of the prompts, for the report."""
    taught: Sequence[Sample]
    """Of a warm start's file; () where there is none."""
    judge: Judge
    report_judge: Judge
    seconds: float
    """That loading took."""


@contextmanager
def laid(settings: config.Settings, model: Path, name: str) -> Iterator[Ground]:
    """The ground of the policy `name`, whose model is in `model`; its engine ends with the block.

    Raises SettingsError and ModelError for whatever cannot be used.
    """
    began = time.perf_counter()
    mine, policy = settings.validation, settings.policies[name]
    train = policy.train
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    threads = threads_of(train)
    torch.set_num_threads(threads)
    device = device_of(train)
    dtype = dtype_of(train, device)
    split = data.load(mine)
    scores = settings.home / "validation" / SCORES
    judge, report_judge = (make_judge(one, scores) for one in (mine.judge, mine.report_judge))
    engine = LocalEngine(policy.engine, batch=train.batch, threads=threads, quantise=mine.quantise == "int8")
    try:
        engine.read(0, model)
        rollouts = Rollouts(engine, model, name, seed=mine.seed)
        fitting, held = (rollouts.fitting(s, policy.sampling.max_tokens) for s in (split.train, split.test))
        if not fitting or not held:
            raise SettingsError(
                "no prompt leaves room for its answer in the context: lower validation.characters or "
                "sampling.max_tokens"
            )
        live = PolicyModel.load(model, device, dtype, train.lora, train.seed, compile=train.compile)
        if train.recompute is True:
            live.recompute(True)
        if mine.save is not None:
            check_writable(model, live.state())
        too_long = len(split.train) + len(split.test) - len(fitting) - len(held)
        yield Ground(
            name=name,
            model=model,
            device=device,
            dtype=dtype,
            engine=engine,
            live=live,
            rollouts=rollouts,
            train=fitting,
            test=held,
            account={**split.account, "too_long": too_long},
            taught=_taught(mine.warmstart.source, rollouts, policy.sampling.max_tokens),
            judge=judge,
            report_judge=report_judge,
            seconds=time.perf_counter() - began,
        )
    finally:
        engine.stop()


def _taught(source: str, rollouts: Rollouts, longest: int) -> list[Sample]:
    if source in ("none", "accepted"):
        return []
    samples = warmstart.read(Path(source), rollouts, longest)
    if not samples:
        raise SettingsError(
            f"the warm start found nothing to learn from: no completion in {source} has at most {longest} "
            "tokens (sampling.max_tokens) and leaves room for its prompt in the context"
        )
    return samples
