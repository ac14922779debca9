"""Gradient norms in fp32, bf16 and fp16, on answers that the model itself gave to real prompts.

    python -m bench.precision [--batches 16] [--samples 64] [--out bench/results/precision.json]

Every batch goes once through the trainer's own model and loss in each number format, with the same fp32
weights; products are in the format (autocast), sums of the loss in fp32. The loss is the seed's, the clipped
surrogate without corrections, at the point where it is computed: π_θ = π_prox, so that its gradient is
A·∇log π. Advantages are how close an answer is to what the author wrote, standardised over the batch.

fp16 is taken with a loss scale as in mixed-precision training [1710.03740], 2^16 halved until no gradient is
infinite, and without. Per batch and format: the gradient's norm, its ratio to fp32's, ‖g − g32‖ / ‖g32‖, and
the mean |log π − log π32| of a token. On a CPU bf16 alone is compared, on fewer samples.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from bench.trainer import environment, made_up, scored_by
from tokenizers import Tokenizer
from torch import Tensor
from transformers import AutoModelForCausalLM

from onlinerl import config
from onlinerl.datasets import fim
from onlinerl.datasets.users import similarity
from onlinerl.learning import losses
from onlinerl.learning.batches import PolicyModel, length, microbatches, pack, stop_ids
from onlinerl.learning.losses import LossSettings
from onlinerl.records import Sample
from onlinerl.weights.models import resolve_model

SCALE = 2.0**16
LONGEST = 24
"""Tokens of an answer."""
ROW = 8192
FORMATS = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def answers(
    folder: Path, prompts: Sequence[fim.FimPrompt], device: torch.device
) -> list[tuple[Sample, float]]:
    """One answer of the model to each prompt at temperature 1, and how close it is to the author's."""
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.eval().to(device)
    words = Tokenizer.from_file(str(folder / "tokenizer.json"))
    stops = set(stop_ids(folder, model))
    found = []
    for start in range(0, len(prompts), 64):
        some = prompts[start : start + 64]
        texts = [f"<|fim_prefix|>{one.prefix}<|fim_suffix|>{one.suffix}<|fim_middle|>" for one in some]
        rows = [words.encode(text, add_special_tokens=False).ids for text in texts]
        size = max(len(row) for row in rows)
        ids = torch.tensor([[min(stops)] * (size - len(row)) + row for row in rows], device=device)
        mask = torch.tensor([[0] * (size - len(row)) + [1] * len(row) for row in rows], device=device)
        made = model.generate(
            input_ids=ids, attention_mask=mask, do_sample=True, temperature=1.0, top_p=1.0, top_k=0,
            max_new_tokens=LONGEST, pad_token_id=min(stops), eos_token_id=sorted(stops),
        )[:, size:].tolist()  # fmt: skip
        for one, row, answer in zip(some, rows, made, strict=True):
            ended = next((place for place, token in enumerate(answer) if token in stops), LONGEST - 1)
            kept = tuple(answer[: ended + 1])
            text = words.decode([token for token in kept if token not in stops], skip_special_tokens=False)
            found.append((_sample(tuple(row), kept), similarity(text, one.middle)))
    return found


def _sample(prompt: tuple[int, ...], answer: tuple[int, ...]) -> Sample:
    blank = made_up(random.Random(0), 0, 2, len(answer), (1, 1))
    return replace(blank, prompt_ids=prompt, completion_ids=answer)


def gradient(
    policy: PolicyModel, samples: Sequence[Sample], advantage: Sequence[float], scale: float
) -> tuple[Tensor, Tensor]:
    """The loss's gradient, flat and in fp32, and log π of all answer tokens in the order of the samples."""
    settings = LossSettings.of(config.Train(mode="raw"))
    count = sum(len(sample.completion_ids) for sample in samples)
    weights = list(policy.parameters().values())
    for parameter in weights:
        parameter.grad = None
    spoken: dict[int, Tensor] = {}
    for group in microbatches([length(sample) for sample in samples], ROW):
        made = pack(samples, group, policy.device, padded=policy.padded)
        scores = policy.score(made)
        now = scores.logprobs.detach()
        values = torch.tensor([advantage[place] for place in made.samples], device=policy.device)
        one = losses.policy_loss(
            scores.logprobs, now, now, now, values[made.sequence], scores.entropy,
            torch.ones_like(now, dtype=torch.bool), settings,
        )  # fmt: skip
        torch.autograd.backward(one.loss / count * scale)
        parts = torch.split(now, [len(tokens) for tokens in made.tokens])
        spoken.update(zip(made.samples, parts, strict=True))
    flat = torch.cat([p.grad.flatten() for p in weights if p.grad is not None]) / scale
    return flat, torch.cat([spoken[place] for place in range(len(samples))])


