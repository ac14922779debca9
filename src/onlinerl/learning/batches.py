"""From samples to tensors and through the model, without padding waste.

Several samples lie one after another in a single row; positions restart at each, and attention is causal
within a sample and blind across samples. Everything but attention (nine tenths of the work at a hundred
tokens) sees no padding at all; for attention alone the row is laid out as one sample a line, samples of
about the same length together, since a dense block-diagonal mask over the row would cost its square.

Logits are computed only where they matter: at the positions that predict a token somebody judged, and at
the end of each prompt, where silence begins.

On a GPU attention takes the row as it is, by flash attention for sequences of unlike length, and the layers
can be compiled (`layers`). Both are used only where they are as exact as the plain way, gradients included,
and that is tried on the model itself when it is loaded; `PolicyModel.fallbacks` says what was left out, and
why.

Measured on one core with the 27 M model, 32 samples of 75–130 tokens, forward and backward: 581 tokens/s
packed so, 574 padded in length-sorted groups of 1,024 tokens (463 in one group), 434 packed with a
block-diagonal mask. Where lengths differ more, packing gains more.
"""

from __future__ import annotations

import contextlib
import json
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from transformers import AutoModelForCausalLM
from transformers import logging as transformers_logging

from onlinerl import config
from onlinerl.errors import ModelError
from onlinerl.learning import attention, layers
from onlinerl.learning.adapters import Adapter
from onlinerl.learning.attention import FLASH, PACKED, Layout, lay_out
from onlinerl.learning.layers import Layers
from onlinerl.learning.losses import show_rate, token_logprobs
from onlinerl.learning.memory import LOGIT, ROW, Footprint, free
from onlinerl.records import Sample, Verdict

HEAD_ELEMENTS = 1 << 27
"""Logits held at once (512 MB in fp32); beyond it they are computed in pieces and again in backward."""
FUSED = 5 * HEAD_ELEMENTS
"""The same for a compiled loss, which takes 6 bytes for each where the plain one takes `memory.LOGIT`: the
products in half precision and their gradient, and nothing between them."""
LARGE = 500_000_000
"""Parameters from which on a model is compiled under `auto`: smaller ones are done before it pays."""
EXACT = 1e-3
"""Relative error of log-probabilities and gradients that a fast way may have. In bf16 it may have twice the
error that the plain way has there."""
FAULTS = (
    RuntimeError,
    OSError,
    ImportError,
    TypeError,
    ValueError,
    AttributeError,
    AssertionError,
    LookupError,
)
"""What a compiler or a kernel that does not suit the machine or the model fails with."""


# ------------------------------------------------------------------------------------------ packing


@dataclass(frozen=True, slots=True)
class Pack:
    """The samples of one microbatch as tensors. N tokens in the row, K judged tokens, n samples."""

    samples: tuple[int, ...]
    """Which samples of the batch, by their place in it."""
    input_ids: Tensor
    """[1, N] packed, or [n, L] padded on the right."""
    position_ids: Tensor
    """Same shape; restarts at each sample."""
    layout: Layout | None
    """None: padded."""
    select: Tensor
    """[K + n]: flat positions in `input_ids` whose logits are wanted: judged tokens, then prompt ends."""
    targets: Tensor
    """[K]: the judged tokens."""
    tokens: tuple[tuple[int, ...], ...]
    """For each sample the places of its judged tokens in its completion, in the order of `targets`."""
    sequence: Tensor
    """[K]: place in `samples` of each judged token's sample."""
    temperature: Tensor
    """[n]."""

    @property
    def size(self) -> int:
        """Tokens of the row."""
        return self.input_ids.numel()


def length(sample: Sample) -> int:
    """Tokens that the model must read to predict all that is judged: the last judged one is not read."""
    judged = [place for place, kept in enumerate(sample.loss_mask) if kept]
    return len(sample.prompt_ids) + (judged[-1] if judged else 0)


