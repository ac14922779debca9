"""A tiny random model that knows fill-in-the-middle markers, and settings of small offline runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import Qwen2Config, Qwen2ForCausalLM

from onlinerl.config import Settings, load_settings

MARKERS = ("<|endoftext|>", "<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>")


def fim_model(folder: Path) -> Path:
    """Two layers, one token a byte, weights large enough that its distributions are not flat."""
    folder.mkdir(parents=True)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={one: id for id, one in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(marker, special=True) for marker in MARKERS])
    tokenizer.save(str(folder / "tokenizer.json"))
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=264, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=256, eos_token_id=256, bos_token_id=None,
        tie_word_embeddings=True,
    )  # fmt: skip
    model: Any = Qwen2ForCausalLM(config)
    for parameter in model.parameters():
        parameter.data.mul_(3 if parameter.dim() > 1 else 1)
    model.to(torch.bfloat16).save_pretrained(folder)
    return folder


def code(folder: Path, files: int = 24) -> Path:
    """A folder of small Python files."""
    folder.mkdir(parents=True)
    for number in range(files):
        lines = [f"def f{number}_{line}(x):\n    return x + {number * line}\n" for line in range(6)]
        (folder / f"m{number}.py").write_text("\n".join(lines))
    return folder


def offline(base: Path, *overrides: str, file: Path | None = None) -> Settings:
    """Settings of an offline run of seconds. `base` gets the model and the code once."""
    if not (base / "model").exists():
        fim_model(base / "model")
        code(base / "code")
    return load_settings(
        file,
        [
            f"policies.tab.model={base / 'model'}",
            "policies.tab.sampling.max_tokens=10",
            "policies.tab.engine.threads=1",
            "policies.tab.train.threads=1",
            "policies.tab.train.batch=16",
            "policies.tab.train.lr=1e-3",
            f"validation.data={base / 'code'}",
            "validation.tastes=[line]",
            "validation.train_prompts=64",
            "validation.test_prompts=24",
            "validation.characters=80",
            "validation.completions=128",
            *overrides,
        ],
        home=base / "home",
    )
