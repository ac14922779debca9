"""What a model forgot: its loss on plain code, read from left to right, and on the middles of FIM prompts.

Both are mean nats per token without any sampling, so that a few hundred texts tell 1 % apart. A run that
pays with the first for a reward made the model worse at what nobody rated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from onlinerl.datasets.fim import FimPrompt
from onlinerl.errors import SettingsError
from onlinerl.learning.batches import PolicyModel, length, microbatches, pack
from onlinerl.records import Sample, Verdict
from onlinerl.validate.estimates import ratio

Encode = Callable[[str], Sequence[int]]
"""Token ids of a text, without special tokens around it (`Codec.encode`)."""
_AT_ONCE = 4096
"""Tokens of a forward pass."""


class Loss(NamedTuple):
    """Mean nats per token. Made by `left_to_right_loss` and `middle_loss`."""

    mean: float
    standard_error: float
    """Texts of one group (a file) are counted together; NaN with fewer than two groups."""
    tokens: int
    """Tokens that were predicted."""


def left_to_right_loss(
    model: PolicyModel | Path,
    encode: Encode,
    texts: Sequence[str],
    *,
    context: int = 512,
    groups: Sequence[str] | None = None,
) -> Loss:
    """Loss on plain text: each text is cut into windows of `context` tokens, of which all but the first
    token are predicted from those before it in the window.

    `model`: in memory, or the folder of any causal language model, which is read in fp32. `groups`: what
    each text belongs to (its file), for the standard error; without it each text stands alone. Raises
    SettingsError when no token is left to predict.
    """
    if context < 2:
        raise ValueError("a window of two tokens at least is needed to predict one")
    rows: list[_Row] = []
    for place, text in enumerate(texts):
        ids = list(encode(text))
        group = str(place) if groups is None else groups[place]
        windows = (ids[start : start + context] for start in range(0, len(ids), context))
        rows += [_Row(window, 1, group) for window in windows if len(window) > 1]
    return _loss(model, rows)


def middle_loss(
    model: PolicyModel | Path,
    encode: Encode,
    prompts: Sequence[FimPrompt],
    prompt_ids: Callable[[FimPrompt], Sequence[int]],
    *,
    stop: int | None = None,
) -> Loss:
    """Loss on what the authors wrote: the tokens of each middle, given the prompt with its FIM markers.

    `prompt_ids` makes the prompt as it is served. `stop`: the end-of-text token, which then counts as
    the middle's last token. Middles of one file are counted together for the standard error.
    """
    rows = []
    for place, one in enumerate(prompts):
        before = list(prompt_ids(one))
        after = [*encode(one.middle), *([] if stop is None else [stop])]
        if before and after:
            rows.append(_Row([*before, *after], len(before), one.path or str(place)))
    return _loss(model, rows)


def plain(prompts: Iterable[FimPrompt]) -> tuple[list[str], list[str]]:
    """(texts, groups) for `left_to_right_loss`: the prompts' windows as they stand in their files."""
    chosen = list(prompts)
    texts = [one.prefix + one.middle + one.suffix for one in chosen]
    return texts, [one.path or str(place) for place, one in enumerate(chosen)]


class _Row(NamedTuple):
    ids: list[int]
    first: int
    """Place of the first token that is predicted, 1 at least."""
    group: str


def _loss(model: PolicyModel | Path, rows: Sequence[_Row]) -> Loss:
    if not rows:
        raise SettingsError("there is no token to predict: the texts are empty or of one token each")
    if isinstance(model, Path):
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        model = PolicyModel.load(model, device, torch.float32)
    sums: dict[str, float] = {}
    counts: dict[str, int] = {}
    for row, nats in _each(model, rows):
        sums[row.group] = sums.get(row.group, 0.0) + nats
        counts[row.group] = counts.get(row.group, 0) + len(row.ids) - row.first
    found = ratio([*sums.values()], [float(counts[group]) for group in sums], [*sums])
    return Loss(found.mean, found.error, sum(counts.values()))


@torch.no_grad()
def _each(policy: PolicyModel, rows: Sequence[_Row]) -> Iterator[tuple[_Row, float]]:
    """Each row and the sum of its nats."""
    samples = [_sample(row) for row in rows]
    for chosen in microbatches([length(sample) for sample in samples], _AT_ONCE):
        packed = pack(samples, chosen, policy.device, padded=policy.padded)
        nats = torch.zeros(len(chosen), dtype=torch.float64, device=policy.device)
        nats.index_add_(0, packed.sequence, -policy.score(packed).logprobs.double())
        yield from zip([rows[place] for place in chosen], nats.tolist(), strict=True)


def _sample(row: _Row) -> Sample:
    """The row as the trainer scores an answer: the head is the prompt, the rest the answer."""
    answer = tuple(row.ids[row.first :])
    return Sample(
        id="", index=0, policy="", version=0, project="", user="", at=0.0,
        prompt_ids=tuple(row.ids[: row.first]), completion_ids=answer,
        behavior_logprobs=(0.0,) * len(answer), loss_mask=(True,) * len(answer), temperature=1.0, top_p=1.0,
        language="", multiline=False, verdict=Verdict.ACCEPTED, verdict_source="",
    )  # fmt: skip
