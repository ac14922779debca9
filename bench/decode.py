"""Decode steps of the embedded engine: passes of any shape, passes of fixed shape, and CUDA graphs of them.

    python -m bench.decode [--models fim-27m,qwen2.5-coder-1.5b-random] [--seconds 50] [--out FILE]

Per model and number of rows, the milliseconds of one step that samples a token for each row at temperature 1,
its events included: median, after warming up. `any shape` is what a CPU computes and a GPU with
`engine.graphs: false`; `fixed shape` is the pass that is captured, computed eagerly; `graph` repeats it;
`capture` is the step in which that was made. Prompts are random tokens, of 150 to 200.

Then what must be so, each a line of `wrong` where it is not, and exit code 1:

- a graph draws what its pass draws when computed eagerly: the same tokens, log-probabilities to 1e-6;
- in float32 passes of any shape draw the same tokens, log-probabilities to 1e-4; in bfloat16, where other
  kernels round otherwise, log-probabilities differ by less than 0.05 in the mean up to the first other token;
- after new weights took the place of the old ones, a graph draws what these draw.

And for the offline engine, 256 prompts of 200 tokens × 48 tokens: seconds of a batch with and without
graphs, new weights before each. A profile of one eager step and one graph step closes the report. Cases that
do not fit into `--seconds` are left out, and named. On a CPU a graph is the pass itself: that tries the
program.
"""

from __future__ import annotations

import argparse
import cProfile
import io
import json
import pstats
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from bench.large import SHAPES
from bench.trainer import environment
from torch.profiler import ProfilerActivity, profile
from transformers import AutoModelForCausalLM, Qwen2Config
from transformers.utils import logging as transformers_logging

from onlinerl import config
from onlinerl.records import Generation
from onlinerl.replica.decoder import End, Event, Group, Running
from onlinerl.replica.graphs import AFTER, Capture, Replay, capture_cuda
from onlinerl.replica.model import Skeleton, Weights, build, place_weights
from onlinerl.replica.rows import ATTENTION
from onlinerl.validate.engine import LocalEngine
from onlinerl.weights.models import resolve_model

RESULTS = Path(__file__).parent / "results" / "decode.json"
WARM = 3
"""Steps before the clock counts."""
CONTEXT = 2048


def identity(compute: Callable[[], None], pool: object) -> tuple[Replay, object]:
    """A capture that captures nothing."""
    return compute, pool


@dataclass(slots=True)
class Course:
    """What a group drew, and how long that took."""

    tokens: list[list[int]]
    logprobs: list[list[float]]
    seconds: list[float] = field(default_factory=list)
    """Of each step."""
    prefill: float = 0.0

    def ms(self, start: int, end: int | None = None) -> float:
        """Median of these steps."""
        return round(1000 * statistics.median(self.seconds[start:end]), 2)


def skeleton_of(model: str, device: torch.device, dtype: torch.dtype) -> Skeleton:
    """A model of the package, or a random one of a shape, made where it runs."""
    if model not in SHAPES:
        return build(resolve_model(model), device, dtype, CONTEXT)
    torch.manual_seed(0)
    factory: Any = AutoModelForCausalLM
    default = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with device:
            made = factory.from_config(Qwen2Config(**SHAPES[model]), attn_implementation=ATTENTION)
    finally:
        torch.set_default_dtype(default)
    return Skeleton(made.eval().requires_grad_(False), {}, CONTEXT)


