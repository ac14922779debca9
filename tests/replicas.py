"""Real replica processes, real versions and an independent reference, for the engine's tests."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor
from transformers import AutoModelForCausalLM

from onlinerl.config import Engine
from onlinerl.records import Generation, Token, Version, VersionState
from onlinerl.weights.directory import DataRange, import_base, write_version

MODEL = Path(__file__).parents[1] / "src/onlinerl/models/fim-27m"
EOS = 8183


@dataclass
class Replica:
    """A running process."""

    process: subprocess.Popen[bytes]
    socket: Path


@contextmanager
def replica(**settings: Any) -> Iterator[Replica]:
    """A replica process with these settings of config.Engine; ends with the block."""
    # A short path: a Unix socket's has a limit.
    with TemporaryDirectory(prefix="orl-") as folder:
        socket = Path(folder) / "r.sock"
        environment = {
            **os.environ,
            # float32 on any device: what is exact to 1e-4 there is not so in bfloat16
            "ONLINERL_SETTINGS": Engine(**{"threads": 1, "dtype": "float32", **settings}).model_dump_json(),
            "PYTHONPATH": os.pathsep.join(sys.path),
        }
        process = subprocess.Popen(
            [sys.executable, "-m", "onlinerl.replica", "--socket", str(socket), "--policy", "tab"],
            stdin=subprocess.PIPE,
            env=environment,
        )
        try:
            deadline = time.monotonic() + 90
            while not socket.exists():
                assert process.poll() is None, f"the replica ended with {process.returncode}"
                assert time.monotonic() < deadline, "the replica did not start"
                time.sleep(0.02)
            yield Replica(process, socket)
        finally:
            assert process.stdin is not None
            process.stdin.close()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


class Shelf:
    """A weights folder with version 0, the base model, and further ones made by disturbing it."""

    def __init__(self, root: Path) -> None:
        self.root = str(root)
        self.versions = {0: import_base(self.root, "tab", MODEL)}
        self._dense: dict[int, Any] = {}

    def disturb(self, id: int, scale: float) -> Version:
        """Version `id`: the base's weights with noise of `scale` times their spread; NaN breaks them."""

        def fill(folder: Path) -> None:
            noise = torch.Generator().manual_seed(id)
            tensors = load_file(MODEL / "model.safetensors")
            for name, tensor in tensors.items():
                shift = torch.randn(tensor.shape, generator=noise) * tensor.float().std() * scale
                tensors[name] = (tensor.float() + shift).to(tensor.dtype)
            save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})

        self.versions[id] = write_version(
            self.root, "tab", id, fill=fill, parent=0, run=1, data=DataRange(), settings={}, metrics={}
        )
        return self.versions[id]

    def dense(self, id: int) -> Any:
        """The version in plain transformers, float32."""
        if id not in self._dense:
            model: Any = AutoModelForCausalLM.from_pretrained(
                self.versions[id].url, dtype=torch.float32, attn_implementation="sdpa"
            )
            self._dense[id] = model.eval()
        return self._dense[id]


def plain(folder: Path, id: int = 0) -> Version:
    """A version that is just a folder, its manifest unchecked."""
    return Version("tab", id, VersionState.LIVE, None, None, 0.0, str(folder), "")


def prompts(count: int, size: int = 200) -> list[tuple[int, ...]]:
    """Fill-in-the-middle prompts from this interpreter's asyncio, about `size` tokens each."""
    import asyncio.base_events

    source = Path(asyncio.base_events.__file__).read_text(encoding="utf-8")
    tokenizer = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
    made = []
    for number in range(count):
        ids = tokenizer.encode(source[number * 731 :][: size * 6]).ids
        cut = size * 4 // 5
        text = [8184, *ids[:cut], 8186, *ids[cut + 8 : size + 5], 8185]
        made.append(tuple(text))
    return made


def reference(model: Any, request: Generation, tokens: Sequence[int]) -> Tensor:
    """Log-probabilities of `tokens` under the distribution that `request` asks for, from one dense pass.

    Written apart from the engine's own sampling on purpose.
    """
    ids = torch.tensor([[*request.prompt_ids, *tokens]])
    with torch.inference_mode():
        logits = model(ids).logits[0, len(request.prompt_ids) - 1 : -1].float()
    probabilities = torch.softmax(logits / (request.temperature or 1.0), -1)
    if request.top_p < 1 and request.temperature > 0:
        for row in probabilities:
            order, kept, mass = row.argsort(descending=True), 0, 0.0
            while mass < request.top_p:
                mass += row[order[kept]].item()
                kept += 1
            row[order[kept:]] = 0.0
            row /= row.sum()
    chosen = probabilities.gather(1, torch.tensor(tokens)[:, None])[:, 0]
    return chosen.log()


def tokens_of(items: Sequence[object]) -> list[Token]:
    """The tokens of a stream."""
    return [item for item in items if isinstance(item, Token)]
