"""A tap for those who run a LiteLLM proxy before vLLM: what was served is pushed, and nothing waits for it.

In the proxy's folder, a file `learning_tap.py`, named in its configuration (docs/controller.md has that too):

    from onlinerl.tap import Tap, litellm_callback

    tap = litellm_callback(Tap("http://127.0.0.1:8081", KEY, "tab", version=0))

The host's requests neither wait for the tap nor fail with it: what does not fit into its queue, or is
refused, is dropped and counted. LiteLLM is not needed until `litellm_callback` is called.
"""

from __future__ import annotations

import atexit
import logging
import queue
import re
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

import httpx

from onlinerl.client import Client, ControllerError
from onlinerl.interface import Pushed

BATCH = 256
"""Most interactions of one push; the server takes no more."""
LINGER = 0.2
"""Seconds that a push waits for company."""
FIRST_DELAY, LONGEST_DELAY = 0.5, 30.0
"""Seconds between two attempts at a push, doubled each time."""
_VERSION = re.compile(r"@(\d{1,18})$")

log = logging.getLogger("onlinerl.tap")


class Tap:
    """Pushes interactions from a thread of its own. `put` never blocks and never raises."""

    def __init__(
        self, url: str, key: str, policy: str, *, version: int | None = None, capacity: int = 10_000
    ) -> None:
        """version: the one that is served, where the answers do not say (`tab@3` as their model or
        system_fingerprint). capacity: interactions that may wait; what comes beyond is dropped."""
        self.policy = policy
        self.version = version
        self.pushed = 0
        """Interactions that the server has; learned from or not."""
        self.dropped = 0
        """Interactions that were lost: the queue was full, the server refused them, or it was never there."""
        self._url, self._key = url, key
        self._queue: queue.Queue[tuple[Pushed, float]] = queue.Queue(capacity)
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._ended = threading.Event()

    def put(self, item: Pushed) -> None:
        """Push it some time soon. Its `age` counts on from here."""
        try:
            self._queue.put_nowait((item, time.monotonic()))
        except queue.Full:
            self._lost(1)
        with self._lock:
            # Begun here and not when it was made: a server that forks its workers afterwards has no threads.
            if self._thread is None and not self._ended.is_set():
                self._thread = threading.Thread(target=self._work, name="onlinerl-tap", daemon=True)
                self._thread.start()
                atexit.register(self.close)

    def close(self, seconds: float = 5.0) -> None:
        """Push what waits, for so long at most, and end."""
        self._ended.set()
        if self._thread is not None:
            self._thread.join(seconds)

    def _work(self) -> None:
        with Client(self._url, self._key) as client:
            while not (self._ended.is_set() and self._queue.empty()):
                batch = self._batch()
                if batch:
                    self._push(client, batch)

    def _batch(self) -> list[tuple[Pushed, float]]:
        batch: list[tuple[Pushed, float]] = []
        deadline = time.monotonic() + LINGER
        while len(batch) < BATCH and (left := deadline - time.monotonic()) > 0:
            try:
                batch.append(self._queue.get(timeout=left))
            except queue.Empty:
                break
        return batch

    def _push(self, client: Client, batch: Sequence[tuple[Pushed, float]]) -> None:
        delay = FIRST_DELAY
        while True:
            now = time.monotonic()
            items = [Pushed(**{**item, "age": item.get("age", 0.0) + now - at}) for item, at in batch]
            try:
                results = client.push(self.policy, items)
            except ControllerError as error:
                if error.status == 413 and len(batch) > 1:
                    middle = len(batch) // 2
                    self._push(client, batch[:middle])
                    self._push(client, batch[middle:])
                    return
                if error.status < 500 and error.status != 429:  # it will say the same again
                    log.error("the server refuses what was served: %s", error)
                    self._lost(len(batch))
                    return
                log.warning("the server cannot take what was served now: %s", error)
            except httpx.HTTPError as error:
                log.warning("the server does not answer: %s", type(error).__name__)
            else:
                refused = [one["reason"] for one in results if one["status"] == "refused"]
                if refused:
                    log.error("%d interactions were refused, the first one: %s", len(refused), refused[0])
                    self._lost(len(refused))
                self.pushed += len(batch) - len(refused)
                return
            if self._ended.wait(delay):
                self._lost(len(batch))
                return
            delay = min(2 * delay, LONGEST_DELAY)

    def _lost(self, count: int) -> None:
        with self._lock:
            self.dropped += count