def requests(rows: int, words: int, new: int, size: int, version: int = 0) -> list[Generation]:
    """Random prompts, each with its seed, that run to their length."""
    rng = random.Random(rows)
    return [
        Generation(
            id="bench",
            policy="tab",
            version=version,
            prompt_ids=tuple(rng.randrange(words) for _ in range(rng.randint(size * 3 // 4, size))),
            max_tokens=new,
            seed=number,
        )
        for number in range(rows)
    ]


@torch.inference_mode()
def admit(group: Group, asked: Sequence[Generation]) -> list[Running]:
    """Give each its row."""
    begun = []
    for request in asked:
        one = Running(
            request=request,
            limit=request.max_tokens,
            ids=list(request.prompt_ids),
            uniform=random.Random(request.seed),
        )
        group.admit(one)
        begun.append(one)
    return begun


@torch.inference_mode()
def run(group: Group, asked: Sequence[Generation]) -> Course:
    """All of it, to the end."""
    begun = admit(group, asked)
    events: list[Event] = []
    start = time.perf_counter()
    while group.reading:
        events += group.step(1 << 20)[0]
    course = Course([one.ids[one.prompt :] for one in begun], [[] for _ in begun])
    course.prefill = time.perf_counter() - start
    while group.running:
        start = time.perf_counter()
        events += group.step(0)[0]
        course.seconds.append(time.perf_counter() - start)
    place = {id(one): number for number, one in enumerate(begun)}
    for owner, item in events:
        if not isinstance(item, End):
            course.logprobs[place[id(owner)]].append(item.logprob)
    course.tokens = [one.ids[one.prompt :] for one in begun]
    return course


def compare(one: Course, other: Course) -> dict[str, float]:
    """Share of sequences that are equal, and the differences of log-probabilities up to (and without) the
    first token that differs."""
    equal, apart = 0, list[float]()
    for a, b, p, q in zip(one.tokens, other.tokens, one.logprobs, other.logprobs, strict=True):
        same = next((n for n, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), len(a))
        equal += same == len(a)
        apart += [abs(x - y) for x, y in zip(p[:same], q[:same], strict=True)]
    return {
        "equal": equal / len(one.tokens),
        "mean": statistics.fmean(apart) if apart else 0.0,
        "most": max(apart, default=0.0),
    }


def check(wrong: list[str], name: str, found: dict[str, float], *, most: float, mean: float) -> None:
    """`most` 0: tokens may differ."""
    if not found["mean"] <= mean or (most and not (found["equal"] == 1 and found["most"] <= most)):
        wrong.append(f"{name}: {found}")


def case(
    skeleton: Skeleton, weights: Weights, rows: int, new: int, size: int, wrong: list[str], capture: Capture
) -> dict[str, Any]:
    """One model with one number of rows."""
    asked = requests(rows, skeleton.vocabulary, new, size)
    name = f"{rows} rows"
    single = Group(0, skeleton, weights, rows)
    single.batched = False
    plain = run(single, asked)
    graph_group = Group(0, skeleton, weights, rows, capture)
    graph = run(graph_group, asked)
    fixed = run(Group(0, skeleton, weights, rows, identity), asked)
    captured = graph_group.steps.captured if graph_group.steps else frozenset()
    if not captured:
        wrong.append(f"{name}: nothing was captured")
    found = {"graph, fixed": compare(graph, fixed), "graph, any": compare(graph, plain)}
    check(wrong, f"{name}, graph against fixed shape", found["graph, fixed"], most=1e-6, mean=1e-6)
    exact = skeleton.dtype == torch.float32
    check(
        wrong, f"{name}, graph against any shape", found["graph, any"],
        most=1e-4 if exact else 0, mean=1e-4 if exact else 0.05,
    )  # fmt: skip
    return {
        "rows": rows,
        "dtype": str(skeleton.dtype),
        "ms": {
            "any shape": plain.ms(WARM),
            "fixed shape": fixed.ms(WARM),
            "graph": graph.ms(AFTER),
            "capture": round(1000 * max(graph.seconds[AFTER - 1 : AFTER]), 1),
        },
        "speedup": round(plain.ms(WARM) / graph.ms(AFTER), 2),
        "prefill_ms": {
            "a kernel a prompt": round(1000 * plain.prefill, 1),
            "batched": round(1000 * min(graph.prefill, fixed.prefill), 1),
        },
        "shapes": [f"{shape.rows}x{shape.length}" for shape in captured],
        "compared": found,
    }


def in_place(skeleton: Skeleton, weights: Weights, rows: int, wrong: list[str], capture: Capture) -> None:
    """New weights under what was captured."""
    new = AFTER + 6
    asked = requests(rows, skeleton.vocabulary, new, 60)
    copy = Weights(tuple(tensor.clone() for tensor in weights.tensors))
    group = Group(0, skeleton, copy, rows, capture)
    before = run(group, asked)
    torch.manual_seed(1)
    state = skeleton.model.state_dict(keep_vars=False)
    names = [next(name for name in form.names if name in state) for form in skeleton.forms]
    clean = [t.to_dense() if t.is_mkldnn else t for t in weights.tensors]
    noisy = {
        name: tensor + 0.3 * tensor.float().std() * torch.randn_like(tensor)
        for name, tensor in zip(names, clean, strict=True)
        if tensor.dim() > 1
    }
    named = dict(zip(names, clean, strict=True)) | noisy
    group.renew(1, place_weights(named, skeleton, into=copy))
    after = run(group, asked)
    expected = run(Group(1, skeleton, place_weights(named, skeleton), rows), asked)
    check(wrong, "weights in place", compare(after, expected), most=1e-4, mean=1e-4)
    if after.tokens == before.tokens:
        wrong.append("weights in place: the new ones draw what the old ones drew")


def offline(rows: int, new: int, size: int, graphs: bool, times: int) -> dict[str, Any]:
    """Batches through the offline engine, the weights exchanged before each but the first."""
    folder = resolve_model("fim-27m")
    engine = LocalEngine(config.Engine(graphs=graphs), batch=rows, threads=torch.get_num_threads())
    sample, put = list[float](), list[float]()
    try:
        engine.read(0, folder)
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        loaded: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        tensors = loaded.to(device).state_dict()
        for version in range(times):
            start = time.perf_counter()
            if version:
                engine.put(version, tensors)
                engine.forget(version - 1)
            put.append(round(time.perf_counter() - start, 3))
            start = time.perf_counter()
            engine.sample(requests(rows, 8000, new, size, version))
            sample.append(round(time.perf_counter() - start, 3))
    finally:
        engine.stop()
    return {"graphs": graphs, "rows": rows, "new": new, "sample_seconds": sample, "put_seconds": put[1:]}


@torch.inference_mode()
def profiles(skeleton: Skeleton, weights: Weights, rows: int, size: int, capture: Capture) -> dict[str, Any]:
    """One step of each kind: operators, launches, and the Python functions that take the longest."""
    told: dict[str, Any] = {}
    for name, how in (("any shape", None), ("graph", capture)):
        group = Group(0, skeleton, weights, rows, how)
        admit(group, requests(rows, skeleton.vocabulary, AFTER + 40, size))
        while group.reading:
            group.step(1 << 20)
        for _ in range(AFTER + 1):
            group.step(0)
        kinds = [ProfilerActivity.CPU]
        if skeleton.device.type == "cuda":
            kinds.append(ProfilerActivity.CUDA)
        with profile(activities=kinds) as seen:
            group.step(0)
        averages = seen.key_averages()
        launches = sum(x.count for x in averages if "LaunchKernel" in x.key or "GraphLaunch" in x.key)
        python = cProfile.Profile()
        python.enable()
        for _ in range(5):
            group.step(0)
        python.disable()
        text = io.StringIO()
        pstats.Stats(python, stream=text).sort_stats("tottime").print_stats(14)
        told[name] = {
            "aten_ops": sum(x.count for x in averages if x.key.startswith("aten::")),
            "launches": launches,
            "top": [
                {"op": x.key, "count": x.count, "self_cpu_us": round(x.self_cpu_time_total)}
                for x in sorted(averages, key=lambda x: -x.self_cpu_time_total)[:14]
            ],
            "python_5_steps": [line.strip() for line in text.getvalue().splitlines() if line.strip()][4:],
        }
    return told


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, write; returns the exit code."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--models", default="fim-27m,qwen2.5-coder-1.5b-random")
    parser.add_argument("--rows", default="16,64,256")
    parser.add_argument("--new", type=int, default=AFTER + 18, help="tokens of each sequence")
    parser.add_argument("--size", type=int, default=200, help="longest prompt")
    parser.add_argument("--offline", default="256x48", help="prompts x tokens")
    parser.add_argument("--seconds", type=float, default=50.0, help="no further case is begun after these")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args(arguments)
    began = time.perf_counter()
    device = torch.device(options.device)
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    cuda = device.type == "cuda"
    capture: Capture = capture_cuda if cuda else identity
    counts = [int(rows) for rows in options.rows.split(",")]
    wrong: list[str] = []
    report: dict[str, Any] = {
        "environment": environment(device, "torch", "transformers"),
        "rows": [],
        "left_out": [],
        "offline": [],
        "wrong": wrong,
    }

    def fits(what: str) -> bool:
        if time.perf_counter() - began < options.seconds:
            return True
        report["left_out"].append(what)
        return False

    def write() -> None:
        report["seconds"] = round(time.perf_counter() - began, 1)
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")

    first, *others = options.models.split(",")
    exact = skeleton_of(first, device, torch.float32)
    held = exact.take_first()
    in_place(exact, held, min(8, counts[0]), wrong, capture)
    some = min(64, counts[-1])
    row = case(exact, held, some, options.new, options.size, wrong, capture)
    report["rows"].append({"model": first, **row})
    print(json.dumps(report["rows"][-1]), flush=True)
    del exact, held
    prompts, new = (int(number) for number in options.offline.split("x"))
    for graphs in (True, False):
        if fits(f"offline, graphs {graphs}"):
            report["offline"].append(offline(prompts, new, options.size, graphs, 4 if graphs else 3))
            print(json.dumps(report["offline"][-1]), flush=True)
            write()
    for model in (first, *others):
        if not fits(model):
            continue
        skeleton = skeleton_of(model, device, torch.bfloat16 if cuda else torch.float32)
        weights = skeleton.take_first()
        for rows in counts:
            if fits(f"{model}, {rows} rows"):
                row = case(skeleton, weights, rows, options.new, options.size, wrong, capture)
                report["rows"].append({"model": model, **row})
                print(json.dumps(report["rows"][-1]), flush=True)
                write()
        if model == first:
            report["profile"] = profiles(skeleton, weights, counts[-1], options.size, capture)
            for name, told in report["profile"].items():
                print(f"{name}: {told['aten_ops']} aten operators, {told['launches']} launches")
                for one in told["top"]:
                    print(f"  {one['self_cpu_us']:8d} us {one['count']:5d} x {one['op']}")
                print("\n".join(told["python_5_steps"]), flush=True)
        del skeleton, weights
        if cuda:
            torch.cuda.empty_cache()
    write()
    print(f"{report['seconds']} s; left out: {report['left_out']}; WRONG: {wrong}", flush=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
