"""The embedded engine against transformers' own: `python bench/engine.py [--vllm PYTHON] [--quick]`.

One run, one thread, the base model in float32, prompts of about 200 tokens. Each contender gets the same
prompts in turn, several rounds, and the best round counts: other work on the machine only ever slows one
down. Beside the wall clock's speed stands that per second of processor time (client and server together),
which suffers less from neighbours. Nobody sees a prompt twice, so no cache of earlier prompts helps. Then
the gaps between tokens of 16 steady streams, and the same while versions are loaded and switched to.
Writes bench/results/engine.json.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import queue
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"
os.environ["HF_HUB_OFFLINE"] = "1"

import torch
import transformers
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig

from onlinerl.engines.embedded import EmbeddedEngine
from onlinerl.records import FinishReason, Generation, Token, Version, VersionState
from onlinerl.replica.decoder import Decoder, End, Event, Group
from onlinerl.replica.model import build
from onlinerl.weights.models import resolve_model

MODEL = resolve_model("fim-27m")
RESULTS = Path(__file__).parent / "results" / "engine.json"
GenerationConfig: Any = transformers.GenerationConfig
Prompt = tuple[int, ...]
Contender = Callable[[Sequence[Prompt], int, int], int]
"""Prompts, new tokens for each, concurrency → tokens made."""


def endless_prompts() -> Iterator[Prompt]:
    """Fill-in-the-middle prompts of 180 to 220 tokens from the standard library, each another one."""
    tokenizer = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
    number = 0
    for file in sorted(Path(os.__file__).parent.glob("*.py")):
        ids = tokenizer.encode(file.read_text(encoding="utf-8")).ids
        for start in range(0, len(ids) - 230, 230):
            size = 177 + number * 7 % 41
            piece = ids[start : start + size]
            yield (8184, *piece[: size * 3 // 4], 8186, *piece[size * 3 // 4 :], 8185)
            number += 1


def plain_generate(model: Any) -> Contender:
    """transformers' generate, in batches of `concurrency`, padded on the left."""

    def run(prompts: Sequence[Prompt], new: int, concurrency: int) -> int:
        config = GenerationConfig(
            max_new_tokens=new, min_new_tokens=new, do_sample=True, top_k=0, pad_token_id=0, use_cache=True
        )
        for start in range(0, len(prompts), concurrency):
            batch = prompts[start : start + concurrency]
            longest = max(map(len, batch))
            ids = torch.tensor([(0,) * (longest - len(p)) + p for p in batch])
            mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in batch])
            out = model.generate(ids, attention_mask=mask, generation_config=config)
            assert out.shape[1] == longest + new
        return len(prompts) * new

    return run


@contextmanager
def continuous_batching() -> Iterator[Contender]:
    """transformers' ContinuousBatchingManager, set up as ENGINES.md found it to be right and fastest."""
    model: Any = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32, attn_implementation="sdpa")
    model.eval()
    manager = model.init_continuous_batching(
        generation_config=GenerationConfig(
            max_new_tokens=64, do_sample=True, top_k=0, eos_token_id=-1, pad_token_id=0, use_cache=True
        ),
        continuous_batching_config=ContinuousBatchingConfig(
            page_size=32, num_blocks=256, max_batch_tokens=512, return_logprobs=True, seed=1,
            allow_block_sharing=False, use_async_batching=False, use_cuda_graph=False,
        ),
    )  # fmt: skip
    manager.start()

    def run(prompts: Sequence[Prompt], new: int, concurrency: int) -> int:
        made, waiting, running = 0, list(prompts), set[str]()
        while waiting or running:
            while waiting and len(running) < concurrency:
                running.add(manager.add_request(list(waiting.pop()), max_new_tokens=new))
            result = manager.get_result(timeout=1)
            if result is None:
                assert manager.is_running(), "continuous batching died"
            elif result.is_finished():
                running.discard(result.request_id)
                made += len(result.generated_tokens)
        return made

    yield run
    manager.stop(block=True)


