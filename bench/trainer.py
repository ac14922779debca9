"""Trainer tokens per second against TRL's, on the same model and batch, in one run.

    python bench/trainer.py [--samples 32] [--repeats 5] [--threads 1] [--out bench/results/trainer.json]

Needs `trl` (extra `bench`). What is compared: one optimiser step on one batch of answers whose
log-probabilities and advantages are known, i.e. forward, loss, backward, gradient clip, AdamW. TRL's side is
`GRPOTrainer._compute_loss` (its clipped surrogate; the method itself is private, since TRL has no public step
without generation) on the batch as `GRPOTrainer` pads it: prompts left, answers right; logits only where TRL
itself asks for them. Ours is `Learner.step` with one minibatch. The two take turns; the best of the repeats
counts, since other processes only ever slow a step down.

Tokens are those of prompts and answers without padding, the same number for both.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import random
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from onlinerl import config
from onlinerl.learning.batches import PolicyModel, length, microbatches, pack
from onlinerl.learning.guards import Bands
from onlinerl.learning.learner import Learner
from onlinerl.records import Sample, Scored, Verdict
from onlinerl.weights.models import resolve_model

EOS = 8183


def draw(count: int, words: int, spread: bool) -> list[Sample]:
    """Prompts of 70–110 tokens (`spread`: 20–600) and answers of 1–24, random tokens."""
    rng = random.Random(0)
    low, high = (20, 600) if spread else (70, 110)
    samples = []
    for number in range(count):
        answer = tuple(rng.randrange(words) for _ in range(rng.randint(1, 24)))
        samples.append(
            Sample(
                id=str(number),
                index=0,
                policy="tab",
                version=0,
                project="p",
                user="u",
                at=0.0,
                prompt_ids=tuple(rng.randrange(words) for _ in range(rng.randint(low, high))),
                completion_ids=answer,
                behavior_logprobs=(0.0,) * len(answer),
                loss_mask=(True,) * len(answer),
                temperature=1.0,
                top_p=1.0,
                language="python",
                multiline=False,
                verdict=Verdict.ACCEPTED if number % 3 == 0 else Verdict.REJECTED,
                verdict_source="native",
            )
        )
    return samples


def scored_by(policy: PolicyModel, samples: list[Sample]) -> list[Sample]:
    """The samples with the model's own log-probabilities as behaviour."""
    done = list(samples)
    for group in microbatches([length(sample) for sample in samples], 4096):
        made = pack(samples, group, policy.device, padded=policy.padded)
        with torch.no_grad():
            values = policy.score(made).logprobs.tolist()
        for place, tokens in zip(made.samples, made.tokens, strict=True):
            done[place] = replace(samples[place], behavior_logprobs=tuple(values[: len(tokens)]))
            values = values[len(tokens) :]
    return done


def ours(folder: Path, samples: list[Sample], device: torch.device) -> Callable[[], float]:
    """One step of our learner; returns its loss."""
    train = config.Train(
        lr=1e-6, minibatches=1, kl_coefficient=0.0, microbatch=2048,
        guards=config.Guards(kl=1e9, entropy=0, gradient=1e9, clip_fraction=1),
        silence=config.Silence(floor=0),
    )  # fmt: skip
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    policy = PolicyModel.load(folder, device, dtype)
    learner = Learner(policy, train, reference=0, load=lambda _: policy)
    bands = Bands(train.guards, train.silence)
    batch = [Scored(sample, 0.0) for sample in samples]
    values = advantages(samples)

    def step() -> float:
        return learner.step(batch, values, bands, 1)["loss"]

    return step


