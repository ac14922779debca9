"""The trainer at the size of Qwen2.5-Coder-1.5B on one GPU: tokens/s, MFU and memory, against TRL.

    python -m bench.trainer --model qwen2.5-coder-1.5b-random [--profile] [--out bench/results/large.json]

The configuration is the model's own, the weights are random: this is about speed only. Per context (1k and
8k tokens, all samples of equal length; and 512–1,024, as prompts really are) and per kind of training (full,
LoRA) both sides do optimiser steps on the same 65,536 tokens, in the same number formats: fp32 master
weights and moments and bf16 products; under LoRA frozen bf16 weights and an fp32 adapter. Each side makes
its microbatches as large as the memory allows: ours by its own measurement (`microbatch: auto`), TRL's by
halving from more than fits; TRL is timed with and without gradient checkpointing, and its faster way counts.
The first WARM steps of everything are left out (kernels are chosen and memory is taken in them), and so is
compiling, which is told beside as the seconds that loading takes. A process each for the two sides and kinds
of training, so that a fault of one costs the others nothing; results are written after each.

    MFU = useful FLOPs of a step / seconds / peak             peak: 989e12, dense bf16 of an H100 or H200

    full:  6·N·T + 6·H·V·K + 6·L·D·Σ S²
    LoRA:  4·N·T + 4·H·V·K + 6·L·D·Σ S² + 6·A·T

N: weights of the layers' linear maps, without biases, norms and the embedding, whose lookup multiplies
nothing. T: tokens that must be read (the last answer token of a sample need not be). H·V: the head, K:
answer tokens, the only ones whose logits are needed. 6·L·D·S² is 12·L·D·S/2 per token: causal attention of L
layers and D = heads × head size over a sample of S tokens, half of the square, forward and backward. LoRA:
frozen maps have no gradient of their own; A: weights of the adapter. What is computed twice (recomputation)
counts once.

Both sides do the same work: the KL to a reference is no part of either loss, and neither asks a reference.
(Ours would in every 8th batch, to guard what nobody else guards: `learner.WATCH`. None of those is timed.)
`--profile` tells where a step's time goes, by part, beside what each part would take at the machine's
ceilings (`floors`).
"""

from __future__ import annotations

import argparse
import faulthandler
import gc
import json
import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from bench.trainer import Ours, Theirs, environment, made_up, scored_by, timed
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import AutoModelForCausalLM, Qwen2Config

from onlinerl import config
from onlinerl.learning import attention, batches
from onlinerl.learning.batches import PolicyModel, length
from onlinerl.records import Sample
from onlinerl.weights.models import resolve_model

SHAPES: dict[str, dict[str, Any]] = {
    "qwen2.5-coder-1.5b-random": {
        "vocab_size": 151_936, "hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28,
        "num_attention_heads": 12, "num_key_value_heads": 2, "hidden_act": "silu", "rms_norm_eps": 1e-6,
        "rope_theta": 1_000_000.0, "max_position_embeddings": 32_768, "tie_word_embeddings": True,
        "use_sliding_window": False, "bos_token_id": 151_643, "eos_token_id": 151_643,
    },
    "tiny-random": {  # to try the program, not to measure
        "vocab_size": 8192, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_act": "silu", "rms_norm_eps": 1e-6,
        "rope_theta": 1_000_000.0, "max_position_embeddings": 2048, "tie_word_embeddings": True,
        "use_sliding_window": False, "bos_token_id": 8183, "eos_token_id": 8183,
    },
}  # fmt: skip
"""Of public config.json files."""
PEAK = 989e12
"""Dense bf16 FLOP/s of an H100 SXM or H200, by their data sheet."""
WARM = 2
"""Steps before the clock starts."""
RANK = 16
TOKENS = 65_536
"""Of one optimiser step."""
RATE, COPY = 730e12, 4.1e12
"""FLOP/s of the model's largest product and bytes/s of a copy, as one H200 had them."""
PARTS = {
    "attention": r"flash|fmha|sdpa|attention",
    "products": r"gemm|nvjet|cutlass|xmma|cublas|splitk|_mm_",
    "optimiser and clip": r"adam|lpnorm|norm.*multi|multi_tensor",
    "compiled (norms, rotary, gated product, conversions, loss)": r"triton",
    "copies and fills": r"memcpy|memset|copy|fill",
    "loss, not compiled": r"softmax|gather|scatter|reduce",
}
"""Which part a kernel is of, by its name; the first that fits."""