@contextmanager
def own_loop() -> Iterator[Contender]:
    """The replica's decoding loop, in this process, without HTTP."""
    events: queue.SimpleQueue[list[Event]] = queue.SimpleQueue()

    def crashed(error: BaseException) -> None:
        print(f"the loop broke: {error}", file=sys.stderr, flush=True)
        os._exit(1)

    decoder = Decoder(concurrency=16, queue=1024, prefill=128, threads=1, deliver=events.put, crashed=crashed)
    skeleton = build(MODEL, torch.device("cpu"), torch.float32, None)
    decoder.add(Group(0, skeleton, skeleton.take_first(), 16))
    decoder.start()

    def run(prompts: Sequence[Prompt], new: int, concurrency: int) -> int:
        made, running, waiting = 0, 0, list(prompts)
        while waiting or running:
            while waiting and running < concurrency:
                decoder.submit(ask(waiting.pop(), new), None)
                running += 1
            for _, event in events.get():
                if isinstance(event, End):
                    assert event.reason is FinishReason.LENGTH
                    running -= 1
                else:
                    made += 1
        return made

    yield run
    decoder.close()
    decoder.join()


def ask(prompt: Prompt, new: int, version: int = 0) -> Generation:
    """A request that runs to its length."""
    return Generation(id="bench", policy="tab", version=version, prompt_ids=prompt, max_tokens=new)


@contextmanager
def replica(loop: asyncio.AbstractEventLoop) -> Iterator[tuple[EmbeddedEngine, int]]:
    """A replica process with the base model as version 0: its real client and its process id."""
    with tempfile.TemporaryDirectory(prefix="orl-") as folder:
        socket = Path(folder) / "r.sock"
        process = subprocess.Popen(
            [sys.executable, "-m", "onlinerl.replica", "--socket", str(socket), "--policy", "tab"],
            stdin=subprocess.PIPE,
            env={
                **os.environ,
                "ONLINERL_SETTINGS": '{"threads": 1, "resident": 8}',
                "PYTHONPATH": os.pathsep.join(sys.path),
            },
        )
        while not socket.exists():
            assert process.poll() is None, "the replica did not start"
            time.sleep(0.05)
        engine = EmbeddedEngine("bench", socket)
        try:
            loop.run_until_complete(engine.load(version(0)))
            yield engine, process.pid
            loop.run_until_complete(engine.close())
        finally:
            process.terminate()
            process.wait()


def version(id: int) -> Version:
    """The base model under a number."""
    return Version("tab", id, VersionState.LIVE, None, None, 0.0, str(MODEL), "")


def through_replica(engine: EmbeddedEngine, loop: asyncio.AbstractEventLoop) -> Contender:
    """All of it: client, socket, process."""

    async def all_of(prompts: Sequence[Prompt], new: int, concurrency: int) -> int:
        waiting = list(prompts)
        made = 0

        async def client() -> None:
            nonlocal made
            while waiting:
                async for item in engine.generate(ask(waiting.pop(), new)):
                    made += isinstance(item, Token)

        await asyncio.gather(*(client() for _ in range(concurrency)))
        return made

    return lambda prompts, new, concurrency: loop.run_until_complete(all_of(prompts, new, concurrency))


