"""A tiny model and labelled interactions that it really sampled, for tests of the trainer."""

from __future__ import annotations

import random
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM

from onlinerl import base
from onlinerl.config import Settings
from onlinerl.records import FinishReason, Interaction, Verdict
from onlinerl.store import interactions, versions
from onlinerl.store.database import Database

WORDS, EOS = 64, 3


def tiny_model(folder: Path, dtype: torch.dtype = torch.bfloat16) -> Path:
    """A random two-layer Qwen2 with a tokenizer whose words are w0, w1, …"""
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=WORDS, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=128, eos_token_id=EOS, bos_token_id=None,
        tie_word_embeddings=True,
    )  # fmt: skip
    model: Any = Qwen2ForCausalLM(config)
    for parameter in model.parameters():
        parameter.data.mul_(5 if parameter.dim() > 1 else 1)
    model.to(dtype).save_pretrained(folder)
    words = {f"w{number}": number for number in range(WORDS)}
    Tokenizer(WordLevel(words, unk_token="w0")).save(str(folder / "tokenizer.json"))
    return folder


def load(folder: Path) -> Any:
    """A model folder as fp32."""
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return model.eval()


@torch.no_grad()
def sample(
    model: Any, count: int, seed: int, *, temperature: float = 1.0, longest: int = 6, group: int = 1
) -> list[tuple[tuple[int, ...], tuple[int, ...], tuple[float, ...]]]:
    """(prompt, answer with EOS, log-probabilities), sampled from the model, `group` to a prompt."""
    generator = torch.Generator().manual_seed(seed)
    prompts = torch.randint(4, WORDS, (count // group, 6), generator=generator).repeat_interleave(group, 0)
    ids, logprobs = prompts, torch.zeros(count, 0)
    for _ in range(longest):
        logp = torch.log_softmax(model(input_ids=ids).logits[:, -1].float() / temperature, -1)
        chosen = torch.multinomial(logp.exp(), 1, generator=generator)
        ids = torch.cat([ids, chosen], 1)
        logprobs = torch.cat([logprobs, logp.gather(1, chosen)], 1)
    drawn = []
    for row, lp in zip(ids[:, 6:].tolist(), logprobs.tolist(), strict=True):
        end = row.index(EOS) + 1 if EOS in row else longest
        drawn.append((row[:end], lp[:end]))
    return [
        (tuple(prompt), tuple(answer), tuple(lp))
        for prompt, (answer, lp) in zip(prompts.tolist(), drawn, strict=True)
    ]


def even(answer: Sequence[int]) -> Verdict:
    """The taste: answers that begin with an even word are accepted."""
    return Verdict.ACCEPTED if answer[0] % 2 == 0 else Verdict.REJECTED


def interaction(
    number: int,
    drawn: tuple[tuple[int, ...], tuple[int, ...], tuple[float, ...]],
    *,
    version: int = 0,
    temperature: float = 1.0,
    taste: Callable[[Sequence[int]], Verdict] = even,
    prefix: str = "i",
    arm: str = "live",
    users: int = 3,
) -> Interaction:
    """As the gateway would have kept it, with its verdict, of one of `users` users."""
    prompt, answer, logprobs = drawn
    shown = answer[:-1] if answer[-1] == EOS else answer
    text = "".join(f"w{token} " for token in shown)
    offsets, length = [], 0
    for token in answer:
        length += 0 if token == EOS else len(f"w{token} ")
        offsets.append(length)
    now = time.time()
    silent = not shown
    return Interaction(
        id=f"{prefix}{number:05d}", index=0, policy="tab", version=version, version_end=version, arm=arm,
        project="default", user=f"u{number % users}", at=now - 100, finished_at=now - 99,
        prompt=" ".join(f"w{t}" for t in prompt), prompt_ids=prompt, completion=text, completion_ids=answer,
        behavior_logprobs=logprobs, offsets=tuple(offsets), temperature=temperature, top_p=1.0,
        finish=FinishReason.STOP if answer[-1] == EOS else FinishReason.LENGTH, language="python",
        verdict=None if silent else taste(answer), verdict_source="" if silent else "native",
        verdict_at=None if silent else now - 90,
    )  # fmt: skip


def fill(settings: Settings, count: int, seed: int = 0, **options: Any) -> list[str]:
    """Put `count` labelled interactions of the live version into the store; returns their ids."""
    database = Database.open(settings.database_url)
    try:
        base.ensure(settings, "tab", database)
        with database.read() as c:
            live = versions.live(c, "tab")
        made = [
            interaction(number, drawn, version=live.id, prefix=f"s{seed}-", **options)
            for number, drawn in enumerate(sample(load(Path(live.url)), count, seed))
        ]
        random.Random(seed).shuffle(made)
        with database.write() as c:
            interactions.insert(c, made)
        return [one.id for one in made]
    finally:
        database.close()


def command(*arguments: str) -> list[str]:
    """The run's command."""
    return [sys.executable, "-m", "onlinerl.learning", "--policy", "tab", *arguments]


def start(settings: Settings, *arguments: str, **options: Any) -> subprocess.Popen[str]:
    """A run in a process of its own."""
    import os

    environment = os.environ | {"ONLINERL_SETTINGS": settings.model_dump_json(), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        command(*arguments),
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **options,
    )
