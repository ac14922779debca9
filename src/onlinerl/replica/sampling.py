"""Sampling, and the behaviour log-probability of what was sampled. Pure functions over tensors.

The behaviour distribution is what the token is really drawn from: softmax(logits / temperature), and
for top_p < 1 the smallest set of most probable tokens whose mass reaches top_p, renormalised (Holtzman
et al. 2020, nucleus sampling). Each token takes one uniform number of its own request and inverts the
cumulative distribution with it, so a seed gives the same answer whatever else is in the batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

COLDEST = 1e-6
"""Lower temperatures are taken as this one: it already draws the most probable token, and dividing by less
makes infinities."""


@dataclass(frozen=True, slots=True)
class Drawn:
    """One sampled token with its behaviour log-probability and the most probable alternatives."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


def behaviour_logprobs(logits: Tensor, temperatures: Sequence[float], top_ps: Sequence[float]) -> Tensor:
    """Log of the distribution that is sampled from, [rows, vocabulary], float32.

    `logits` [rows, vocabulary]. A temperature of 0 (greedy) gives the untempered softmax, and top_p
    does not apply there. Tokens outside the nucleus get −inf.
    """
    logits = logits.float()
    if any(t not in (0.0, 1.0) for t in temperatures):
        divisors = torch.tensor([max(t, COLDEST) if t else 1.0 for t in temperatures], device=logits.device)
        logits = logits / divisors[:, None]
    logprobs = torch.log_softmax(logits, dim=-1)
    cut = [row for row, (t, p) in enumerate(zip(temperatures, top_ps, strict=True)) if p < 1 and t > 0]
    if cut:
        rows = logprobs[cut]
        ordered, order = rows.sort(dim=-1, descending=True, stable=True)
        mass = ordered.double().exp().cumsum(dim=-1)
        limits = torch.tensor([top_ps[row] for row in cut], device=logits.device, dtype=torch.double)
        # A token stays when the mass before it is still short of top_p: the first one always does.
        outside = (mass - ordered.double().exp()) >= limits[:, None]
        outside[:, 0] = False
        rows = rows.masked_fill(torch.zeros_like(outside).scatter_(1, order, outside), float("-inf"))
        logprobs[cut] = torch.log_softmax(rows, dim=-1)
    return logprobs


def draw(
    logits: Tensor,
    temperatures: Sequence[float],
    top_ps: Sequence[float],
    uniforms: Sequence[float],
    tops: Sequence[int],
) -> list[Drawn]:
    """Sample one token for each row of `logits` [rows, vocabulary].

    `uniforms` are numbers in [0, 1), one a row; greedy rows (temperature 0) ignore theirs. `tops` says
    how many alternatives to report. A row of broken weights gives logprob NaN, which the caller checks.
    """
    logprobs = behaviour_logprobs(logits, temperatures, top_ps)
    if any(temperatures):
        tokens = _invert(logprobs, torch.tensor(uniforms, dtype=torch.double, device=logprobs.device))
    else:
        tokens = logprobs.argmax(dim=-1)
    greedy = [row for row, temperature in enumerate(temperatures) if temperature == 0]
    if greedy and len(greedy) < len(temperatures):
        tokens[greedy] = logprobs[greedy].argmax(dim=-1)
    chosen = logprobs.gather(1, tokens[:, None])[:, 0]
    # Doubles hold token ids exactly: one transfer from the device instead of two.
    pairs = torch.stack((tokens.double(), chosen.double())).tolist()
    most = min(max(tops, default=0), logprobs.shape[-1])
    alternatives: list[tuple[tuple[int, float], ...]] = [()] * len(tops)
    if most:
        values, ids = logprobs.topk(most, dim=-1)
        for row, (count, row_ids, row_values) in enumerate(
            zip(tops, ids.tolist(), values.tolist(), strict=True)
        ):
            alternatives[row] = tuple(
                (i, v) for i, v in zip(row_ids[:count], row_values[:count], strict=True) if v > float("-inf")
            )
    return [
        Drawn(int(token), logprob, top)
        for token, logprob, top in zip(pairs[0], pairs[1], alternatives, strict=True)
    ]


def draw_whole(logits: Tensor, temperatures: Tensor, uniforms: Tensor) -> Tensor:
    """As `draw` where every top_p is 1, from tensors to a tensor, so that nothing waits for the device.

    `logits` [rows, vocabulary], `temperatures` and `uniforms` [rows] in float64; returns [rows, 2] in
    float64: the token (doubles hold token ids exactly) and its behaviour log-probability.
    """
    greedy = temperatures == 0
    divisors = temperatures.clamp(min=COLDEST).masked_fill_(greedy, 1.0).float()
    logprobs = torch.log_softmax(logits.float() / divisors[:, None], dim=-1)
    tokens = torch.where(greedy, logprobs.argmax(dim=-1), _invert(logprobs, uniforms))
    chosen = logprobs.gather(1, tokens[:, None])[:, 0]
    return torch.stack((tokens.double(), chosen.double()), dim=1)


def _invert(logprobs: Tensor, uniforms: Tensor) -> Tensor:
    """The first token whose cumulative probability exceeds the uniform number, for each row.

    The sum runs in double precision: with 150,000 tokens a float32 sum is off by more than a rare
    token's probability.
    """
    cumulative = logprobs.exp().double().cumsum_(dim=-1)
    total = cumulative[:, -1:]
    # Not 1: the rounded sum decides, and the target must stay below it or the search runs off the end.
    targets = torch.minimum(uniforms[:, None] * total, total * (1 - 1e-12))
    return torch.searchsorted(cumulative, targets, right=True)[:, 0].clamp_(max=logprobs.shape[-1] - 1)