async def gaps(
    engine: EmbeddedEngine, prompts: Iterator[Prompt], seconds: float, switches: int
) -> dict[str, Any]:
    """Gaps between the tokens of 16 streams, steady and while versions are loaded and switched to."""
    current, stop = 0, False
    seen: list[tuple[float, float]] = []
    firsts: list[tuple[float, float]] = []
    running: dict[int, int] = {}
    failed = wrong = 0

    async def stream(number: int) -> None:
        nonlocal failed, wrong
        while not stop:
            running[number] = wanted = current
            before, first = time.monotonic(), True
            async for item in engine.generate(ask(next(prompts), 32, wanted)):
                now = time.monotonic()
                if isinstance(item, Token):
                    (firsts if first else seen).append((now, now - before))
                    before, first = now, False
                    wrong += item.version != wanted
                else:
                    failed += item.reason is not FinishReason.LENGTH
            running.pop(number)

    streams = [asyncio.create_task(stream(number)) for number in range(16)]
    await asyncio.sleep(3)
    windows: list[tuple[float, float]] = []
    loads: list[float] = []
    quiet: list[tuple[float, float]] = []
    for id in range(1, switches + 1):
        began = time.monotonic()
        await asyncio.sleep(seconds)
        start = time.monotonic()
        quiet.append((began, start))
        await engine.load(version(id))
        loads.append(time.monotonic() - start)
        current = id
        while any(v != id for v in running.values()):  # noqa: ASYNC110 - a look now and then is enough here
            await asyncio.sleep(0.01)
        windows.append((start, time.monotonic()))
        await engine.unload(id - 1)
        await asyncio.sleep(1)
    stop = True
    await asyncio.gather(*streams)

    def of(samples: list[tuple[float, float]], spans: list[tuple[float, float]]) -> list[float]:
        return sorted(gap for at, gap in samples if any(a <= at <= b for a, b in spans))

    steady, switching, first_steady, first_switching = (
        of(seen, quiet), of(seen, windows), of(firsts, quiet), of(firsts, windows)
    )  # fmt: skip
    loading = of(seen, [(a, a + s) for (a, _), s in zip(windows, loads, strict=True)])
    return {
        "streams": 16,
        "switches": switches,
        "failed": failed,
        "wrong_version": wrong,
        "load_seconds": [round(s, 3) for s in loads],
        "steady": quantiles(steady),
        "loading": quantiles(loading),
        "loading_and_draining": quantiles(switching),
        "p99_ratio_loading": round(at(loading, 0.99) / at(steady, 0.99), 2),
        "p99_ratio_loading_and_draining": round(at(switching, 0.99) / at(steady, 0.99), 2),
        "first_token_steady": quantiles(first_steady),
        "first_token_switching": quantiles(first_switching),
    }


def at(ordered: list[float], share: float) -> float:
    """Quantile of an ordered list."""
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else float("nan")


def quantiles(ordered: list[float]) -> dict[str, float]:
    """In milliseconds."""
    named = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "max": 1.0}
    return {"n": len(ordered), **{k: round(1000 * at(ordered, q), 1) for k, q in named.items()}}


