"""Packing changes nothing but the speed: against one-by-one forward passes of the plain model."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from onlinerl.errors import ModelError
from onlinerl.learning import batches
from onlinerl.learning.batches import PolicyModel, microbatches, pack
from onlinerl.records import Sample, Verdict

WORDS, EOS = 97, 3
CPU = torch.device("cpu")
SHAPE: dict[str, Any] = {
    "vocab_size": WORDS, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256,
    "eos_token_id": EOS, "bos_token_id": None,
}  # fmt: skip


def build(kind: str, folder: Path) -> Path:
    torch.manual_seed(0)
    model = (
        Qwen2ForCausalLM(Qwen2Config(**SHAPE)) if kind == "qwen2" else LlamaForCausalLM(LlamaConfig(**SHAPE))
    )
    for parameter in model.parameters():  # the usual start is so small that every distribution is flat
        parameter.data.mul_(4 if parameter.dim() > 1 else 1)
    model.save_pretrained(folder)
    return folder


@pytest.fixture(params=["qwen2", "llama"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return build(request.param, tmp_path)


def draw(count: int, seed: int = 0) -> list[Sample]:
    rng = random.Random(seed)
    samples = []
    for number in range(count):
        answer = (*(rng.randrange(4, WORDS) for _ in range(rng.choice([0, 1, 4, 9]))), EOS)
        mask = tuple(place < rng.choice([1, len(answer)]) for place in range(len(answer)))
        samples.append(
            Sample(
                id=str(number),
                index=0,
                policy="tab",
                version=0,
                project="p",
                user="u",
                at=0.0,
                prompt_ids=tuple(rng.randrange(4, WORDS) for _ in range(rng.randint(1, 40))),
                completion_ids=answer,
                behavior_logprobs=(-1.0,) * len(answer),
                loss_mask=mask,
                temperature=rng.choice([1.0, 0.7]),
                top_p=1.0,
                language="",
                multiline=False,
                verdict=Verdict.ACCEPTED,
                verdict_source="native",
            )
        )
    return samples


def alone(model: torch.nn.Module, sample: Sample) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probabilities, entropies and show rate by the plain model, full logits, one sample at a time."""
    ids = torch.tensor([[*sample.prompt_ids, *sample.completion_ids]])
    logp = torch.log_softmax(model(input_ids=ids).logits[0].float() / sample.temperature, -1)
    start = len(sample.prompt_ids) - 1
    rows = logp[start : start + len(sample.completion_ids)]
    keep = torch.tensor(sample.loss_mask)
    chosen = rows.gather(-1, torch.tensor(sample.completion_ids)[:, None])[:, 0]
    return chosen[keep], -(rows.exp() * rows).sum(-1)[keep], 1 - rows[0, EOS].exp()


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("budget", [1, 60, 10_000])
def test_packing_equals_one_by_one(folder: Path, padded: bool, budget: int) -> None:
    policy = PolicyModel.load(folder, CPU, torch.float32)
    assert not policy.padded, "this model can be packed"
    policy._layout(padded=padded)
    plain = (
        type(policy.model).from_pretrained(folder, attn_implementation="eager", dtype=torch.float32).eval()
    )
    samples = draw(14)
    groups = microbatches([batches.length(sample) for sample in samples], budget)
    assert sorted(place for group in groups for place in group) == list(range(14))
    for group in groups:
        made = pack(samples, group, CPU, padded=padded)
        scores = policy.score(made)
        expected = [alone(plain, samples[place]) for place in group]
        assert torch.allclose(scores.logprobs, torch.cat([e[0] for e in expected]), atol=1e-5)
        assert torch.allclose(scores.entropy, torch.cat([e[1] for e in expected]), atol=1e-5)
        assert torch.allclose(scores.show, torch.stack([e[2] for e in expected]), atol=1e-5)