def compare(
    folder: Path,
    drawn: Sequence[tuple[Sample, float]],
    size: int,
    device: torch.device,
    formats: Iterable[str],
) -> dict[str, list[dict[str, float]]]:
    """Per way its numbers for each batch of `size` samples."""
    exact = PolicyModel.load(folder, device, torch.float32)
    others = {name: PolicyModel.load(folder, device, FORMATS[name]) for name in formats}
    ways: dict[str, list[dict[str, float]]] = {"float32": []}
    scale = SCALE
    for start in range(0, len(drawn) - size + 1, size):
        samples = scored_by(exact, [sample for sample, _ in drawn[start : start + size]])
        close = torch.tensor([value for _, value in drawn[start : start + size]])
        advantage = ((close - close.mean()) / close.std().clamp(min=0.1)).tolist()
        true, spoken = gradient(exact, samples, advantage, 1.0)
        ways["float32"].append({"norm": float(true.norm())})

        def note(
            name: str,
            policy: PolicyModel,
            scale: float,
            true: Tensor = true,
            spoken: Tensor = spoken,
            samples: Sequence[Sample] = samples,
            advantage: Sequence[float] = advantage,
        ) -> bool:
            found, said = gradient(policy, samples, advantage, scale)
            if not bool(torch.isfinite(found).all()):
                return False
            ways.setdefault(name, []).append(
                {
                    "norm": float(found.norm()),
                    "ratio": float(found.norm() / true.norm()),
                    "relative_error": float((found - true).norm() / true.norm()),
                    "logprob_error": float((said - spoken).abs().mean()),
                    "scale": scale,
                }
            )
            return True

        for name, policy in others.items():
            if name != "float16":
                note(name, policy, 1.0)
                continue
            note("float16 unscaled", policy, 1.0)
            while not note("float16", policy, scale):
                scale /= 2
                if scale < 2**-10:
                    raise SystemExit("the gradient in float16 is not finite at any scale")
    return ways


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print a line for each format, and write the JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    cuda = torch.cuda.is_available()
    parser.add_argument("--model", default="fim-27m")
    parser.add_argument(
        "--code", type=Path, default=None, help="a folder of Python; default: the standard library"
    )
    parser.add_argument("--batches", type=int, default=16 if cuda else 1)
    parser.add_argument("--samples", type=int, default=64 if cuda else 8)
    parser.add_argument("--characters", type=int, default=1024 if cuda else 400, help="of a prompt")
    parser.add_argument("--out", type=Path, default=Path("bench/results/precision.json"))
    given = parser.parse_args(arguments)
    device = torch.device("cuda" if cuda else "cpu")
    folder = resolve_model(given.model)
    torch.manual_seed(0)
    prompts = fim.collect(
        given.code, limit=given.batches * given.samples, characters=given.characters
    ).prompts
    ways = compare(
        folder, answers(folder, prompts, device), given.samples, device,
        ["bfloat16", "float16"] if cuda else ["bfloat16"],
    )  # fmt: skip
    summary = {
        name: {key: statistics.mean(row[key] for row in rows) for key in rows[0]}
        for name, rows in ways.items()
    }
    for name, numbers in summary.items():
        print(name, json.dumps({key: round(value, 6) for key, value in numbers.items()}), flush=True)
    report = {
        "what": "gradients of the seed's loss in three number formats; see bench/precision.py",
        "model": given.model,
        "samples_per_batch": given.samples,
        **environment(device, "torch", "transformers"),
        "summary": summary,
        "batches": ways,
    }
    given.out.parent.mkdir(parents=True, exist_ok=True)
    given.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