def theirs(folder: Path, samples: list[Sample], device: torch.device) -> Callable[[], float]:
    """One step of TRL's GRPOTrainer on the same numbers; returns its loss."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    tokenizer.pad_token_id = EOS
    settings = GRPOConfig(
        output_dir=tempfile.mkdtemp(), per_device_train_batch_size=len(samples), num_generations=len(samples),
        beta=0.0, learning_rate=1e-6, use_cpu=device.type == "cpu", bf16=device.type == "cuda", report_to=[],
        loss_type="bnpo", max_completion_length=24, epsilon=0.2, epsilon_high=0.28, delta=3.0,
        gradient_checkpointing=False, temperature=1.0,
    )  # fmt: skip
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=settings,
        train_dataset=Dataset.from_dict({"prompt": ["x"] * len(samples)}),
        processing_class=tokenizer,
    )
    model = trainer.model.to(device)
    model.eval()  # no dropout on either side
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=1e-6, betas=(0.9, 0.95), weight_decay=0.0, fused=True
    )
    prompts = max(len(sample.prompt_ids) for sample in samples)
    answers = max(len(sample.completion_ids) for sample in samples)

    def padded(rows: list[list[Any]], size: int, fill: Any, left: bool) -> Tensor:
        gaps = [[fill] * (size - len(row)) for row in rows]
        lined = [gap + row if left else row + gap for row, gap in zip(rows, gaps, strict=True)]
        return torch.tensor(lined, device=device)

    inputs = {
        "prompt_ids": padded([list(s.prompt_ids) for s in samples], prompts, EOS, True),
        "prompt_mask": padded([[1] * len(s.prompt_ids) for s in samples], prompts, 0, True),
        "completion_ids": padded([list(s.completion_ids) for s in samples], answers, EOS, False),
        "completion_mask": padded([[1] * len(s.completion_ids) for s in samples], answers, 0, False),
        "advantages": torch.tensor(advantages(samples), device=device),
        "old_per_token_logps": padded([list(s.behavior_logprobs) for s in samples], answers, 0.0, False),
        "num_items_in_batch": torch.tensor(sum(len(s.completion_ids) for s in samples), device=device),
    }

    def step() -> float:
        optimizer.zero_grad(set_to_none=True)
        with trainer.compute_loss_context_manager():
            loss: Tensor = trainer._compute_loss(model, inputs)
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.item()

    return step


def advantages(samples: list[Sample]) -> list[float]:
    """One fixed number a sample."""
    return [1.0 if sample.verdict is Verdict.ACCEPTED else -0.5 for sample in samples]


def timed(step: Callable[[], float], device: torch.device) -> tuple[float, float]:
    """(loss, seconds)."""
    began = time.perf_counter()
    loss = step()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return loss, time.perf_counter() - began


def main() -> None:
    """Run the comparison and write its JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="fim-27m")
    parser.add_argument("--samples", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("bench/results/trainer.json"))
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    folder = resolve_model(given.model)
    results: dict[str, Any] = {}
    for name, spread in (("prompts of 70-110 tokens", False), ("prompts of 20-600 tokens", True)):
        policy = PolicyModel.load(folder, device, torch.float32)
        samples = scored_by(policy, draw(given.samples, 8000, spread))
        del policy
        tokens = sum(len(sample.prompt_ids) + len(sample.completion_ids) for sample in samples)
        steps = {"onlinerl": ours(folder, samples, device), "trl": theirs(folder, samples, device)}
        first: dict[str, float] = {}
        seconds: dict[str, list[float]] = {side: [] for side in steps}
        for repeat in range(given.repeats):
            for side, step in steps.items():
                loss, took = timed(step, device)
                seconds[side].append(took)
                if repeat == 0:
                    first[side] = loss
        rate = {side: tokens / min(times) for side, times in seconds.items()}
        results[name] = {
            "tokens": tokens,
            "tokens_per_second": {side: round(value, 1) for side, value in rate.items()},
            "seconds": {side: [round(value, 3) for value in times] for side, times in seconds.items()},
            "first_loss": {side: round(value, 6) for side, value in first.items()},
            "ratio": round(rate["onlinerl"] / rate["trl"], 3),
        }
        print(
            name, json.dumps(results[name]["tokens_per_second"]), "ratio", results[name]["ratio"], flush=True
        )
    report = {
        "what": "one PPO step (forward, loss, backward, clip, AdamW); tokens without padding; best repeat",
        "model": given.model,
        "samples": given.samples,
        "threads": given.threads,
        "device": str(device) if device.type == "cpu" else torch.cuda.get_device_name(),
        "cores": os.cpu_count(),
        "platform": platform.platform(),
        "versions": {name: importlib.metadata.version(name) for name in ("torch", "transformers", "trl")},
        "results": results,
    }
    given.out.parent.mkdir(parents=True, exist_ok=True)
    given.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