def microbatches(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Split samples into groups of at most `budget` tokens (a longer one stands alone), of like length.

    Sorted by length, longest first, then cut: so the largest group comes first and runs out of memory at
    once if at all. Every sample is in one group.
    """
    order = sorted(range(len(lengths)), key=lambda place: (-lengths[place], place))
    groups: list[list[int]] = []
    used = 0
    for place in order:
        if not groups or used + lengths[place] > budget:
            groups.append([])
            used = 0
        groups[-1].append(place)
        used += lengths[place]
    return groups


def pack(samples: Sequence[Sample], places: Sequence[int], device: torch.device, *, padded: bool) -> Pack:
    """Lay out `samples[p] for p in places` as one microbatch."""
    chosen = [samples[place] for place in places]
    lengths = [length(sample) for sample in chosen]
    longest = max(lengths)
    row = array("q")  # tokens by the ten thousand: from a list torch would take each one by itself
    select: list[int] = []
    ends: list[int] = []
    targets: list[int] = []
    tokens: list[tuple[int, ...]] = []
    sequence: list[int] = []
    start = 0
    for number, (sample, size) in enumerate(zip(chosen, lengths, strict=True)):
        if not sample.prompt_ids:
            raise ModelError(f"interaction {sample.id} has an empty prompt: nothing predicts its first token")
        row.extend(sample.prompt_ids)
        row.extend(sample.completion_ids[: size - len(sample.prompt_ids)])
        first = start + len(sample.prompt_ids) - 1
        ends.append(first)
        judged = tuple(place for place, kept in enumerate(sample.loss_mask) if kept)
        tokens.append(judged)
        for place in judged:
            select.append(first + place)
            targets.append(sample.completion_ids[place])
            sequence.append(number)
        if padded:
            row.extend([0] * (longest - size))
        start += longest if padded else size
    ids = torch.frombuffer(row, dtype=torch.long)
    layout = None
    if padded:
        ids = ids.view(len(chosen), longest)
        positions = torch.arange(longest).expand(len(chosen), longest)
    else:
        ids = ids[None]
        sizes = torch.tensor(lengths)
        positions = (torch.arange(start) - torch.repeat_interleave(sizes.cumsum(0) - sizes, sizes))[None]
        layout = lay_out(lengths, device)
    return Pack(
        samples=tuple(places),
        input_ids=ids.to(device),
        position_ids=positions.to(device),
        layout=layout,
        select=torch.tensor(select + ends).to(device),
        targets=torch.tensor(targets, dtype=torch.long).to(device),
        tokens=tuple(tokens),
        sequence=torch.tensor(sequence, dtype=torch.long).to(device),
        temperature=torch.tensor([sample.temperature for sample in chosen]).to(device),
    )


# -------------------------------------------------------------------------------------------- model


@dataclass(frozen=True, slots=True)
class Scores:
    """What the model says of a microbatch."""

    logprobs: Tensor
    """[K] of the judged tokens, under their samples' temperature."""
    entropy: Tensor
    """[K] of the distributions they came from."""
    show: Tensor
    """[n]: 1 − p(end-of-text first)."""


@dataclass(frozen=True, slots=True)
class Trial:
    """What a model makes of made-up samples, in fp32."""

    logprobs: Tensor
    gradient: Tensor
    """Of a mix of them by the first layer's weights: it has gone through the backward of all layers."""

    def error(self, exact: Trial) -> float:
        """The larger of both relative errors, ‖a − b‖ / ‖b‖."""
        pairs = ((self.logprobs, exact.logprobs), (self.gradient, exact.gradient))
        errors = torch.stack([(mine - true).norm() / true.norm() for mine, true in pairs])
        return float(errors.max())  # of torch, which does not overlook what is no number


class Scorer(Protocol):
    """Whatever gives samples their log-probabilities."""

    def score(self, batch: Pack) -> Scores:
        """One forward pass."""


class PolicyModel:
    """A causal language model of any kind that scores packed samples. fp32 weights, or frozen ones and an
    fp32 adapter."""

    adapter: Adapter | None = None
    """What is trained, under LoRA."""

    def __init__(self, model: Any, stop_ids: Sequence[int], device: torch.device, dtype: torch.dtype):
        self.model = model
        self.device = device
        self.dtype = dtype
        self.stop_ids = torch.tensor(sorted(set(stop_ids)), dtype=torch.long, device=device)
        self.padded = False
        self._decoder = _decoder(model)
        self._head = model.get_output_embeddings()
        if self._head is None:
            raise ModelError(
                f"{type(model).__name__} has no output embeddings: it is no causal language model"
            )
        self._adjust = _adjustment(model)
        self.layers = Layers(self._decoder)
        self.flash = False
        """Whether packed attention is `flash_attention`."""
        self._loss: Callable[..., tuple[Tensor, Tensor]] | None = None
        """`_tokens`, compiled."""
        self.lined = False
        """Whether that attends to lines where samples are of like length."""
        self.fallbacks: list[str] = []
        """Fast ways that were tried and left out, each with its reason, in a sentence."""
        self._footprint: Footprint | None = None

    @classmethod
    def load(
        cls,
        folder: Path,
        device: torch.device,
        dtype: torch.dtype,
        lora: config.Lora | None = None,
        seed: int = 0,
        *,
        compile: bool | Literal["auto"] = False,
    ) -> PolicyModel:
        """Read a model folder (safetensors only, no code from it). Raises ModelError.

        dtype is that of the matrix products; weights are fp32. With `lora` (of a rank above 0) they are
        frozen and a new adapter is put on them; frozen matrices that lose nothing by it are kept in dtype.
        `compile` is the setting of that name.
        """
        transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
        try:
            model: Any = AutoModelForCausalLM.from_pretrained(
                folder, dtype=torch.float32, use_safetensors=True, trust_remote_code=False
            )
        except (OSError, ValueError, KeyError) as error:
            raise ModelError(f"the model in {folder} cannot be loaded: {error}") from None
        adapter = Adapter(model, lora, seed=seed) if lora is not None and lora.rank else None
        model.eval()  # dropout would make π_prox another policy than the one that is trained
        model.to(device)
        made = cls(model, stop_ids(folder, model), device, dtype)
        made.adapter = adapter
        made.choose_layout()
        if compile == "auto":
            compile = device.type == "cuda" and model.num_parameters() >= LARGE
        half = device.type == "cuda" and dtype != torch.float32
        flash = half and not made.padded and attention.varlen is not None
        with made._exact():
            exact = made.trial() if flash or compile else None
        if adapter is not None and dtype != torch.float32:
            _shrink(made._decoder, dtype)
        if exact is not None:
            made.hasten(exact, flash=flash, compiled=compile)
        return made

    def parameters(self) -> dict[str, nn.Parameter]:
        """Trainable tensors by name; tied ones once. Under LoRA the adapter's alone."""
        if self.adapter is not None:
            return self.adapter.parameters
        return {name: p for name, p in self.model.named_parameters() if p.requires_grad}

    def state(self) -> dict[str, Tensor]:
        """The model's tensors as they lie in memory, under the names of its files, an adapter left out."""
        if self.adapter is not None:
            return self.adapter.state(self.model)
        state: dict[str, Tensor] = self.model.state_dict()
        return state

    def merge(self, name: str, tensor: Tensor) -> Tensor:
        """A tensor of `state` as the model computes with it: with the adapter's share, as a new tensor."""
        return tensor if self.adapter is None else self.adapter.merge(name, tensor)

    def weights(self) -> dict[str, Tensor]:
        """The full weights under the names of the model's files, whatever is trained. What an adapter changes
        is a new tensor, the others are those in use."""
        return {name: self.merge(name, tensor).detach() for name, tensor in self.state().items()}

    def choose_layout(self) -> None:
        """Packed where this model does the same packed as alone, else padded. Raises ModelError when the
        logits computed only where needed differ from the model's own."""
        generator = torch.Generator().manual_seed(0)
        words = int(self.model.get_input_embeddings().weight.shape[0])
        probe = [torch.randint(0, words, (size,), generator=generator).tolist() for size in (9, 5, 14)]
        samples = [_probe(row) for row in probe]
        self._layout(padded=True)
        with torch.no_grad(), self._exact():
            own = [
                torch.log_softmax(
                    self.model(input_ids=torch.tensor([row]).to(self.device), use_cache=False)
                    .logits[0]
                    .float(),
                    -1,
                )[torch.arange(2, len(row) - 1), row[3:]]
                for row in probe
            ]
            expected = torch.cat(own)
            for padded in (False, True):
                self._layout(padded=padded)
                if not padded and not _packable(self.model):
                    continue
                try:
                    got = self.score(pack(samples, [0, 1, 2], self.device, padded=padded)).logprobs
                except (ModelError, TypeError, RuntimeError):
                    if padded:
                        raise
                    continue  # a model with an attention of its own: it has the padded layout
                if torch.allclose(got, expected, atol=1e-3):
                    return
        raise ModelError(
            f"the logits of {type(self.model).__name__} are more than its head on its last hidden state: "
            "this kind of model cannot be trained here"
        )

    def hasten(self, exact: Trial, *, flash: bool, compiled: bool) -> None:
        """Use flash attention and compiled layers, as asked for, as far as they are as good as the plain way;
        then attention by lines where there is flash, and a compiled loss where layers are.

        `exact` is what `trial` gave in fp32. What fails, or is further from it than EXACT allows, is left out
        and named in `fallbacks`.
        """
        if compiled and not self.layers.modules:
            self.fallbacks.append(f"{type(self.model).__name__} has no list of layers that could be compiled")
            compiled = False
        allowed = max(EXACT, 2 * self.trial().error(exact))
        for way in dict.fromkeys(((flash, compiled), (flash, False), (False, compiled))):
            if not any(way):
                continue
            self._way(*way)
            names = zip(("flash attention", "compiled layers"), way, strict=True)
            if self._good(" and ".join(name for name, on in names if on), exact, allowed):
                break
        else:
            self._way(False, False)
        if self.flash:
            self.lined = True
            self.lined = self._good("attention by lines", exact, allowed)
        if self.layers.compiled:
            self._loss = torch.compile(self._tokens, dynamic=True, backend=layers.BACKEND)
            if not self._good("a compiled loss", exact, allowed):
                self._loss = None

    def _good(self, name: str, exact: Trial, allowed: float) -> bool:
        """Whether the model as it is set up now works and gives what it should; else `fallbacks` says why."""
        try:
            if self.layers.compiled and self.device.type == "cuda":
                self._warm(self._spare())
            with torch.no_grad():  # a program of its own, where layers are compiled
                self._trial_scores()
            error = self.trial().error(exact)
        except FAULTS as fault:  # not for this machine or this model: the plain way is
            told = " ".join(str(fault).split())[:300]
            self.fallbacks.append(f"{name} failed with {type(fault).__name__}: {told}")
            return False
        if error <= allowed:
            return True
        self.fallbacks.append(f"{name} left an error of {error:.2g} where {allowed:.2g} is allowed")
        return False

    def _warm(self, tokens: int) -> None:
        """Compile on a row as long as those of the training. Programs are for rows of any length, but are
        laid out for the first that they see: sums over a row of 200 tokens leave most of a GPU idle."""
        # A length that is no size of a model: what is equal at first, a compiler takes to be equal always.
        size = self._limit(min(tokens, 1400))
        made = self._made(max(2, tokens // size), size, judged=16)
        compiled, recompute = self.layers.compiled, self.layers.recompute
        self.layers.run(compiled=compiled, recompute=True)  # little memory, and the same programs
        try:
            with torch.no_grad():
                self.score(made)
            first = [p for layer in self.layers.modules[:1] for p in layer.parameters() if p.requires_grad]
            torch.autograd.grad(self.score(made).logprobs.sum(), first, allow_unused=True)
        finally:
            self.layers.run(compiled=compiled, recompute=recompute)

    def _spare(self) -> int:
        """Tokens of a row that a quarter of the free memory has room for, each layer's input kept."""
        hidden = int(self.model.get_input_embeddings().weight.shape[1])
        inputs = 4 * hidden * (len(self.layers.modules) + 40)  # 40: the inside of one layer, twice
        return max(256, min(ROW, free(self.device) // 4 // inputs))

    def trial(self) -> Trial:
        """What the model makes of a few made-up samples, as it is set up now."""
        scores = self._trial_scores()
        first = [p for layer in self.layers.modules[:1] for p in layer.parameters() if p.requires_grad]
        mix = torch.linspace(-1.0, 1.0, scores.logprobs.numel(), device=self.device)
        loss = (scores.logprobs * mix).sum()
        grads = torch.autograd.grad(loss, first or list(self.parameters().values()), allow_unused=True)
        flat = torch.cat([grad.flatten().float() for grad in grads if grad is not None])
        return Trial(scores.logprobs.detach(), flat)

    def _trial_scores(self) -> Scores:
        limit = self._limit(130)
        words = int(self.model.get_input_embeddings().weight.shape[0])
        generator = torch.Generator().manual_seed(1)
        rows = [torch.randint(0, words, (min(size, limit),), generator=generator) for size in (130, 7, 61)]
        samples = [_probe(row.tolist()) for row in rows]
        return self.score(self._even(pack(samples, [0, 1, 2], self.device, padded=self.padded)))

    def _even(self, made: Pack) -> Pack:
        """The same, to be attended to by lines if this is the way to be tried, and not if it is not."""
        if made.layout is None:
            return made
        return replace(made, layout=replace(made.layout, even=self.lined))

    def footprint(self) -> Footprint:
        """What a forward pass on this GPU keeps for backward, per token: measured once."""
        if self._footprint is None:
            compiled, recompute = self.layers.compiled, self.layers.recompute
            size = self._limit(128)
            rates = []
            for again in (False, True):
                self.layers.run(compiled=compiled, recompute=again)
                self._kept(2, size)  # takes what libraries take once
                rates.append((self._kept(12, size) - self._kept(2, size)) / (10 * (size - 1)))
            self.layers.run(compiled=compiled, recompute=recompute)
            self._footprint = Footprint(*rates)
        return self._footprint

    def _kept(self, samples: int, size: int) -> int:
        """Bytes still allocated after a forward pass over `samples` samples of `size` tokens."""
        made = self._made(samples, size)
        before = torch.cuda.memory_allocated(self.device)
        scores = self.score(made)
        kept = torch.cuda.memory_allocated(self.device) - before
        del scores  # not before: it holds what is counted
        return kept

    def _made(self, samples: int, size: int, judged: int = 1) -> Pack:
        """`samples` samples of `size` tokens, the last `judged` of each judged."""
        whole = _probe([0] * size)
        answer = len(whole.loss_mask)
        last = replace(whole, loss_mask=tuple(place >= answer - judged for place in range(answer)))
        return self._even(pack([last] * samples, range(samples), self.device, padded=self.padded))

    def recompute(self, on: bool) -> None:
        """Keep of each layer its input only, and compute the rest again in backward. Raises ModelError."""
        if on and not self.layers.modules:
            raise ModelError(
                f"train.recompute: {type(self.model).__name__} has no list of layers to compute again"
            )
        if on != self.layers.recompute:
            self.layers.run(compiled=self.layers.compiled, recompute=on)

    def logit_bytes(self, judged: int) -> int:
        """Memory for the logits of `judged` tokens, or of as many as are computed at once."""
        return LOGIT * min(HEAD_ELEMENTS, judged * int(self._head.weight.shape[0]))

    def _limit(self, most: int) -> int:
        """`most`, or the longest row that the model can read."""
        return min(most, int(getattr(self.model.config, "max_position_embeddings", None) or most))

    def _way(self, flash: bool, compiled: bool) -> None:
        self.flash = flash
        self._layout(padded=self.padded)
        self.layers.run(compiled=compiled, recompute=self.layers.recompute)

    def score(self, batch: Pack) -> Scores:
        """One forward pass. Differentiable unless under no_grad."""
        layout = batch.layout
        if layout is not None and layout.even and not self.lined:
            layout = replace(layout, even=False)
        extra: dict[str, Any] = {} if layout is None else {"packing": layout}
        with self._autocast():
            hidden = self._decoder(
                input_ids=batch.input_ids, position_ids=batch.position_ids, use_cache=False, **extra
            ).last_hidden_state
            wanted = hidden.flatten(0, 1).index_select(0, batch.select)
        judged = batch.targets.numel()
        temperature = batch.temperature[batch.sequence]
        # One token alone would be a program of its own.
        tokens, most = (
            (self._tokens, HEAD_ELEMENTS) if self._loss is None or judged < 2 else (self._loss, FUSED)
        )
        pieces = [
            self._pieces(tokens, most, wanted[start:stop], batch.targets[start:stop], temperature[start:stop])
            for start, stop in self._ranges(judged, most)
        ]
        logprobs = torch.cat([piece[0] for piece in pieces]) if pieces else wanted.new_zeros(0)
        entropy = torch.cat([piece[1] for piece in pieces]) if pieces else wanted.new_zeros(0)
        shows = [
            self._pieces(
                self._show,
                HEAD_ELEMENTS,
                wanted[judged + start : judged + stop],
                batch.temperature[start:stop],
            )
            for start, stop in self._ranges(len(batch.samples), HEAD_ELEMENTS)
        ]
        return Scores(logprobs, entropy, torch.cat(shows))

    def logits(self, hidden: Tensor) -> Tensor:
        """[K, H] → [K, V] in fp32."""
        with self._autocast():
            logits = self._head(hidden)
        return self._adjust(logits.float())

    def _tokens(self, hidden: Tensor, targets: Tensor, temperature: Tensor) -> tuple[Tensor, Tensor]:
        return token_logprobs(self.logits(hidden), targets, temperature)

    def _show(self, hidden: Tensor, temperature: Tensor) -> Tensor:
        return show_rate(self.logits(hidden), self.stop_ids, temperature)

    def _pieces(self, function: Callable[..., Any], most: int, *arguments: Tensor) -> Any:
        whole = arguments[0].shape[0] * self._head.weight.shape[0]
        if torch.is_grad_enabled() and whole * 2 > most:
            return torch.utils.checkpoint.checkpoint(function, *arguments, use_reentrant=False)
        return function(*arguments)

    def _ranges(self, count: int, most: int) -> Iterator[tuple[int, int]]:
        """Pieces of at most `most` logits."""
        step = max(1, most // int(self._head.weight.shape[0]))
        for start in range(0, count, step):
            yield start, min(count, start + step)

    def _layout(self, *, padded: bool) -> None:
        self.padded = padded
        self.model.set_attn_implementation("sdpa" if padded else FLASH if self.flash else PACKED)

    def _autocast(self) -> contextlib.AbstractContextManager[Any]:
        if self.dtype == torch.float32:
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, dtype=self.dtype)

    @contextlib.contextmanager
    def _exact(self) -> Iterator[None]:
        dtype, self.dtype = self.dtype, torch.float32
        try:
            yield
        finally:
            self.dtype = dtype


class Sibling:
    """Another version on the frozen weights of a policy in training: with another adapter (fp32 tensors by
    name), or with none. Costs the memory of the adapter, where a second model would cost its weights."""

    def __init__(self, policy: PolicyModel, adapter: Mapping[str, Tensor] | None) -> None:
        assert policy.adapter is not None
        self._policy = policy
        self._own = policy.adapter
        self._other = None if adapter is None else {n: t.to(policy.device) for n, t in adapter.items()}

    def score(self, batch: Pack) -> Scores:
        """See PolicyModel; nothing is differentiated."""
        with torch.no_grad(), self._own.holding(self._other):
            return self._policy.score(batch)


def stop_ids(folder: Path, model: Any) -> list[int]:
    """The end-of-text tokens: those of the generation config, else the model's. Raises ModelError."""
    found: list[int] = []
    file = folder / "generation_config.json"
    sources = [json.loads(file.read_text(encoding="utf-8")).get("eos_token_id")] if file.exists() else []
    sources.append(getattr(model.config, "eos_token_id", None))
    for source in sources:
        if source is not None:
            found = list(source) if isinstance(source, list) else [source]
            break
    if not found:
        raise ModelError(f"the model in {folder} names no end-of-text token (eos_token_id)")
    return found


def _decoder(model: Any) -> Any:
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else None
    if decoder is None or decoder is model:
        decoder = model.base_model
    if decoder is model:
        raise ModelError(f"{type(model).__name__} does not separate its head from its layers")
    return decoder


def _shrink(decoder: Any, dtype: torch.dtype) -> None:
    """Keep frozen matrices in the number format in which they are multiplied, if they have it anyway: half
    the memory, and autocast need not convert them at each pass. Norms and embeddings stay as they are."""
    for module in decoder.modules():
        if not isinstance(module, nn.Linear) or module.weight.requires_grad:
            continue
        small = module.weight.data.to(dtype)
        if torch.equal(small.to(module.weight.dtype), module.weight.data):
            module.weight.data = small


def _adjustment(model: Any) -> Callable[[Tensor], Tensor]:
    """What some models do to logits after the head; `choose_layout` checks that nothing is missing."""
    config = model.config
    cap = getattr(config, "final_logit_softcapping", None)
    scale = float(getattr(config, "logit_scale", None) or 1.0) / float(
        getattr(config, "logits_scaling", None) or 1.0
    )

    def adjust(logits: Tensor) -> Tensor:
        if scale != 1.0:
            logits = logits * scale
        return logits if cap is None else torch.tanh(logits / cap) * cap

    return adjust


def _packable(model: Any) -> bool:
    """False where attention has a window or a cap of its own, which `packed_attention` does not know."""
    config = model.config
    windows = any(
        "sliding" in str(kind) or "chunked" in str(kind)
        for kind in getattr(config, "layer_types", None) or ()
    )
    return not windows and getattr(config, "attn_logit_softcapping", None) is None


def _probe(row: list[int]) -> Sample:
    answer = tuple(row[3:])
    return Sample(
        id="probe", index=0, policy="", version=0, project="", user="", at=0.0,
        prompt_ids=tuple(row[:3]), completion_ids=answer, behavior_logprobs=(0.0,) * len(answer),
        loss_mask=(True,) * len(answer), temperature=1.0, top_p=1.0, language="", multiline=False,
        verdict=Verdict.ACCEPTED, verdict_source="",
    )  # fmt: skip
