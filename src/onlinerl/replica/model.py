"""A model whose weights are exchanged: one skeleton of modules, one set of tensors for each version.

Building modules takes tens of milliseconds of pure Python, and would stall decoding by holding the
interpreter. So they are built once for each architecture; a later version is only tensors, read in small
steps by a background thread, and a pass puts its version's tensors into the modules before it starts.
"""

from __future__ import annotations

import inspect
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from onlinerl.errors import ModelError, WeightsError
from onlinerl.replica.rows import ATTENTION, Chunk, Plan, Rows, using

COSMETIC = frozenset(
    {
        *("_name_or_path", "transformers_version", "architectures", "dtype", "torch_dtype", "use_cache"),
        *("bos_token_id", "eos_token_id", "pad_token_id", "id2label", "label2id"),
    }
)
"""Fields of config.json that do not change what the weights compute."""

PIECE = 1 << 18
"""Numbers converted at once while a version is loaded beside the decoding: a fraction of a millisecond."""

PACKED_FOR = 16
"""Rows that packed weights are laid out for; measured to be good from 1 to 512."""

REST = 0.0005
"""Seconds that the loading thread rests after each piece."""


@dataclass(frozen=True, slots=True)
class Weights:
    """One version's tensors, in the order of the skeleton's places."""

    tensors: tuple[Tensor, ...]


@dataclass(frozen=True, slots=True)
class Form:
    """What one tensor of every version is like."""

    names: tuple[str, ...]
    """Under which a file may hold it."""
    shape: torch.Size
    dtype: torch.dtype
    packed: bool
    """Stored in oneDNN's own order, for `PackedLinear`."""

    def ready(self, tensor: Tensor) -> Tensor:
        """As the modules want it."""
        if not self.packed:
            return tensor
        packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(tensor, PACKED_FOR)
        return packed

    def replace(self, old: Tensor, new: Tensor) -> Tensor:
        """`new`, a tensor as in a file, as the modules want it: in the memory of `old` where that can be,
        which is everywhere but in oneDNN's order. No pass may be running on `old`."""
        if self.packed:
            return self.ready(new.to(self.dtype))
        old.copy_(new)
        return old


class PackedLinear(torch.nn.Linear):
    """A linear layer whose weight oneDNN has put in order beforehand, once, instead of at every call: a third
    faster with the few rows of a decoding step. Other sums' order, so results differ by rounding."""

    def forward(self, input: Tensor) -> Tensor:
        """As nn.Linear."""
        output: Tensor = torch.ops.mkldnn._linear_pointwise(input, self.weight, self.bias, "none", [], "")
        return output


def _can_pack() -> bool:
    """Whether this build of torch has the operators and they are right here."""
    try:
        weight, rows = torch.randn(48, 32), torch.randn(1, 3, 32)
        packed = torch.ops.mkldnn._reorder_linear_weight(weight, PACKED_FOR)
        got = torch.ops.mkldnn._linear_pointwise(rows, packed, None, "none", [], "")
    except (AttributeError, RuntimeError):
        return False
    return torch.allclose(got, torch.nn.functional.linear(rows, weight), atol=1e-4)


