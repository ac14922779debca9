"""What the gateway costs: time added to a request, and feedback acknowledged per second, durably.

    python -m bench.gateway [--requests N] [--feedback N]

The engine is the test double, which answers at once: what is measured is the gateway alone. The server
runs in a process of its own; `bare` is the smallest uvicorn application that streams the same tokens from
the same double, so the difference is tokenising, checking, stop strings, SSE, recording and the fsync.
Writes bench/results/gateway.json.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.metadata
import json
import os
import platform
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import aiohttp
import uvicorn
import uvloop
from tests.doubles import DoubleEngine
from tests.gateways import ids_of, running, says

RESULT = Path(__file__).parent / "results" / "gateway.json"
PREFIX = "\n".join(f"def function_{n}(value):\n    return value * {n} + offset" for n in range(12))
PROMPT = f"<|fim_prefix|>{PREFIX}\n\ndef last(<|fim_suffix|>\n    return value\n<|fim_middle|>"
ANSWER = says("value, offset):\n    value = value + offset\n    value = value * 2")
STOPS = ["<|fim_prefix|>", "<|fim_suffix|>", "<|endoftext|>", "/src/", "#- coding: utf-8", "```"]


async def serve_gateway(home: Path) -> None:
    """A real gateway over the double and a store on disk; prints its address, ends with its input."""
    async with running(home) as gateway:
        gateway.engine.script = ANSWER
        print(gateway.url, flush=True)
        await asyncio.to_thread(sys.stdin.read)


async def serve_bare() -> None:
    """The smallest server over the same double."""
    engine = DoubleEngine()
    engine.script = ANSWER
    prompt_ids = tuple(ids_of(PROMPT))

    async def app(scope: Any, receive: Any, send: Any) -> None:
        from onlinerl.records import Generation, Token

        await receive()
        request = Generation("x", "tab", 0, prompt_ids, 128)
        headers = [(b"content-type", b"text/event-stream")]
        started = False
        async for item in engine.generate(request):
            if not started:
                started = True
                await send({"type": "http.response.start", "status": 200, "headers": headers})
            if isinstance(item, Token):
                body = b'data: {"token":%d}\n\n' % item.id
                await send({"type": "http.response.body", "body": body, "more_body": True})
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n", "more_body": False})

    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen(256)
        server = uvicorn.Server(uvicorn.Config(app, log_level="warning", lifespan="off"))
        serving = asyncio.create_task(server.serve([listening]))
        print(f"http://127.0.0.1:{listening.getsockname()[1]}", flush=True)
        await asyncio.to_thread(sys.stdin.read)
        server.should_exit = True
        await serving


async def timed(session: aiohttp.ClientSession, url: str) -> tuple[float, float, str]:
    """(seconds to the first event, to the last byte, the request's id)."""
    body = {"model": "tab", "prompt": PROMPT, "stream": True, "stop": STOPS}
    started = time.perf_counter()
    first = 0.0
    head = b""
    async with session.post(f"{url}/v1/completions", json=body) as reply:
        assert reply.status == 200, await reply.text()
        async for chunk in reply.content.iter_any():
            if not first:
                first, head = time.perf_counter() - started, chunk
    whole = time.perf_counter() - started
    id = head.partition(b'"id":"')[2].partition(b'"')[0].decode()
    return first, whole, id


def spread(seconds: list[float]) -> dict[str, float]:
    """p50 and p99 in milliseconds."""
    cuts = statistics.quantiles(seconds, n=100, method="inclusive")
    return {"p50_ms": round(cuts[49] * 1000, 3), "p99_ms": round(cuts[98] * 1000, 3)}


async def measure(gateway: str, bare: str, requests: int, feedback: int) -> dict[str, Any]:
    """All numbers, over running servers."""
    times: dict[str, tuple[list[float], list[float]]] = {"gateway": ([], []), "bare": ([], [])}
    ids: list[str] = []
    connector = aiohttp.TCPConnector(limit=64)
    async with aiohttp.ClientSession(connector=connector) as session:
        for url in (gateway, bare):
            for _ in range(50):
                await timed(session, url)
        for _ in range(requests):
            # by turns: what else the machine does hits both alike
            for name, url in (("gateway", gateway), ("bare", bare)):
                first, whole, id = await timed(session, url)
                times[name][0].append(first)
                times[name][1].append(whole)
                if name == "gateway":
                    ids.append(id)
        while len(ids) < feedback:
            more = await asyncio.gather(*(timed(session, gateway) for _ in range(32)))
            ids += [id for _, _, id in more]
        waiting = iter(ids[:feedback])
        latencies: list[float] = []

        async def post() -> None:
            for id in waiting:
                started = time.perf_counter()
                event = {"id": id, "event": "accepted"}
                async with session.post(f"{gateway}/v1/feedback", json=event) as reply:
                    assert (await reply.json())["status"] == "matched"
                latencies.append(time.perf_counter() - started)

        began = time.perf_counter()
        await asyncio.gather(*(post() for _ in range(64)))
        took = time.perf_counter() - began
    result: dict[str, Any] = {}
    for place, what in enumerate(("first_token", "whole_answer")):
        through, direct = spread(times["gateway"][place]), spread(times["bare"][place])
        added = {name: round(through[name] - direct[name], 3) for name in through}
        result[what] = {"gateway": through, "engine_directly": direct, "added": added}
    result["requests"] = requests
    result["tokens_per_answer"] = len(ANSWER((), 0)) + 1
    result["prompt_tokens"] = len(ids_of(PROMPT))
    result["feedback"] = {
        "posts": feedback,
        "concurrency": 64,
        "per_second": round(feedback / took),
        **spread(latencies),
    }
    return result


def start(kind: str, *arguments: str) -> tuple[subprocess.Popen[str], str]:
    """A server process and its address."""
    process = subprocess.Popen(
        [sys.executable, "-m", "bench.gateway", "--serve", kind, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    return process, process.stdout.readline().strip()


def machine() -> dict[str, Any]:
    """Where the numbers come from."""
    names = ("fastapi", "uvicorn", "uvloop", "httptools", "orjson", "pydantic", "sqlalchemy", "tokenizers")
    return {
        "cpu": platform.processor() or platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "load_1min": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        "versions": {name: importlib.metadata.version(name) for name in names},
    }


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--feedback", type=int, default=5000)
    parser.add_argument("--serve", choices=("gateway", "bare"))
    parser.add_argument("--home", type=Path)
    options = parser.parse_args()
    if options.serve == "gateway":
        uvloop.run(serve_gateway(options.home))
        return
    if options.serve == "bare":
        uvloop.run(serve_bare())
        return
    with tempfile.TemporaryDirectory() as home:
        servers = [start("gateway", "--home", home), start("bare")]
        try:
            result = uvloop.run(measure(servers[0][1], servers[1][1], options.requests, options.feedback))
        finally:
            for process, _ in servers:
                assert process.stdin is not None
                process.stdin.close()
                process.wait(timeout=20)
    result["machine"] = machine()
    RESULT.parent.mkdir(parents=True, exist_ok=True)
    RESULT.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
