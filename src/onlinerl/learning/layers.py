"""How a decoder's layers are run: as they are, compiled, or with their activations computed again.

Both ways concern one layer at a time. Compiling one layer compiles all, since they share their code and
differ in their weights only; what it saves is memory traffic: norms, rotary embedding, residual sums and the
gated product are one pass over memory each instead of up to ten. Shapes are symbolic, so a row of another
length is no reason to compile again; a forward pass with gradients and one without are two programs.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.utils.checkpoint
from torch import nn

BACKEND = "inductor"
"""Of torch.compile."""


class Layers:
    """The layers of a decoder, and the way in which they are run. At first as they are."""

    def __init__(self, decoder: nn.Module) -> None:
        self.modules = _layers(decoder)
        self.compiled = False
        self.recompute = False
        self._programs: dict[type[nn.Module], Callable[..., Any]] = {}

    def run(self, *, compiled: bool, recompute: bool) -> None:
        """Choose. `recompute` keeps a layer's input only and computes the rest again in backward."""
        self.compiled, self.recompute = compiled, recompute
        for layer in self.modules:
            # An attribute of the instance, so that names, state and hooks of the module stay as they are.
            layer.__dict__.pop("forward", None)
            if compiled or recompute:
                layer.__dict__["forward"] = partial(self._forward, layer)

    def _forward(self, layer: nn.Module, *arguments: Any, **named: Any) -> Any:
        if self.compiled and torch.is_grad_enabled() and arguments and not arguments[0].requires_grad:
            # The first layer, over frozen embeddings. A gradient that nobody needs costs less than the
            # program of its own which it would get without.
            arguments = (arguments[0].detach().requires_grad_(), *arguments[1:])
        run = partial(self._program(type(layer)), layer)
        if self.recompute and torch.is_grad_enabled():
            # Nothing in a model in eval() draws random numbers, so there is no state of theirs to keep.
            return torch.utils.checkpoint.checkpoint(
                run, *arguments, use_reentrant=False, preserve_rng_state=False, **named
            )
        return run(*arguments, **named)

    def _program(self, kind: type[nn.Module]) -> Callable[..., Any]:
        if not self.compiled:
            return kind.forward
        if kind not in self._programs:
            self._programs[kind] = torch.compile(
                kind.forward, dynamic=True, backend=BACKEND, options=_options() or None
            )
        return self._programs[kind]


def _layers(decoder: nn.Module) -> list[nn.Module]:
    """The list of modules that holds most of the decoder's weights; of equal ones the outermost."""
    lists = [module for module in decoder.modules() if isinstance(module, nn.ModuleList)]

    sizes = [sum(weights.numel() for weights in one.parameters()) for one in lists]
    return list(lists[sizes.index(max(sizes))]) if lists else []


def _options() -> dict[str, Any]:
    """Of the code generator: sums over rows and over columns in one pass, in rows of any length. By itself it
    makes a second program for rows of less than some thousand tokens."""
    if BACKEND != "inductor":
        return {}
    from torch._inductor import config  # three seconds, and needed by those alone who compile

    known = hasattr(config.triton, "mix_order_reduction_non_strict_mode")
    return {"triton.mix_order_reduction_non_strict_mode": True} if known else {}
