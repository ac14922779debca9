"""A test DOUBLE of vLLM's OpenAI server: the shapes of its answers with `return_token_ids`, made up."""

from __future__ import annotations

import itertools
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from tests.controllers import ANSWER, PROMPT
from tests.gateways import CODEC

PROMPT_IDS = CODEC.encode(PROMPT)
IDS = [*CODEC.encode(ANSWER), CODEC.eos_ids[0]]
LOGPROBS = [-0.5 - number / 10 for number in range(len(IDS))]
TEXTS = [CODEC.token_text(id) for id in IDS]
_numbers = itertools.count(1)


def chat(model: str) -> dict[str, Any]:
    """A chat completion."""
    content = [
        {"token": text, "logprob": value, "bytes": list(text.encode()), "top_logprobs": []}
        for text, value in zip(TEXTS, LOGPROBS, strict=True)
    ]
    return {
        "id": f"chatcmpl-{next(_numbers)}",
        "object": "chat.completion",
        "created": 1,
        "model": model,
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": ANSWER},
                "logprobs": {"content": content},
                "finish_reason": "stop",
                "stop_reason": None,
                "token_ids": IDS,
            }
        ],
        "usage": {"prompt_tokens": len(PROMPT_IDS), "completion_tokens": len(IDS), "total_tokens": 1},
        "prompt_token_ids": PROMPT_IDS,
    }


def text(model: str) -> dict[str, Any]:
    """A text completion."""
    return {
        "id": f"cmpl-{next(_numbers)}",
        "object": "text_completion",
        "created": 1,
        "model": model,
        "choices": [
            {
                "index": 0,
                "text": ANSWER,
                "logprobs": {
                    "tokens": TEXTS,
                    "token_logprobs": LOGPROBS,
                    "top_logprobs": None,
                    "text_offset": [0] * len(IDS),
                },
                "finish_reason": "stop",
                "stop_reason": None,
                "token_ids": IDS,
                "prompt_token_ids": PROMPT_IDS,
            }
        ],
        "usage": {"prompt_tokens": len(PROMPT_IDS), "completion_tokens": len(IDS), "total_tokens": 1},
    }


def chunks(model: str) -> list[dict[str, Any]]:
    """A chat completion as it is streamed."""
    whole = chat(model)
    entries = whole["choices"][0]["logprobs"]["content"]
    return [
        {
            "id": whole["id"],
            "object": "chat.completion.chunk",
            "created": 1,
            "model": model,
            "choices": [
                {
                    "index": 0,
                    "delta": {"role": "assistant", "content": "" if last else TEXTS[number]},
                    "logprobs": {"content": [entries[number]]},
                    "finish_reason": "stop" if last else None,
                    "token_ids": [IDS[number]],
                }
            ],
        }
        for number in range(len(IDS))
        for last in [number == len(IDS) - 1]
    ]


@contextmanager
def serving() -> Iterator[str]:
    """Its base URL."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            assert body["return_token_ids"] is True
            self.send_response(200)
            if body.get("stream"):
                self.send_header("content-type", "text/event-stream")
                self.end_headers()
                for chunk in chunks(body["model"]):
                    self.wfile.write(b"data: " + json.dumps(chunk).encode() + b"\n\n")
                self.wfile.write(b"data: [DONE]\n\n")
                return
            made = (chat if self.path.endswith("/chat/completions") else text)(body["model"])
            content = json.dumps(made).encode()
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