class Skeleton:
    """The modules of one architecture, and how tensors get into them."""

    def __init__(self, model: Any, settings: dict[str, Any], context: int) -> None:
        self.model = model
        self.settings = settings
        self.context = context
        parameter = inspect.signature(model.forward).parameters
        self._cache = "cache" if "cache" in parameter else "past_key_values"
        self.vocabulary: int = model.get_input_embeddings().weight.shape[0]
        self.dtype: torch.dtype = model.get_input_embeddings().weight.dtype
        self.device: torch.device = model.get_input_embeddings().weight.device
        # The models build no mask of their own when they are given one of four dimensions; nobody reads it.
        self._no_mask = torch.zeros(1, 1, 1, 1, device=self.device)
        self._active: Weights | None = None
        self._places: list[tuple[dict[str, Any], str, int]] = []
        self.forms: list[Form] = []
        """What each tensor of a version is like."""
        tensors: list[Tensor] = []
        known: dict[tuple[int, bool], int] = {}
        # Tied parameters are one object under several names; a file has it under any of them.
        aliases: dict[int, list[str]] = {}
        for name, tensor in model.state_dict(keep_vars=True).items():
            aliases.setdefault(id(tensor), []).append(name)
        pack = self.device.type == "cpu" and self.dtype == torch.float32 and _can_pack()
        for module in model.modules():
            if pack and type(module) is torch.nn.Linear:
                module.__class__ = PackedLinear
            for table in (module._parameters, module._buffers):
                for name, tensor in table.items():
                    if tensor is None or id(tensor) not in aliases:
                        continue
                    key = (id(tensor), name == "weight" and isinstance(module, PackedLinear))
                    if key not in known:
                        known[key] = len(tensors)
                        tensors.append(tensor.detach())
                        form = Form(tuple(aliases[key[0]]), tensor.shape, tensor.dtype, packed=key[1])
                        self.forms.append(form)
                    self._places.append((table, name, known[key]))
        first = Weights(tuple(form.ready(tensor) for form, tensor in zip(self.forms, tensors, strict=True)))
        self.width = self._check(first)
        """Numbers of cache for one position, in all layers."""
        self._first: Weights | None = first

    def take_first(self) -> Weights:
        """The weights it was built with; once, so that the skeleton does not keep them alive."""
        assert self._first is not None
        first, self._first = self._first, None
        return first

    def forward(
        self,
        weights: Weights,
        tokens: Sequence[int],
        positions: Sequence[int],
        keep: Sequence[int],
        rows: Rows,
        plan: Plan,
    ) -> Tensor:
        """One pass; logits `[len(keep), vocabulary]` in float32 of the tokens at the indices `keep`."""
        inputs = torch.tensor((tokens, positions), device=self.device)
        kept = torch.tensor(keep, device=self.device)
        return self.compute(weights, inputs[:1], inputs[1:], rows, plan, keep=kept).float()

    def compute(
        self,
        weights: Weights,
        tokens: Tensor,
        positions: Tensor,
        rows: Rows,
        plan: Plan,
        *,
        keep: Tensor | None = None,
    ) -> Tensor:
        """One pass over `tokens` [1, tokens] at `positions` [1, tokens], whose values stay on the device;
        logits `[tokens, vocabulary]` in the model's number format, or of those at the indices `keep`."""
        self._activate(weights)
        with using(plan):
            output = self.model(
                input_ids=tokens,
                position_ids=positions,
                attention_mask=self._no_mask,
                use_cache=True,
                logits_to_keep=0 if keep is None else keep,  # 0: of all of them
                **{self._cache: rows},
            )
        logits: Tensor = output.logits[0]
        return logits

    def _activate(self, weights: Weights) -> None:
        if weights is not self._active:
            for table, name, index in self._places:
                table[name] = weights.tensors[index]
            self._active = weights

    @torch.inference_mode()
    def _check(self, weights: Weights) -> int:
        """Compare a small pass in pieces with the model's own: an architecture that keeps its state in
        another way is found here, not in wrong answers. Returns numbers of cache per position."""
        count = min(12, self.context)
        half = count // 2
        ids = [(7 * i + 3) % self.vocabulary for i in range(count)]
        rows = Rows(2, count)
        device = self.device
        every = torch.arange(count, device=device)
        try:
            first = Plan(slots=count + every[:half], chunks=[Chunk(1, 0, half, 0, causal=True)])
            self.forward(weights, ids[:half], range(half), [half - 1], rows, first)
            mask = torch.zeros(count - 1 - half, count - 1, device=device, dtype=self.dtype)
            mask.masked_fill_(
                every[None, : count - 1] > every[half : count - 1, None], torch.finfo(mask.dtype).min
            )
            second = Plan(
                slots=count + every[half:-1], chunks=[Chunk(1, half, count - 1 - half, 0, mask=mask)]
            )
            self.forward(weights, ids[half:-1], range(half, count - 1), [0], rows, second)
            third = Plan(slots=count + every[-1:], decoding=1, low=1, high=2, length=count)
            ours = self.forward(weights, ids[-1:], [count - 1], [0], rows, third)[0]
        except ModelError:
            raise
        except (RuntimeError, TypeError, ValueError, KeyError, IndexError, AttributeError) as fault:
            raise ModelError(
                f"{type(self.model).__name__} cannot be served by the embedded engine: {fault}"
            ) from fault
        with self._plain_attention():
            dense = self.model(input_ids=torch.tensor([ids], device=device), use_cache=False).logits[0, -1]
        tolerance = 1e-3 if self.dtype == torch.float32 else 0.5
        error = (torch.log_softmax(ours, -1) - torch.log_softmax(dense.float(), -1)).abs().max().item()
        if not error <= tolerance:  # NaN is no agreement either
            raise ModelError(
                f"{type(self.model).__name__} cannot be served by the embedded engine: its log-probabilities "
                f"with cached keys and values are {error:.2g} off a plain pass ({tolerance} is allowed)"
            )
        return rows.width

    @contextmanager
    def _plain_attention(self) -> Iterator[None]:
        implementation = "sdpa" if getattr(self.model, "_supports_sdpa", False) else "eager"
        self.model.set_attn_implementation(implementation)
        try:
            yield
        finally:
            self.model.set_attn_implementation(ATTENTION)


