"""What may go wrong on purpose: things that no setting can bring about."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from onlinerl.records import Sample, Verdict

AFTER = 5
"""Optimiser steps that go well before the sabotage."""
_WORTH: Mapping[Verdict, float] = {Verdict.ACCEPTED: 1.0, Verdict.REJECTED: 0.0}


def flipped(sample: Sample) -> float:
    """A reward of somebody's own with its sign turned round by a bug: together with `rewards.weights`
    {verdict: 0} refused answers earn more than accepted ones."""
    return -_WORTH.get(sample.verdict, 0.0)


@contextmanager
def _not_a_number() -> Iterator[None]:
    """One number of one gradient becomes NaN, once, after some steps: a bit that fell over."""
    import torch

    module: Any = torch.nn.utils
    clip: Callable[..., Any] = module.clip_grad_norm_
    calls = 0

    def broken(parameters: list[torch.nn.Parameter], *rest: Any, **named: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == AFTER:
            gradient = next(p.grad for p in parameters if p.grad is not None)
            gradient.view(-1)[0] = math.nan
        return clip(parameters, *rest, **named)

    module.clip_grad_norm_ = broken
    try:
        yield
    finally:
        module.clip_grad_norm_ = clip


KINDS: Mapping[str, Callable[[], AbstractContextManager[None]]] = {"": nullcontext, "nan": _not_a_number}
"""By `Run.sabotage`."""
