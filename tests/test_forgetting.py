"""The loss on plain code is transformers' own, whatever the windows, the layout and the order."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from onlinerl.datasets.fim import FimPrompt
from onlinerl.errors import SettingsError
from onlinerl.learning.batches import PolicyModel
from onlinerl.validate.forgetting import left_to_right_loss, middle_loss, plain
from tests.synthetic import EOS, WORDS, load, tiny_model

CPU = torch.device("cpu")


def encode(text: str) -> list[int]:
    return [int(word[1:]) for word in text.split()]


def text(size: int, seed: int) -> str:
    ids = torch.randint(4, WORDS, (size,), generator=torch.Generator().manual_seed(seed)).tolist()
    return " ".join(f"w{id}" for id in ids)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"), torch.float32)


@torch.no_grad()
def own(model: Any, ids: list[int], *, first: int = 1) -> tuple[float, int]:
    """Nats that transformers counts, as a sum, and of how many tokens."""
    labels = torch.tensor([[-100] * first + ids[first:]])
    count = len(ids) - first
    return model(input_ids=torch.tensor([ids]), labels=labels).loss.item() * count, count


@pytest.mark.parametrize("padded", [False, True])
def test_it_is_the_loss_of_transformers(folder: Path, padded: bool) -> None:
    policy = PolicyModel.load(folder, CPU, torch.float32)
    policy._layout(padded=padded)
    texts = [text(size, size) for size in (40, 7, 16, 23)]
    found = left_to_right_loss(policy, encode, texts, context=16)
    model = load(folder)
    sums = [
        own(model, window)
        for one in texts
        for start in range(0, len(encode(one)), 16)
        if len(window := encode(one)[start : start + 16]) > 1
    ]
    assert found.tokens == sum(count for _, count in sums) == 37 + 6 + 15 + 21
    assert found.mean == pytest.approx(sum(nats for nats, _ in sums) / found.tokens, abs=1e-5)
    assert left_to_right_loss(folder, encode, texts[::-1], context=16).mean == pytest.approx(found.mean)


def test_the_standard_error_counts_a_file_once(folder: Path) -> None:
    texts = [text(12, seed) for seed in range(6)]
    model = load(folder)
    nats = torch.tensor([own(model, encode(one))[0] for one in texts])
    alone = left_to_right_loss(folder, encode, texts)
    # equal weights: the standard error of a mean of six
    assert alone.standard_error == pytest.approx((nats / 11).std().item() / math.sqrt(6), rel=1e-4)
    twice = left_to_right_loss(folder, encode, texts * 2, groups=[str(n) for n in range(6)] * 2)
    assert twice.standard_error == pytest.approx(alone.standard_error, rel=1e-4)
    assert twice.tokens == 2 * alone.tokens
    assert math.isnan(left_to_right_loss(folder, encode, texts, groups=["a"] * 6).standard_error)


def test_middles_are_predicted_after_their_prompts(folder: Path) -> None:
    prompts = [
        FimPrompt(text(9, 1), text(3, 2), text(5, 3), "a.py"),
        FimPrompt(text(4, 4), "", text(2, 5), "b.py"),
    ]

    def prompt_ids(one: FimPrompt) -> list[int]:
        return [0, *encode(one.prefix), 1, *encode(one.suffix), 2]

    model = load(folder)
    sums = []
    for one in prompts:
        before = prompt_ids(one)
        sums.append(own(model, [*before, *encode(one.middle), EOS], first=len(before)))
    found = middle_loss(folder, encode, prompts, prompt_ids, stop=EOS)
    assert found.tokens == 9
    assert found.mean == pytest.approx(sum(nats for nats, _ in sums) / 9, abs=1e-5)
    assert middle_loss(folder, encode, prompts, prompt_ids).tokens == 7


def test_a_disturbed_model_has_forgotten(folder: Path) -> None:
    policy = PolicyModel.load(folder, CPU, torch.float32)
    # The model's own text, so that it has something to lose.
    rows = torch.randint(4, WORDS, (8, 1), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        model = load(folder)
        for _ in range(30):
            rows = torch.cat([rows, model(input_ids=rows).logits[:, -1].argmax(-1, keepdim=True)], 1)
    texts = [" ".join(f"w{id}" for id in row) for row in rows.tolist()]
    before = left_to_right_loss(policy, encode, texts)
    with torch.no_grad():
        for parameter in policy.parameters().values():
            parameter.add_(torch.randn_like(parameter) * 0.3 * parameter.std())
    after = left_to_right_loss(policy, encode, texts)
    assert after.mean > before.mean + 0.1


def test_plain_text_is_the_file_as_it_stands() -> None:
    prompts = [FimPrompt.example(), FimPrompt("a", "c", "b")]
    assert plain(prompts) == (["def twice(x):\n    return 2 * x\n", "abc"], ["twice.py", "1"])


def test_nothing_to_predict_is_an_error(folder: Path) -> None:
    with pytest.raises(SettingsError, match="no token"):
        left_to_right_loss(folder, encode, ["w5", ""])
    with pytest.raises(ValueError, match="two tokens"):
        left_to_right_loss(folder, encode, [text(4, 0)], context=1)
