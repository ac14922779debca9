"""Trainer tokens per second against TRL's, on the same model and batch, in one run.

    python -m bench.trainer [--samples 32] [--repeats 5] [--threads 1] [--out bench/results/trainer.json]
    python -m bench.trainer --model qwen2.5-coder-1.5b-random     # on a GPU: see bench/large.py

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
import importlib
import importlib.metadata
import json
import os
import platform
import random
import tempfile
import time
from collections.abc import Callable, Sequence
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
    return [made_up(rng, number, words, rng.randint(1, 24), (low, high)) for number in range(count)]


def made_up(rng: random.Random, number: int, words: int, answer: int, prompt: tuple[int, int]) -> Sample:
    """A sample of random tokens below `words`: `answer` of them after a prompt of a length in `prompt`."""
    completion = tuple(rng.randrange(words) for _ in range(answer))
    return Sample(
        id=str(number),
        index=0,
        policy="tab",
        version=0,
        project="p",
        user="u",
        at=0.0,
        prompt_ids=tuple(rng.randrange(words) for _ in range(rng.randint(*prompt))),
        completion_ids=completion,
        behavior_logprobs=(0.0,) * answer,
        loss_mask=(True,) * answer,
        temperature=1.0,
        top_p=1.0,
        language="python",
        multiline=False,
        verdict=Verdict.ACCEPTED if number % 3 == 0 else Verdict.REJECTED,
        verdict_source="native",
    )


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


class Ours:
    """Our learner, set so that nothing stops it."""

    def __init__(self, policy: PolicyModel, microbatch: Any, batch: int) -> None:
        self.train = config.Train(
            lr=1e-6, batch=batch, minibatches=1, kl_coefficient=0.0, microbatch=microbatch,
            guards=config.Guards(kl=1e9, entropy=0, gradient=1e9, clip_fraction=1),
            silence=config.Silence(floor=0),
        )  # fmt: skip
        self.learner = Learner(policy, self.train, reference=0, load=lambda _: policy)

    def step(self, samples: Sequence[Sample]) -> dict[str, float]:
        """One step; returns its numbers."""
        batch = [Scored(sample, 0.0) for sample in samples]
        bands = Bands(self.train.guards, self.train.silence)
        return self.learner.step(batch, advantages(samples), bands, 1)


class Theirs:
    """TRL's GRPOTrainer on the same numbers, in the same number formats: fp32 weights, or frozen bf16 ones
    under LoRA, and bf16 products on a GPU."""

    def __init__(
        self, folder: Path, tokenizer: Path, device: torch.device, batch: int, answer: int, rank: int = 0
    ) -> None:
        # Not installed everywhere, and typed where it is: so no checker sees it.
        datasets, trl = (importlib.import_module(name) for name in ("datasets", "trl"))
        half = bool(rank) and device.type == "cuda"
        model: Any = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.bfloat16 if half else torch.float32
        )
        words: Any = AutoTokenizer.from_pretrained(tokenizer)
        words.pad_token_id = EOS
        settings = trl.GRPOConfig(
            output_dir=tempfile.mkdtemp(), per_device_train_batch_size=batch, num_generations=batch,
            beta=0.0, learning_rate=1e-6, use_cpu=device.type == "cpu", bf16=device.type == "cuda",
            report_to=[], loss_type="bnpo", max_completion_length=answer, epsilon=0.2, epsilon_high=0.28,
            delta=3.0, gradient_checkpointing=False, temperature=1.0,
        )  # fmt: skip
        self.trainer: Any = trl.GRPOTrainer(
            model=model,
            reward_funcs=lambda completions, **_: [0.0] * len(completions),
            args=settings,
            train_dataset=datasets.Dataset.from_dict({"prompt": ["x"] * batch}),
            processing_class=words,
            peft_config=_lora(rank) if rank else None,
        )
        self.device = device
        self.model: Any = self.trainer.model.to(device)
        self.weights = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(
            self.weights, lr=1e-6, betas=(0.9, 0.95), weight_decay=0.0, fused=True
        )

    def checkpoint(self, on: bool) -> None:
        """Turn the recomputation of activations on or off."""
        if on:
            self.model.gradient_checkpointing_enable({"use_reentrant": False})
        else:
            self.model.gradient_checkpointing_disable()
        # Recomputation works in train() alone; these models have no dropout, so nothing else changes.
        self.model.train(on)

    def step(self, samples: Sequence[Sample], micro: int) -> dict[str, float]:
        """One optimiser step in microbatches of `micro` samples, each padded to its longest."""
        parts = [list(samples[start : start + micro]) for start in range(0, len(samples), micro)]
        self.trainer.current_gradient_accumulation_steps = len(parts)
        self.optimizer.zero_grad(set_to_none=True)
        total = 0.0
        for part in parts:
            with self.trainer.compute_loss_context_manager():
                loss: Tensor = self.trainer._compute_loss(self.model, self._inputs(part))
            if not self.model.training:
                loss = loss / len(parts)  # in train() the trainer does it
            torch.autograd.backward(loss)
            total += loss.item()
        norm = torch.nn.utils.clip_grad_norm_(self.weights, 1.0)
        self.optimizer.step()
        return {"loss": total, "gradient_norm": norm.item()}

    def _inputs(self, samples: Sequence[Sample]) -> dict[str, Tensor]:
        prompts = max(len(sample.prompt_ids) for sample in samples)
        answers = max(len(sample.completion_ids) for sample in samples)

        def padded(rows: list[list[Any]], size: int, fill: Any, left: bool) -> Tensor:
            gaps = [[fill] * (size - len(row)) for row in rows]
            lined = [gap + row if left else row + gap for gap, row in zip(gaps, rows, strict=True)]
            return torch.tensor(lined, device=self.device)

        return {
            "prompt_ids": padded([list(s.prompt_ids) for s in samples], prompts, EOS, True),
            "prompt_mask": padded([[1] * len(s.prompt_ids) for s in samples], prompts, 0, True),
            "completion_ids": padded([list(s.completion_ids) for s in samples], answers, EOS, False),
            "completion_mask": padded([[1] * len(s.completion_ids) for s in samples], answers, 0, False),
            "advantages": torch.tensor(advantages(samples), device=self.device),
            "old_per_token_logps": padded([list(s.behavior_logprobs) for s in samples], answers, 0.0, False),
            "num_items_in_batch": torch.tensor(
                sum(len(s.completion_ids) for s in samples), device=self.device
            ),
        }


def _lora(rank: int) -> Any:
    from peft import LoraConfig

    return LoraConfig(r=rank, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")


def advantages(samples: Sequence[Sample]) -> list[float]:
    """One fixed number a sample."""
    return [1.0 if sample.verdict is Verdict.ACCEPTED else -0.5 for sample in samples]


def timed(step: Callable[[], dict[str, float]], device: torch.device) -> tuple[dict[str, float], float]:
    """(numbers, seconds)."""
    began = time.perf_counter()
    numbers = step()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return numbers, time.perf_counter() - began


def environment(device: torch.device, *packages: str) -> dict[str, Any]:
    """What a result depends on beside its settings."""
    return {
        "device": str(device) if device.type == "cpu" else torch.cuda.get_device_name(),
        "cores": os.cpu_count(),
        "platform": platform.platform(),
        "python": platform.python_version(),
        "cuda": torch.version.cuda,
        "versions": {name: importlib.metadata.version(name) for name in packages},
    }


def small(model: str, count: int, repeats: int, device: torch.device) -> dict[str, Any]:
    """The comparison on short prompts and a small model; by kind of prompts."""
    folder = resolve_model(model)
    results: dict[str, Any] = {}
    for name, spread in (("prompts of 70-110 tokens", False), ("prompts of 20-600 tokens", True)):
        samples = scored_by(PolicyModel.load(folder, device, torch.float32), draw(count, 8000, spread))
        tokens = sum(len(sample.prompt_ids) + len(sample.completion_ids) for sample in samples)
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        ours = Ours(PolicyModel.load(folder, device, dtype), 2048 if device.type == "cpu" else "auto", count)
        theirs = Theirs(folder, folder, device, count, 24)
        theirs.checkpoint(False)
        steps: dict[str, Callable[[], dict[str, float]]] = {
            "onlinerl": lambda one=ours, rows=samples: one.step(rows),  # type: ignore[misc]
            "trl": lambda one=theirs, rows=samples: one.step(rows, len(rows)),  # type: ignore[misc]
        }
        first: dict[str, float] = {}
        seconds: dict[str, list[float]] = {side: [] for side in steps}
        for repeat in range(repeats):
            for side, step in steps.items():
                numbers, took = timed(step, device)
                seconds[side].append(took)
                if repeat == 0:
                    first[side] = numbers["loss"]
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
    return results


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the comparison and write its JSON."""
    from bench import large  # which builds on this module

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="fim-27m")
    parser.add_argument("--samples", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, default=None)
    large.options(parser)
    given = parser.parse_args(arguments)
    torch.set_num_threads(given.threads)
    if given.model in large.SHAPES:
        large.run(given)
        return
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    report = {
        "what": "one PPO step (forward, loss, backward, clip, AdamW); tokens without padding; best repeat",
        "model": given.model,
        "samples": given.samples,
        "threads": given.threads,
        **environment(device, "torch", "transformers", "trl"),
        "results": small(given.model, given.samples, given.repeats, device),
    }
    out = given.out or Path("bench/results/trainer.json")
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