def vllm(python: str, prompts: Sequence[Prompt], new: int) -> dict[str, Any]:
    """vLLM's offline engine in an environment of its own: tokens per second at 1 and at 16."""
    script = (
        "import json,sys,time\n"
        "from vllm import LLM, SamplingParams\n"
        "import vllm\n"
        "a = json.load(sys.stdin)\n"
        "m = LLM(model=a['model'], dtype='float32', enforce_eager=True, max_model_len=512, max_num_seqs=16,\n"
        "        enable_prefix_caching=False)\n"
        "s = SamplingParams(temperature=1.0, max_tokens=a['new'], ignore_eos=True, logprobs=0)\n"
        "p = [{'prompt_token_ids': x} for x in a['prompts']]\n"
        "m.generate(p[:1], s, use_tqdm=False)\n"
        "r = {'version': vllm.__version__}\n"
        "t = time.perf_counter(); m.generate(p[1:17], s, use_tqdm=False)\n"
        "r['16'] = 16 * a['new'] / (time.perf_counter() - t)\n"
        "t = time.perf_counter(); m.generate(p[17:18], s, use_tqdm=False)\n"
        "r['1'] = a['new'] / (time.perf_counter() - t)\n"
        "print('RESULT' + json.dumps(r))\n"
    )
    environment = {**os.environ, "TORCH_COMPILE_DISABLE": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
    environment.pop("PYTHONPATH", None)
    done = subprocess.run(
        [python, "-c", script],
        input=json.dumps({"model": str(MODEL), "prompts": prompts, "new": new}),
        env=environment | {"VLLM_NO_USAGE_STATS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    for line in done.stdout.splitlines():
        if line.startswith("RESULT"):
            result: dict[str, Any] = json.loads(line.removeprefix("RESULT"))
            return result
    return {"failed": done.stderr.strip().splitlines()[-1:] or f"exit code {done.returncode}"}


def processor_time(pid: int) -> float:
    """Seconds of processor time used by this process and that one."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return time.process_time() + (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def machine() -> dict[str, Any]:
    """What it ran on."""
    names = [
        line.partition(":")[2].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if "model name" in line
    ]
    return {
        "cpu": names[0] if names else platform.processor(),
        "cores": os.cpu_count(),
        "load_before": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "threads": 1,
    }


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--vllm", help="python of a virtual environment with vllm-cpu")
    parser.add_argument("--quick", action="store_true", help="one round, one switch")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rounds = 1 if options.quick else 3
    prompts = endless_prompts()
    loop = asyncio.new_event_loop()
    facts: dict[str, Any] = {"machine": machine(), "model": "fim-27m", "prompt_tokens": "180-220"}
    print(json.dumps(facts), flush=True)
    works = {
        "1 at a time, 64 new": (2, 64, 1),
        "16 at a time, 64 new": (16, 64, 16),
        "48 requests, 16 at a time, 24 new": (48, 24, 16),
    }
    model: Any = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32, attn_implementation="sdpa")
    with continuous_batching() as cb, own_loop() as own, replica(loop) as (engine, pid):
        contenders: dict[str, Contender] = {
            "generate": plain_generate(model.eval()),
            "continuous batching": cb,
            "own loop": own,
            "replica": through_replica(engine, loop),
        }
        with torch.inference_mode():
            for contender in contenders.values():
                contender([next(prompts)], 4, 1)
            speeds: dict[str, dict[str, float]] = {}
            frugal: dict[str, dict[str, float]] = {}
            for work, (count, new, concurrency) in works.items():
                best = dict.fromkeys(contenders, 0.0)
                thrift = dict.fromkeys(contenders, 0.0)
                for _ in range(rounds):
                    batch = [next(prompts) for _ in range(count)]
                    for name, contender in contenders.items():
                        began, used = time.perf_counter(), processor_time(pid)
                        made = contender(batch, new, concurrency)
                        assert made == count * new, (name, made)
                        best[name] = max(best[name], made / (time.perf_counter() - began))
                        thrift[name] = max(thrift[name], made / (processor_time(pid) - used))
                speeds[work] = {name: round(speed, 1) for name, speed in best.items()}
                frugal[work] = {name: round(speed, 1) for name, speed in thrift.items()}
                ratios = {
                    name: [
                        round(best[name] / best["generate"], 2),
                        round(thrift[name] / thrift["generate"], 2),
                    ]
                    for name in contenders
                }
                facts.setdefault("ratios_to_generate_wall_and_processor", {})[work] = ratios
                print(work, speeds[work], ratios, flush=True)
        facts["tokens_per_second"] = speeds
        facts["tokens_per_processor_second"] = frugal
        facts["gaps_ms"] = loop.run_until_complete(
            gaps(engine, prompts, 4 if options.quick else 8, 1 if options.quick else 4)
        )
        print(json.dumps(facts["gaps_ms"]), flush=True)
    if options.vllm:
        facts["vllm_cpu"] = vllm(options.vllm, [next(prompts) for _ in range(18)], 64)
    else:
        facts["vllm_cpu"] = "not measured: no environment with vllm-cpu was given (--vllm)"
    print("vllm-cpu:", facts["vllm_cpu"])
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(facts, indent=1) + "\n")


if __name__ == "__main__":
    main()