def read_settings(folder: Path) -> dict[str, Any]:
    """What of config.json decides the computation. Raises ModelError when it is missing or broken."""
    return {k: v for k, v in _config(folder).to_dict().items() if k not in COSMETIC}


def build(folder: Path, device: torch.device, dtype: torch.dtype, context: int | None) -> Skeleton:
    """The skeleton of the model in `folder`, with its weights as `skeleton.first`.

    Raises ModelError for what is no usable model, WeightsError for missing or broken tensors.
    """
    config = _config(folder)
    limit = _context(config, context)
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            folder,
            config=config,
            dtype=dtype,
            attn_implementation=ATTENTION,
            local_files_only=True,
            use_safetensors=True,
            trust_remote_code=False,
            output_loading_info=True,
        )
    except SafetensorError as error:
        raise WeightsError(f"the weights in {folder} are broken: {error}") from error
    except OSError as error:
        raise WeightsError(f"{folder} has no usable weights (safetensors): {error}") from error
    except (ValueError, RuntimeError, KeyError, TypeError, AssertionError) as error:
        raise ModelError(f"{folder} cannot be loaded as a causal language model: {error}") from error
    model, info = loaded
    for what in ("missing_keys", "mismatched_keys"):
        if info[what]:
            names = ", ".join(sorted(str(key) for key in info[what])[:3])
            raise WeightsError(f"the weights in {folder} do not fit its config.json: {what} {names}")
    model.to(device).eval().requires_grad_(False)
    return Skeleton(model, {k: v for k, v in config.to_dict().items() if k not in COSMETIC}, limit)


def read_weights(folder: Path, skeleton: Skeleton, into: Weights | None = None) -> Weights:
    """A further version's tensors for `skeleton`, read in small steps with rests between them.

    Those of `into`, which no version uses any more, are overwritten. Raises ModelError when the architecture
    is another one, WeightsError when tensors miss, are broken or have another shape. Nothing of the skeleton
    is touched.
    """
    settings = read_settings(folder)
    if settings != skeleton.settings:
        fields = sorted(
            k
            for k in settings.keys() | skeleton.settings.keys()
            if settings.get(k) != skeleton.settings.get(k)
        )
        raise ModelError(
            f"{folder} is of another architecture than the versions already loaded: {', '.join(fields)}"
        )
    files = _files(folder)
    tensors: list[Tensor] = []
    try:
        for place, form in enumerate(skeleton.forms):
            name = next((name for name in form.names if name in files), None)
            if name is None:
                raise WeightsError(f"{folder} lacks the tensor {form.names[0]}")
            with safe_open(files[name], framework="pt") as file:
                source = file.get_tensor(name)
            if source.shape != form.shape:
                raise WeightsError(
                    f"{folder}: {name} has shape {tuple(source.shape)} instead of {tuple(form.shape)}"
                )
            if into is None or form.packed:
                target = torch.empty(source.shape, dtype=form.dtype, device=skeleton.device)
            else:
                target = into.tensors[place]
            _copy_gently(source, target)
            tensors.append(form.ready(target))
    except (SafetensorError, OSError) as error:
        raise WeightsError(f"the weights in {folder} are broken: {error}") from error
    return Weights(tuple(tensors))


