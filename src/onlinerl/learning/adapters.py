"""LoRA: the weights stay as they are, and beside each a product of two thin matrices is trained [2106.09685].

    W' = W + α/rank · B·A        A [rank, in] random, B [out, rank] zero at first, so that W' = W

peft puts the matrices into the model's own layers; everything else about the model is as before. Names of
an adapter's tensors are those of peft's files, here and in checkpoints.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from onlinerl import config
from onlinerl.errors import ModelError, WeightsError

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
"""The files of an adapter, as peft names them."""
_NAME, _PREFIX, _BASE = "default", "base_model.model.", ".base_layer."


@dataclass(frozen=True, slots=True)
class Saved:
    """An adapter as it lies in a folder. Made by `read`, eaten by `Adapter`."""

    tensors: Mapping[str, Tensor]
    """fp32, on the CPU."""
    alpha: int


def read(folder: Path) -> Saved:
    """Read an adapter that `Adapter.save` wrote. Raises WeightsError."""
    try:
        settings = json.loads((folder / CONFIG).read_bytes())
        return Saved(load_file(folder / WEIGHTS), int(settings["lora_alpha"]))
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise WeightsError(f"the adapter in {folder} cannot be read: {error}") from None


class Adapter:
    """The adapter inside a model: its parameters, and what the model's weights are with it.

    Making one changes the model: its linear layers get the matrices, its own weights stop being trainable.
    The first matrices depend on `seed` alone. Raises ModelError for targets that cannot be adapted.
    """

    def __init__(self, model: Any, lora: config.Lora, *, seed: int) -> None:
        # A second of imports, needed under LoRA alone.
        from peft import LoraConfig, inject_adapter_in_model
        from peft.tuners.lora import LoraLayer

        if lora.targets != "all-linear":
            _check(model, lora.targets)
        self.lora = lora
        self._config = LoraConfig(
            r=lora.rank,
            lora_alpha=lora.alpha,
            target_modules=lora.targets if lora.targets == "all-linear" else list(lora.targets),
            task_type="CAUSAL_LM",
        )
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            inject_adapter_in_model(self._config, model, _NAME)
        self._layers: dict[str, Any] = {
            name: layer for name, layer in model.named_modules() if isinstance(layer, LoraLayer)
        }
        for layer in self._layers.values():
            layer.cast_input_dtype_enabled = False  # autocast converts; peft would go to fp32 and back
        self.parameters: dict[str, nn.Parameter] = {
            f"{_PREFIX}{name.replace(f'.{_NAME}.', '.')}": parameter
            for name, parameter in model.named_parameters()
            if parameter.requires_grad
        }
        """What is trained, fp32."""

    def state(self, model: nn.Module) -> dict[str, Tensor]:
        """The model's tensors without the adapter's, under the names of the model's files."""
        own = {name.removeprefix(_PREFIX) for name in self.parameters}
        return {
            name.replace(_BASE, "."): tensor
            for name, tensor in model.state_dict().items()
            if name.replace(f".{_NAME}.", ".") not in own
        }

    @torch.no_grad()
    def merge(self, name: str, tensor: Tensor) -> Tensor:
        """W + α/rank · B·A in fp32 for a tensor W of `state`; the tensor itself where there is no B·A."""
        module, _, kind = name.rpartition(".")
        layer = self._layers.get(module)
        if layer is None or kind != "weight":
            return tensor
        change: Tensor = layer.get_delta_weight(_NAME)
        return tensor.float() + change

    def fits(self, saved: Saved) -> bool:
        """Whether a saved adapter can go on as this one: the same layers, rank and α."""
        return saved.alpha == self.lora.alpha and {n: t.shape for n, t in saved.tensors.items()} == {
            n: p.shape for n, p in self.parameters.items()
        }

    @torch.no_grad()
    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Become what another one is, which `fits`."""
        for name, parameter in self.parameters.items():
            parameter.copy_(tensors[name])

    @contextmanager
    def holding(self, tensors: Mapping[str, Tensor] | None) -> Iterator[None]:
        """Inside, the model computes with another adapter (None: with none) and the same frozen weights.

        Nothing of a forward pass that is still to be differentiated may be under way.
        """
        if tensors is None:
            for layer in self._layers.values():
                layer.enable_adapters(False)
            try:
                yield
            finally:
                for layer in self._layers.values():
                    layer.enable_adapters(True)
            return
        kept = {name: parameter.data for name, parameter in self.parameters.items()}
        try:
            for name, parameter in self.parameters.items():
                parameter.data = tensors[name]
            yield
        finally:
            for name, parameter in self.parameters.items():
                parameter.data = kept[name]

    def save(self, folder: Path, base: str) -> None:
        """Write it in peft's format into a folder that does not exist yet. `base` names what it is put on."""
        folder.mkdir()
        tensors = {n: p.detach().to("cpu", torch.float32).contiguous() for n, p in self.parameters.items()}
        save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
        targets = self._config.target_modules  # by now names; a set, whose order changes between processes
        settings = {
            "base_model_name_or_path": base,
            "bias": "none",
            "inference_mode": True,
            "lora_alpha": self.lora.alpha,
            "lora_dropout": 0.0,
            "peft_type": "LORA",
            "r": self.lora.rank,
            "target_modules": targets if isinstance(targets, str) else sorted(targets or ()),
            "task_type": "CAUSAL_LM",
        }
        (folder / CONFIG).write_text(json.dumps(settings, indent=1) + "\n", encoding="utf-8")


def _check(model: Any, targets: tuple[str, ...]) -> None:
    """Each target must name linear layers below the head. peft itself only objects when none fits, and the
    head is computed piece by piece without its module's forward."""
    head = model.get_output_embeddings()
    for target in targets:
        found = [m for name, m in model.named_modules() if name == target or name.endswith(f".{target}")]
        if not found:
            raise ModelError(f"train.lora.targets: {type(model).__name__} has no module {target!r}")
        for module in found:
            weight = getattr(module, "weight", None)
            if module is head or isinstance(module, nn.Embedding) or weight is None or weight.dim() != 2:
                kind = type(model).__name__
                raise ModelError(
                    f"train.lora.targets: {target!r} of {kind} is no linear layer below its head"
                )
