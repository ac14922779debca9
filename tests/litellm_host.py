"""A service on LiteLLM with our tap in it: `python litellm_host.py ENGINE SERVER KEY`.

Run by `tests/test_tap.py` with the interpreter that LITELLM_PYTHON names: LiteLLM is no dependency of ours.
Prints as JSON what its clients got.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"

import litellm

from onlinerl.tap import Tap, litellm_callback


async def main(engine: str, server: str, key: str) -> None:
    tap = Tap(server, key, "tab")
    litellm.callbacks = [litellm_callback(tap)]
    # what the proxy's model_list has under litellm_params
    model = {"api_base": engine, "api_key": "none", "extra_body": {"return_token_ids": True}}
    chat = await litellm.acompletion(
        model="hosted_vllm/tab@0",
        messages=[{"role": "user", "content": "hello"}],
        logprobs=True,
        temperature=0.8,
        user="ann",
        **model,
    )
    text = await litellm.atext_completion(
        model="hosted_vllm/tab@0", prompt="def f(x):\n    return ", logprobs=1, user="ben", **model
    )
    stream = await litellm.acompletion(
        model="hosted_vllm/tab@0",
        messages=[{"role": "user", "content": "hello"}],
        stream=True,
        logprobs=True,
        **model,
    )
    streamed = ""
    async for chunk in stream:
        streamed = chunk.id
    sync = await asyncio.to_thread(
        litellm.completion,
        model="openai/tab@0",
        messages=[{"role": "user", "content": "hello"}],
        logprobs=True,
        **model,
    )
    await asyncio.sleep(1)  # LiteLLM logs behind its answers
    tap.close()
    ids = {"chat": chat.id, "text": text.id, "stream": streamed, "sync": sync.id}
    print(json.dumps({**ids, "pushed": tap.pushed, "dropped": tap.dropped}))


asyncio.run(main(*sys.argv[1:]))