@dataclass(frozen=True, slots=True)
class Context:
    """Samples of one length, or from half of it up to it."""

    name: str
    size: int
    answer: int
    samples: int
    spread: bool = False

    def draw(self, words: int) -> list[Sample]:
        """Random tokens."""
        rng = random.Random(0)
        most = self.size - self.answer
        low = self.size // 2 - self.answer if self.spread else most
        return [made_up(rng, number, words, self.answer, (low, most)) for number in range(self.samples)]


def contexts(tokens: int, sizes: Sequence[int], answer: int) -> list[Context]:
    """One per size, and the first size once more with samples of unlike length."""
    made = [Context(f"{size}", size, answer, max(1, tokens // size)) for size in sizes]
    first = sizes[0]
    return [
        *made,
        Context(f"{first // 2}-{first}", first, answer, max(1, tokens * 4 // 3 // first), spread=True),
    ]


# ---------------------------------------------------------------------------------------- arithmetic


def linear_weights(shape: Mapping[str, Any]) -> list[tuple[int, int]]:
    """(inputs, outputs) of the linear maps of one layer."""
    hidden, inner = shape["hidden_size"], shape["intermediate_size"]
    head = hidden // shape["num_attention_heads"]
    narrow = head * shape["num_key_value_heads"]
    return [(hidden, hidden), (hidden, narrow), (hidden, narrow), (hidden, hidden),
            (hidden, inner), (hidden, inner), (inner, hidden)]  # fmt: skip


def useful(shape: Mapping[str, Any], samples: Sequence[Sample], rank: int) -> float:
    """FLOPs of a step by the formula above; rank 0: full fine-tuning."""
    maps, layers = linear_weights(shape), shape["num_hidden_layers"]
    weights = layers * sum(a * b for a, b in maps)
    adapter = layers * sum(rank * (a + b) for a, b in maps)
    read = [length(sample) for sample in samples]
    judged = sum(sum(sample.loss_mask) for sample in samples)
    passes = 4 if rank else 6
    products = passes * (weights * sum(read) + shape["hidden_size"] * shape["vocab_size"] * judged)
    attention = 6 * layers * shape["hidden_size"] * sum(size * size for size in read)
    return float(products + attention + 6 * adapter * sum(read))


# -------------------------------------------------------------------------------------------- pieces


def say(text: str) -> None:
    """A line of progress."""
    print(f"[{time.strftime('%H:%M:%S')}] {text}", flush=True)


def device_here() -> torch.device:
    """The GPU, or the CPU where there is none."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def prepare(folder: Path, shape: Mapping[str, Any], cases: Sequence[Context]) -> dict[str, Any]:
    """Make the model and the samples, with their log-probabilities, as files for both sides.

    Returns what the machine can do at best, to hold the results against.
    """
    device = device_here()
    torch.manual_seed(0)
    maker: Any = AutoModelForCausalLM
    with device:
        model = maker.from_config(Qwen2Config(**shape), dtype=torch.float32)
    model.to(torch.bfloat16).save_pretrained(folder / "model")
    say(f"made a model of {model.num_parameters():,} parameters")
    model.float().eval()
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    policy = PolicyModel(model, [shape["eos_token_id"]], device, dtype)
    policy.choose_layout()
    for case in cases:
        rows = scored_by(policy, case.draw(shape["vocab_size"]))
        told = [(s.prompt_ids, s.completion_ids, s.behavior_logprobs) for s in rows]
        (folder / f"{case.name}.json").write_text(json.dumps(told), encoding="utf-8")
    del policy, model
    return {"parameters": _count(shape), **(_ceilings() if device.type == "cuda" else {})}


def floors(shape: Mapping[str, Any], samples: Sequence[Sample], row: int, rank: int) -> dict[str, float]:
    """Milliseconds that the parts of a step would take by their FLOPs and bytes at RATE and COPY.

    Attention is counted at half of RATE. Bytes are those of compiled layers: each tensor written once and
    read where it is used.

    Per token and layer, H hidden, I inner, bf16 beside an fp32 residual stream: norms and residual sums 28·H
    forward and 45·H back, rotary 5·H each way, the gated product 6·I and 10·I. Per trained weight 32 bytes
    in each microbatch, for two conversions and for its gradient's conversion and sum (an adapter 20), and 46
    for AdamW and the clip. Per logit 10: its product is read three times and its gradient written and read.
    """
    maps, layers = linear_weights(shape), shape["num_hidden_layers"]
    weights = layers * sum(a * b for a, b in maps)
    head = shape["hidden_size"] * shape["vocab_size"]
    hidden, inner = shape["hidden_size"], shape["intermediate_size"]
    read = [length(sample) for sample in samples]
    judged, tokens = sum(sum(sample.loss_mask) for sample in samples), sum(read)
    passes = 4 if rank else 6
    adapter = layers * sum(rank * (a + b) for a, b in maps)
    trained = adapter if rank else weights + head
    micro = -(-tokens // row)
    products = (passes * (weights * tokens + head * judged) + 6 * adapter * tokens) / RATE
    attention = 6 * layers * hidden * sum(size * size for size in read) / (RATE / 2)
    between = layers * tokens * (83 * hidden + 16 * inner) / COPY
    moved = micro * (32 * trained if not rank else 20 * trained) / COPY
    loss = 10 * judged * shape["vocab_size"] / COPY
    found = {
        "products": products,
        "attention": attention,
        "between products": between,
        "conversions and sums of weights": moved,
        "loss": loss,
        "optimiser and clip": 46 * trained / COPY,
    }
    return {name: round(seconds * 1e3, 1) for name, seconds in found.items()}


def _count(shape: Mapping[str, Any]) -> dict[str, int]:
    layers = shape["num_hidden_layers"] * sum(a * b for a, b in linear_weights(shape))
    return {"layers' linear maps (N)": layers, "head (H·V)": shape["hidden_size"] * shape["vocab_size"]}


def _ceilings() -> dict[str, Any]:
    """TFLOP/s of bf16 products of random numbers, large ones and the model's largest, and TB/s of a copy."""
    found: dict[str, Any] = {}
    for name, (m, k, n) in {"8192³": (8192, 8192, 8192), "32768×1536×8960": (32768, 1536, 8960)}.items():
        a, b = (torch.randn(*size, device="cuda", dtype=torch.bfloat16) for size in ((m, k), (k, n)))
        found[f"matmul {name} TFLOP/s"] = round(2 * m * k * n / _seconds(lambda a=a, b=b: a @ b) / 1e12, 1)  # type: ignore[misc]
    block = torch.empty(2**31, device="cuda", dtype=torch.uint8)
    other = torch.empty_like(block)
    found["copy TB/s"] = round(2 * block.numel() / _seconds(lambda: other.copy_(block)) / 1e12, 2)
    return found | _attentions()


def _attentions() -> dict[str, Any]:
    """TFLOP/s of causal attention, forward and backward, by the kernels that torch offers for it."""
    heads, groups, head = 12, 2, 128
    found: dict[str, Any] = {}
    for count, size in ((32, 1024), (4, 8192)):
        leaves = [
            torch.randn(count, n, size, head, device="cuda", dtype=torch.bfloat16, requires_grad=True)
            for n in (heads, groups, groups)
        ]
        bounds = torch.arange(0, (count + 1) * size, size, device="cuda", dtype=torch.int32)
        for name, way in {
            "packed": partial(_packed, bounds, size),
            "lines, flash": partial(_lined, SDPBackend.FLASH_ATTENTION),
            "lines, cuDNN": partial(_lined, SDPBackend.CUDNN_ATTENTION),
        }.items():
            try:
                took = _seconds(partial(_both, way, leaves))
                rate: Any = round(6 * heads * head * size * size * count / took / 1e12, 1)
            except batches.FAULTS as fault:  # a kernel that is not there for these shapes
                rate = str(fault)[:200]
            found[f"attention {count}×{size}, {name}"] = rate
    return found


def _packed(bounds: Tensor, size: int, *leaves: Tensor) -> Tensor:
    if attention.varlen is None:
        raise ImportError("this torch has no attention for packed sequences")
    rows = [leaf.transpose(1, 2).flatten(0, 1) for leaf in leaves]
    return attention.varlen(*rows, bounds, bounds, size, size)


def _lined(kind: SDPBackend, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    with sdpa_kernel(kind):
        return F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)


def _both(way: Callable[..., Tensor], leaves: Sequence[Tensor]) -> None:
    out = way(*leaves)
    torch.autograd.grad(out, leaves, torch.ones_like(out))


def _seconds(work: Callable[[], Any]) -> float:
    times: list[float] = []
    event: Any = torch.cuda.Event
    for _ in range(12):
        start, end = event(enable_timing=True), event(enable_timing=True)
        start.record()
        work()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return statistics.median(times[2:])


def samples_of(folder: Path, case: Context) -> list[Sample]:
    """The samples that `prepare` left."""
    rng = random.Random(0)
    rows = []
    for number, (prompt, answer, logprobs) in enumerate(
        json.loads((folder / f"{case.name}.json").read_text(encoding="utf-8"))
    ):
        blank = made_up(rng, number, 2, len(answer), (1, 1))
        rows.append(
            replace(
                blank,
                prompt_ids=tuple(prompt),
                completion_ids=tuple(answer),
                behavior_logprobs=tuple(logprobs),
            )
        )
    return rows


def clock(
    step: Callable[[], dict[str, float]], samples: Sequence[Sample], flops: float, repeats: int
) -> dict[str, Any]:
    """Steps timed, and what follows from the median. Raises OutOfMemoryError."""
    device = device_here()
    first, *_ = [timed(step, device)[0] for _ in range(WARM)]
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    seconds = [timed(step, device)[1] for _ in range(repeats)]
    typical = statistics.median(seconds)
    read = sum(len(s.prompt_ids) + len(s.completion_ids) for s in samples)
    found: dict[str, Any] = {
        "seconds": [round(value, 4) for value in seconds],
        "tokens_per_second": round(read / typical, 1),
        "tflops": round(flops / typical / 1e12, 1),
        "mfu": round(flops / typical / PEAK, 4),
        "first_loss": round(first["loss"], 6),
        "first_gradient_norm": round(first["gradient_norm"], 6),
    }
    if "kl_behaviour" in first:  # ½·(what both sides of the sampling differ by)²: why it is trusted, or not
        found["first_kl_behaviour"] = round(first["kl_behaviour"], 6)
    if device.type == "cuda":
        found["peak_memory_gib"] = round(torch.cuda.max_memory_allocated() / 2**30, 2)
        found["reserved_gib"] = round(torch.cuda.max_memory_reserved() / 2**30, 2)
    return found


def clear() -> None:
    """Give back what an out-of-memory error or a finished measurement held."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


# --------------------------------------------------------------------------------------------- sides


@dataclass(frozen=True, slots=True)
class Job:
    """What one process does."""

    side: str
    """ours, trl, or prepare."""
    rank: int
    model: str
    folder: str
    contexts: tuple[Context, ...]
    repeats: int
    plain: bool = False
    """Ours without what failed before: neither flash attention nor compiled layers."""
    profile: bool = False
    eager: bool = False
    """Ours without compiling as well."""

    @property
    def training(self) -> str:
        """For people."""
        return "LoRA" if self.rank else "full"


Row = dict[str, Any]
Emit = Callable[[Row], None]


def ours(job: Job, emit: Emit) -> None:
    """Our trainer over the job's contexts; the first one also without compiling."""
    device, folder, shape = device_here(), Path(job.folder), SHAPES[job.model]
    began = time.perf_counter()
    if job.plain:
        attention.varlen = None
    policy = PolicyModel.load(
        folder / "model",
        device,
        torch.bfloat16 if device.type == "cuda" else torch.float32,
        config.Lora(rank=job.rank) if job.rank else None,
        compile=device.type == "cuda" and not job.plain,
    )
    loading = round(time.perf_counter() - began, 1)
    say(f"ours, {job.training}: loaded in {loading} s; {policy.fallbacks or 'every fast way is used'}")
    side = Ours(policy, "auto", job.contexts[0].samples)
    for case in job.contexts:
        samples = samples_of(folder, case)
        flops = useful(shape, samples, job.rank)
        ways = [policy.layers.compiled]
        if job.eager and case is job.contexts[0] and policy.layers.compiled and not job.rank:
            ways.append(False)
        for compiled in ways:
            policy.layers.run(compiled=compiled, recompute=False)
            policy._footprint, side.learner._planned = None, 0  # another way keeps other tensors
            row: Row = {"side": "ours", "training": job.training, "context": case.name, "compiled": compiled,
                        "flash": policy.flash, "lines": policy.lined,
                        "loss_compiled": policy._loss is not None, "loading_seconds": loading,
                        "fallbacks": policy.fallbacks}  # fmt: skip
            while True:
                try:
                    row |= clock(lambda rows=samples, s=side: s.step(rows), samples, flops, job.repeats)  # type: ignore[misc]
                except torch.cuda.OutOfMemoryError:
                    tokens = side.learner.plan.row // 2
                    say(f"ours, {job.training}, {case.name}: rows of {2 * tokens} tokens do not fit")
                    row["halved_from"] = row.get("halved_from") or 2 * tokens
                    if tokens < case.size:
                        row["failed"] = "out of memory"
                    side = Ours(policy, tokens, job.contexts[0].samples)
                clear()
                if "mfu" in row or "failed" in row:
                    break
            row |= {"microbatch_tokens": side.learner.plan.row, "recompute": side.learner.plan.recompute,
                    "trusted": side.learner.trusted}  # fmt: skip
            if policy._footprint is not None:
                row["kept_bytes_per_token"] = {k: round(v) for k, v in asdict(policy._footprint).items()}
            emit(row)
            if job.profile and "failed" not in row:
                emit({"side": "ours", "training": job.training, "context": case.name, "compiled": compiled,
                      "floors": floors(shape, samples, side.learner.plan.row, job.rank),
                      "profile": profile(lambda rows=samples, s=side: s.step(rows))})  # type: ignore[misc]  # fmt: skip
            clear()
        policy.layers.run(compiled=ways[0], recompute=False)


def profile(step: Callable[[], Any]) -> dict[str, Any]:
    """Where one step's time goes: milliseconds of the GPU by PARTS, idle ones, and the kernels that take most
    of it."""
    from torch.profiler import ProfilerActivity, profile

    _, whole = timed(step, device_here())
    try:
        with profile(activities=[ProfilerActivity.CUDA]) as seen:
            step()
            torch.cuda.synchronize()
        found = sorted(seen.key_averages(), key=lambda one: -one.self_device_time_total)
    except batches.FAULTS as fault:  # a profiler that this machine refuses costs no measurement
        return {"failed": str(fault)[:300]}
    parts: dict[str, float] = {}
    for one in found:
        part = part_of(one.key)
        parts[part] = parts.get(part, 0.0) + one.self_device_time_total / 1e3
    parts["idle"] = whole * 1e3 - sum(parts.values())
    return {
        "step": round(whole * 1e3, 1),
        "parts": {name: round(value, 1) for name, value in parts.items()},
        "kernels": [
            {"kernel": one.key[:110], "ms": round(one.self_device_time_total / 1e3, 2), "calls": one.count}
            for one in found[:40]
        ],
    }


def part_of(kernel: str) -> str:
    """Which of PARTS a kernel belongs to."""
    return next((part for part, names in PARTS.items() if re.search(names, kernel.lower())), "other")


def trl(job: Job, emit: Emit) -> None:
    """TRL's trainer over the job's contexts, with and without gradient checkpointing."""
    device, folder, shape = device_here(), Path(job.folder), SHAPES[job.model]
    began = time.perf_counter()
    most = max(case.samples for case in job.contexts)
    answer = max(case.answer for case in job.contexts)
    side = Theirs(folder / "model", resolve_model("fim-27m"), device, most, answer, job.rank)
    loading = round(time.perf_counter() - began, 1)
    say(f"trl, {job.training}: loaded in {loading} s")
    for case in job.contexts:
        samples = samples_of(folder, case)
        flops = useful(shape, samples, job.rank)
        for checkpointing in (False, True):
            side.checkpoint(checkpointing)
            row: Row = {"side": "trl", "training": job.training, "context": case.name,
                        "gradient_checkpointing": checkpointing, "loading_seconds": loading,
                        "halved_from": None}  # fmt: skip
            # With checkpointing twice as many tokens are tried as we ever use; without, half as many.
            micro = min(case.samples, max(1, (TOKENS if checkpointing else TOKENS // 2) // case.size))
            while True:
                try:
                    row |= clock(
                        lambda rows=samples, m=micro: side.step(rows, m),  # type: ignore[misc]
                        samples,
                        flops,
                        job.repeats,
                    )
                except torch.cuda.OutOfMemoryError:
                    say(f"trl, {job.training}, {case.name}: {micro} samples at once do not fit")
                    row["halved_from"] = row["halved_from"] or micro
                    if micro > 1:
                        micro //= 2
                    else:
                        row["failed"] = "out of memory with one sample"
                except batches.FAULTS as fault:  # the other ways may do
                    row["failed"] = f"{type(fault).__name__}: {str(fault)[:300]}"
                else:
                    row["samples_at_once"] = micro
                if job.profile and "samples_at_once" in row and not checkpointing:
                    row["profile"] = profile(lambda rows=samples, m=micro: side.step(rows, m))  # type: ignore[misc]
                side.optimizer.zero_grad(set_to_none=True)
                clear()
                if "samples_at_once" in row or "failed" in row:
                    break
            emit(row)


# ---------------------------------------------------------------------------------------------- whole


def work(job: Job, emit: Emit) -> None:
    """Do a job."""
    if job.side == "prepare":
        emit({"ceilings": prepare(Path(job.folder), SHAPES[job.model], job.contexts)})
    else:
        {"ours": ours, "trl": trl}[job.side](job, emit)


def elsewhere(job: Job, emit: Emit, seconds: float) -> str | None:
    """Do a job in a process of its own; what went wrong, if something did."""
    with tempfile.TemporaryDirectory() as place:
        lines = Path(place) / "rows.jsonl"
        told = json.dumps({"job": asdict(job), "rows": str(lines)})
        try:
            done = subprocess.run(
                [sys.executable, "-m", "bench.large", told],
                stderr=subprocess.PIPE,
                text=True,
                timeout=seconds,
                check=False,
                env={**os.environ, "TORCH_LOGS": "recompiles"},
            )
            wrong = None if done.returncode == 0 else f"exit {done.returncode}: {done.stderr[-1500:]}"
        except subprocess.TimeoutExpired as late:
            said: str | bytes = late.stderr or ""  # bytes, though text was asked for
            last = (said.decode() if isinstance(said, bytes) else said)[-3000:]
            wrong = f"not done after {seconds:.0f} s: {last}"
        for line in lines.read_text(encoding="utf-8").splitlines() if lines.exists() else []:
            emit(json.loads(line))
        return wrong


def compare(rows: Sequence[Row]) -> list[Row]:
    """Ours against the faster of TRL's ways, by context and kind of training."""
    made: list[Row] = []
    for training, context in dict.fromkeys((row["training"], row["context"]) for row in rows if "mfu" in row):
        mine = [r for r in rows if _is(r, "ours", training, context)]
        other = [r for r in rows if _is(r, "trl", training, context)]
        best = {name: max(found, key=lambda r: float(r["tokens_per_second"]), default=None)
                for name, found in (("ours", mine), ("trl", other))}  # fmt: skip
        row: Row = {"training": training, "context": context}
        for name, one in best.items():
            if one is not None:
                row |= {f"{name} tokens/s": one["tokens_per_second"], f"{name} MFU": one["mfu"],
                        f"{name} GiB": one.get("peak_memory_gib")}  # fmt: skip
        if best["ours"] and best["trl"]:
            row["ratio"] = round(best["ours"]["tokens_per_second"] / best["trl"]["tokens_per_second"], 3)
        made.append(row)
    return made


def _is(row: Row, side: str, training: str, context: str) -> bool:
    return "mfu" in row and (row["side"], row["training"], row["context"]) == (side, training, context)


def _line(row: Row) -> str:
    return json.dumps({name: value for name, value in row.items() if name != "profile"}, ensure_ascii=False)


def options(parser: argparse.ArgumentParser) -> None:
    """Those of the large models."""
    parser.add_argument("--sides", default="ours,trl", help="large models: which, by comma")
    parser.add_argument("--training", default="full,lora", help="large models: which, by comma")
    parser.add_argument("--contexts", default="1024,8192", help="large models: tokens of a sample, by comma")
    parser.add_argument("--tokens", type=int, default=TOKENS, help="large models: of one step")
    parser.add_argument("--answer", type=int, default=64, help="large models: tokens of an answer")
    parser.add_argument(
        "--budget", type=float, default=570.0, help="large models: begin nothing after so many s"
    )
    parser.add_argument("--inline", action="store_true", help="large models: all in this process")
    parser.add_argument("--profile", action="store_true", help="large models: tell where GPU time goes")
    parser.add_argument("--eager", action="store_true", help="large models: ours without compiling as well")


def run(given: argparse.Namespace) -> None:
    """Measure everything asked for; the file is written after each part."""
    began = time.perf_counter()
    sizes = [int(size) for size in given.contexts.split(",")]
    sides = [side for side in ("ours", "trl") if side in given.sides.split(",")]
    cases = tuple(contexts(given.tokens, sizes, given.answer))
    report: dict[str, Any] = {
        "what": "optimiser steps on equal tokens, random weights; see bench/large.py for the formula of MFU",
        "model": given.model,
        "shape": SHAPES[given.model],
        "contexts": [asdict(case) for case in cases],
        "tokens_per_step": given.tokens,
        "rank": RANK,
        "peak": PEAK,
        **environment(device_here(), "torch", "transformers", "peft", *(["trl"] if "trl" in sides else [])),
        "rows": [],
        "wrong": [],
    }  # fmt: skip
    out = given.out or Path("bench/results/trainer-large.json")
    out.parent.mkdir(parents=True, exist_ok=True)

    def emit(row: Row) -> None:
        if "ceilings" in row:
            report["ceilings"] = row["ceilings"]
        else:
            report["rows"].append(row)
        report["summary"] = compare(report["rows"])
        out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
        if given.inline:  # a process of its own has said it
            say(_line(row))

    def do(job: Job) -> bool:
        left = given.budget - (time.perf_counter() - began)
        if left < 5:
            wrong: str | None = "no time was left"
        elif given.inline:
            work(job, emit)
            wrong = None
        else:
            wrong = elsewhere(job, emit, min(left, 240.0))
        if wrong is not None:
            report["wrong"].append(
                {"side": job.side, "training": job.training, "plain": job.plain, "why": wrong}
            )
            out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
            say(f"{job.side}, {job.training}: {wrong}")
        return wrong is None

    with tempfile.TemporaryDirectory() as folder:
        if not do(Job("prepare", 0, given.model, folder, cases, given.repeats)):
            raise SystemExit("nothing can be measured")
        for training in given.training.split(","):
            rank = RANK if training == "lora" else 0
            # Unlike lengths once are enough.
            some = tuple(case for case in cases if not (rank and case.spread))
            for side in sides:
                job = Job(side, rank, given.model, folder, some, given.repeats, profile=given.profile,
                          eager=given.eager)  # fmt: skip
                if not do(job) and side == "ours":
                    do(Job(side, rank, given.model, folder, some, given.repeats, plain=True))
    for row in report.get("summary", []):
        print(json.dumps(row, ensure_ascii=False))
    print(f"{time.perf_counter() - began:.0f} s in all; {out}", flush=True)


def main(told: str) -> None:
    """One job, in a process of its own: rows go to a file as they come."""
    asked = json.loads(told)
    job = Job(**asked["job"] | {"contexts": tuple(Context(**one) for one in asked["job"]["contexts"])})

    def emit(row: Row) -> None:
        with Path(asked["rows"]).open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        say(_line(row))

    faulthandler.dump_traceback_later(50, repeat=True)  # what takes so long, if something does
    work(job, emit)


if __name__ == "__main__" and len(sys.argv) > 1:  # by itself it has nothing to do: see bench.trainer
    main(sys.argv[1])