@torch.inference_mode()
def place_weights(named: Mapping[str, Tensor], skeleton: Skeleton, into: Weights | None = None) -> Weights:
    """A further version for `skeleton` from tensors in memory, by their names in a file; they are copied:
    into the tensors of `into`, which no version uses any more, where it is given.

    Raises WeightsError when one misses or has another shape; then nothing was overwritten. For whoever trains
    in the same process.
    """
    sources: list[Tensor] = []
    for form in skeleton.forms:
        name = next((name for name in form.names if name in named), None)
        if name is None:
            raise WeightsError(f"the new weights lack the tensor {form.names[0]}")
        source = named[name].detach()
        if source.shape != form.shape:
            raise WeightsError(f"{name} has shape {tuple(source.shape)} instead of {tuple(form.shape)}")
        sources.append(source)
    if into is None:
        return Weights(
            tuple(
                form.ready(source.to(skeleton.device, form.dtype, copy=True))
                for form, source in zip(skeleton.forms, sources, strict=True)
            )
        )
    pairs = zip(skeleton.forms, into.tensors, sources, strict=True)
    return Weights(tuple(form.replace(old, source) for form, old, source in pairs))


@torch.inference_mode()
def _copy_gently(source: Tensor, target: Tensor) -> None:
    flat_source, flat_target = source.reshape(-1), target.view(-1)
    for start in range(0, flat_source.numel(), PIECE):
        flat_target[start : start + PIECE].copy_(flat_source[start : start + PIECE])
        time.sleep(REST)


def _files(folder: Path) -> dict[str, Path]:
    """From tensor name to file."""
    index = folder / "model.safetensors.index.json"
    try:
        if index.exists():
            table: dict[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            return {name: folder / Path(file).name for name, file in table.items()}
        single = folder / "model.safetensors"
        with safe_open(single, framework="pt") as file:
            return dict.fromkeys(file.keys(), single)
    except (SafetensorError, OSError, ValueError, KeyError, TypeError) as error:
        raise WeightsError(f"{folder} has no usable weights (safetensors): {error}") from error


def _config(folder: Path) -> Any:
    if not (folder / "config.json").is_file():
        raise ModelError(f"{folder} is not a model directory: it has no config.json")
    try:
        return AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelError(
            f"{folder}/config.json does not describe a model that transformers knows: {error}"
        ) from error


def _context(config: Any, wanted: int | None) -> int:
    text = config.get_text_config()
    limit = getattr(text, "max_position_embeddings", None)
    if limit is None and wanted is None:
        raise ModelError("the model names no longest context: set engine.context")
    context = min(n for n in (limit, wanted) if n is not None)
    kinds = set(getattr(text, "layer_types", None) or ["full_attention"])
    window = getattr(text, "sliding_window", None) if getattr(text, "use_sliding_window", True) else None
    if not kinds <= {"full_attention", "sliding_attention"}:
        raise ModelError(
            f"the model has layers of kind {', '.join(sorted(kinds))}; the embedded engine serves models of "
            "full attention only: use vLLM for this one"
        )
    slides = "sliding_attention" in kinds or getattr(text, "layer_types", None) is None
    if window is not None and window < context and slides:
        raise ModelError(
            f"the model attends to the last {window} tokens only, fewer than its context of {context}; the "
            f"embedded engine serves full attention: set engine.context to {window} or less, or use vLLM"
        )
    return int(context)
