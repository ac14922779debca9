"""Supervised fine-tuning before the learning from rewards: on accepted completions, or a larger model's."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import torch

from onlinerl.datasets import fim
from onlinerl.learning.batches import PolicyModel, length, microbatches, pack
from onlinerl.records import FinishReason, Sample, Verdict
from onlinerl.validate.rollouts import Answer, Rollouts


def read(path: Path, rollouts: Rollouts, longest: int) -> list[Sample]:
    """Completions of a larger model, `middle` in a JSONL file, as samples that end with end-of-text.

    Those of more than `longest` tokens, or too long for the context, are left out. Raises SettingsError.
    """
    samples: list[Sample] = []
    for number, prompt in enumerate(fim.read(path)):
        ids = (*rollouts.codec.encode(prompt.middle), rollouts.codec.eos_ids[0])
        asked = rollouts.prompt_ids(prompt)
        if len(ids) > longest or len(asked) + len(ids) > rollouts.engine.context:
            continue
        answer = Answer(
            id=f"w{number}",
            index=0,
            prompt=prompt,
            asked=rollouts.template.render(prompt.prefix, prompt.suffix),
            prompt_ids=asked,
            ids=ids,
            logprobs=(0.0,) * len(ids),
            completion=prompt.middle,
            reason=FinishReason.STOP,
            version=0,
            temperature=1.0,
            top_p=1.0,
        )
        samples.append(
            answer.sample(rollouts.policy, user="", verdict=Verdict.ACCEPTED, source="larger model")
        )
    return samples


def fine_tune(
    policy: PolicyModel,
    samples: Sequence[Sample],
    *,
    lr: float,
    epochs: int,
    batch: int,
    microbatch: int,
    gradient_clip: float,
    seed: int,
) -> float:
    """Maximise the mean log-likelihood of the completions' tokens; returns that of the last epoch, in nats.

    AdamW as in the learning from rewards. The weights of `policy` are changed.
    """
    parameters = list(policy.parameters().values())
    optimizer = torch.optim.AdamW(parameters, lr=lr, betas=(0.9, 0.95), weight_decay=0.0)
    order = list(range(len(samples)))
    mean = 0.0
    for epoch in range(epochs):
        random.Random(f"{seed}/warm/{epoch}").shuffle(order)
        total, count = 0.0, 0
        for start in range(0, len(order), batch):
            chosen = [samples[place] for place in order[start : start + batch]]
            tokens = sum(len(one.completion_ids) for one in chosen)
            optimizer.zero_grad(set_to_none=True)
            for group in microbatches([length(one) for one in chosen], microbatch):
                made = pack(chosen, group, policy.device, padded=policy.padded)
                value = policy.score(made).logprobs.sum()
                torch.autograd.backward(-value / tokens)
                total += value.item()
            torch.nn.utils.clip_grad_norm_(parameters, gradient_clip)
            optimizer.step()
            count += tokens
        mean = total / max(1, count)
    optimizer.zero_grad(set_to_none=True)
    return mean