def test_gradient_equals_one_by_one(folder: Path) -> None:
    policy = PolicyModel.load(folder, CPU, torch.float32)
    plain = (
        type(policy.model).from_pretrained(folder, attn_implementation="eager", dtype=torch.float32).eval()
    )
    samples = draw(9, seed=1)
    weights = torch.randn(sum(sum(s.loss_mask) for s in samples))
    made = pack(samples, list(range(9)), CPU, padded=False)
    torch.autograd.backward((policy.score(made).logprobs * weights).sum())
    torch.autograd.backward((torch.cat([alone(plain, sample)[0] for sample in samples]) * weights).sum())
    for (name, mine), theirs in zip(policy.model.named_parameters(), plain.parameters(), strict=True):
        assert mine.grad is not None
        assert theirs.grad is not None
        assert torch.allclose(mine.grad, theirs.grad, atol=1e-4, rtol=1e-4), name


def test_logits_in_pieces_are_the_same(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = PolicyModel.load(folder, CPU, torch.float32)
    made = pack(draw(9), list(range(9)), CPU, padded=False)
    whole = policy.score(made)
    torch.autograd.backward(whole.logprobs.sum())
    grads = {name: p.grad.clone() for name, p in policy.parameters().items() if p.grad is not None}
    policy.model.zero_grad()
    monkeypatch.setattr(batches, "HEAD_ELEMENTS", 3 * WORDS)
    pieces = policy.score(made)
    assert torch.allclose(whole.logprobs, pieces.logprobs, atol=1e-6)
    assert torch.allclose(whole.show, pieces.show, atol=1e-6)
    torch.autograd.backward(pieces.logprobs.sum())
    for name, parameter in policy.parameters().items():
        assert parameter.grad is not None
        assert torch.allclose(parameter.grad, grads[name], atol=1e-5), name


def test_only_needed_tokens_are_read() -> None:
    sample = draw(1)[0]
    cut = Sample(**{**{f: getattr(sample, f) for f in Sample.__slots__}, "prompt_ids": (5, 6, 7),
                    "completion_ids": (8, 9, 10, EOS), "loss_mask": (True, True, False, False),
                    "behavior_logprobs": (0.0,) * 4})  # fmt: skip
    made = pack([cut], [0], CPU, padded=False)
    assert made.input_ids.tolist() == [[5, 6, 7, 8]], "the last judged token and what follows are not read"
    assert made.targets.tolist() == [8, 9]
    assert made.select.tolist() == [2, 3, 2]


def test_microbatches_keep_the_budget() -> None:
    lengths = [30, 5, 50, 20, 20, 200]
    groups = microbatches(lengths, 60)
    assert groups[0] == [5], "one that is larger than the budget stands alone"
    for group in groups[1:]:
        assert sum(lengths[place] for place in group) <= 60
    assert sum(len(group) for group in groups) == 6


def test_samples_do_not_see_each_other(folder: Path) -> None:
    policy = PolicyModel.load(folder, CPU, torch.float32)
    samples = draw(6, seed=2)
    other = draw(6, seed=3)
    mixed = [samples[0], *other[1:]]
    first = policy.score(pack(samples, list(range(6)), CPU, padded=False)).logprobs
    second = policy.score(pack(mixed, list(range(6)), CPU, padded=False)).logprobs
    count = sum(samples[0].loss_mask)
    assert torch.allclose(first[:count], second[:count], atol=1e-5)


def test_capped_logits_are_handled_or_refused(tmp_path: Path) -> None:
    folder = build("llama", tmp_path)
    policy = PolicyModel.load(folder, CPU, torch.float32)
    policy.model.config.logit_scale = 2.0  # a head that the model itself does not apply: must be noticed
    changed = PolicyModel(policy.model, [EOS], CPU, torch.float32)
    with pytest.raises(ModelError, match="cannot be trained"):
        changed.choose_layout()


def test_broken_folders_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="cannot be loaded"):
        PolicyModel.load(tmp_path, CPU, torch.float32)


def test_model_without_end_of_text_is_refused(tmp_path: Path) -> None:
    config = LlamaConfig(**{**SHAPE, "eos_token_id": None})
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="end-of-text"):
        PolicyModel.load(tmp_path, CPU, torch.float32)