def interactions(
    request: Mapping[str, Any], response: Mapping[str, Any], *, version: int | None, seconds: float
) -> list[Pushed]:
    """What one answered request pushes, an item a choice; none where no version is known.

    request: OpenAI's fields, of either kind. response: OpenAI's body, with what vLLM adds on
    `return_token_ids`, or LiteLLM's rendering of it. seconds: from the request to the answer's end.
    """
    told = (response.get("system_fingerprint"), response.get("model"), request.get("model"))
    named = next((match for name in told if name and (match := _VERSION.search(str(name)))), None)
    version = int(named[1]) if named else version
    if version is None:
        return []
    items = []
    for choice in response.get("choices") or ():
        more = {**choice, **(choice.get("provider_specific_fields") or {})}
        item = Pushed(
            id=str(response["id"]),
            index=int(choice.get("index") or 0),
            version=version,
            completion=str(more.get("text") or (more.get("message") or {}).get("content") or ""),
            temperature=float(_given(request, "temperature", 1.0)),
            top_p=float(_given(request, "top_p", 1.0)),
            finish="length" if choice.get("finish_reason") == "length" else "stop",
            user=str(request.get("user") or "")[:256],
            age=seconds,
            duration=seconds,
        )
        prompt_ids = more.get("prompt_token_ids") or response.get("prompt_token_ids")
        if prompt_ids:
            item["prompt_ids"] = prompt_ids
        if isinstance(request.get("prompt"), str):
            item["prompt"] = request["prompt"]
        elif not prompt_ids:
            lines = (f"{one.get('role')}: {one.get('content')}" for one in request.get("messages") or ())
            item["prompt"] = "\n".join(lines)
        logprobs = _logprobs(choice.get("logprobs") or {})
        if more.get("token_ids"):
            item["completion_ids"] = more["token_ids"]
            if len(logprobs) == len(more["token_ids"]):
                item["behavior_logprobs"] = logprobs
        items.append(item)
    return items


def _given(request: Mapping[str, Any], name: str, default: float) -> float:
    value = request.get(name)
    return default if value is None else value


def _logprobs(logprobs: Mapping[str, Any]) -> list[float | None]:
    """One a token, from the form of completions or that of chat."""
    if logprobs.get("content"):
        return [one.get("logprob") for one in logprobs["content"]]
    return list(logprobs.get("token_logprobs") or ())


def litellm_callback(tap: Tap) -> Any:
    """An instance of LiteLLM's CustomLogger that feeds `tap`; for `litellm_settings.callbacks`."""
    from litellm.integrations.custom_logger import CustomLogger

    class LiteLLMTap(CustomLogger):  # type: ignore[misc]  # it is Any where LiteLLM is not installed
        """Told by LiteLLM, after the answer has gone out, of every request that succeeded."""

        def log_success_event(self, kwargs: Any, response_obj: Any, start_time: Any, end_time: Any) -> None:
            """Of `completion`, called from a thread."""
            try:
                parameters = kwargs.get("optional_params") or {}
                request = {**parameters, "model": kwargs.get("model"), "user": kwargs.get("user")}
                messages = kwargs.get("messages") or []
                if "text_completion" in str(kwargs.get("call_type")) and len(messages) == 1:
                    request["prompt"] = messages[0].get("content")
                else:
                    request["messages"] = messages
                seconds = max(0.0, (end_time - start_time).total_seconds())
                answered = response_obj.model_dump()
                found = interactions(request, answered, version=tap.version, seconds=seconds)
                for item in found:
                    tap.put(item)
                if not found:
                    tap._lost(1)
            except Exception as error:  # noqa: BLE001  isolated: whatever it is, it must not reach the host
                tap._lost(1)
                log.error("an answer could not be understood: %s", type(error).__name__)

        async def async_log_success_event(
            self, kwargs: Any, response_obj: Any, start_time: Any, end_time: Any
        ) -> None:
            """Of `acompletion` and the proxy."""
            self.log_success_event(kwargs, response_obj, start_time, end_time)

    return LiteLLMTap()
