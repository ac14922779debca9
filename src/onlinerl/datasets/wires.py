"""Wire forms: requests and reports, byte by byte as real clients send them.

A wire form (`Native`, `Continue`, `Fork`) is pure: it turns a prompt into one HTTP call, and a display
with the user's reaction into a timetable of further calls. `simulate.play` sends them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from typing import Any, Protocol

import orjson

from onlinerl.datasets.fim import FimPrompt
from onlinerl.datasets.users import Act, Reaction, User
from onlinerl.errors import RequestError

QWEN_STOPS = (
    "<|endoftext|>",
    "<|fim_prefix|>",
    "<|fim_middle|>",
    "<|fim_suffix|>",
    "<|fim_pad|>",
    "<|repo_name|>",
    "<|file_sep|>",
    "<|im_start|>",
    "<|im_end|>",
)
CONTINUE_STOPS = (*QWEN_STOPS, "/src/", "#- coding: utf-8", "```")
"""The twelve that Continue sends."""
CONTINUE_CUT = 0.375
"""Seconds from the start of the stream after which Continue stops to wait for more."""
CONTINUE_CHECK = 10
"""Server-sent events between two looks at that clock."""
PATIENCE = 10.0
"""Seconds after display until a client reports that nothing happened."""


class WireForm(StrEnum):
    """Whose dialect is spoken."""

    NATIVE = "native"
    CONTINUE = "continue"
    FORK = "fork"
    TABBY = "tabby"


@dataclass(frozen=True, slots=True)
class Client:
    """What a client's configuration says. Made from the command line, eaten by the wire forms."""

    model: str = "tab"
    max_tokens: int = 24
    temperature: float | None = None
    """None: not sent; the server's default holds."""
    top_p: float | None = None
    key: str = "none"
    """Bearer token."""
    project: str = "simulated"
    """Sent as X-Project-ID."""


@dataclass(frozen=True, slots=True)
class Call:
    """One HTTP POST."""

    path: str
    headers: Mapping[str, str]
    body: bytes
    after: float = 0.0
    """Seconds after display, before the speed factor."""


@dataclass(frozen=True, slots=True)
class Display:
    """What a user saw. Made by the player, eaten by a wire form's `reports`."""

    user: User
    prompt: FimPrompt
    text: str
    """As displayed, after the client's post-processing."""
    id: str
    """The server's id of the answer."""
    completion_id: str
    """The client's own ids of the completion, and of its second display from the cache."""
    cached_id: str
    seconds: float
    """The request's latency."""
    at: datetime
    """When it was displayed, in UTC."""


class Wire(Protocol):
    """A client's dialect; pure."""

    @property
    def cuts(self) -> bool:
        """True when the client closes a slow stream and shows what it has."""
        ...

    def request(self, prompt: FimPrompt, user: User) -> Call:
        """The completion request."""
        ...

    def display(self, text: str) -> str:
        """What the client makes of the answer before it shows it; "" shows nothing."""
        ...

    def reports(self, display: Display, reaction: Reaction) -> tuple[Call, ...]:
        """The feedback that follows, in order."""
        ...


def fim_text(prompt: FimPrompt) -> str:
    """The prompt in the Qwen template, without snippets."""
    return f"<|fim_prefix|>{prompt.prefix}<|fim_suffix|>{prompt.suffix}<|fim_middle|>"


@dataclass(frozen=True, slots=True)
class Native:
    """onlinerl's own: `suffix` on /v1/completions, feedback by id."""

    client: Client = Client()

    @property
    def cuts(self) -> bool:
        return False

    def request(self, prompt: FimPrompt, user: User) -> Call:
        body: dict[str, Any] = {
            "model": self.client.model,
            "prompt": prompt.prefix,
            "suffix": prompt.suffix,
            "max_tokens": self.client.max_tokens,
        }
        _sampling(body, self.client)
        body |= {"stream": True, "user": user.name}
        return Call("/v1/completions", self._headers(), orjson.dumps(body))

    def display(self, text: str) -> str:
        return text

    def reports(self, display: Display, reaction: Reaction) -> tuple[Call, ...]:
        events: list[tuple[str, float]] = [("shown", 0.0)]
        if reaction.cached:
            events.append(("shown", reaction.seconds / 2))
        match reaction.act:
            case Act.ACCEPT:
                events.append(("accepted", reaction.seconds))
            case Act.REJECT:
                events.append(("rejected", reaction.seconds))
            case Act.TIMEOUT:
                events.append(("ignored", PATIENCE))
            case Act.LATE_ACCEPT:
                events += [("ignored", PATIENCE), ("accepted", PATIENCE + reaction.seconds)]
            case Act.NOTHING:
                return ()
            case Act.UNRATED:
                pass
        return tuple(self._event(display, event, after) for event, after in events)

    def _event(self, display: Display, event: str, after: float) -> Call:
        body = {
            "id": display.id,
            "index": 0,
            "event": event,
            "displayed_text": display.text,
            "user": display.user.name,
        }
        return Call("/v1/feedback", self._headers(), orjson.dumps(body), after)

    def _headers(self) -> dict[str, str]:
        return {
            "Content-Type": "application/json",
            "Authorization": f"Bearer {self.client.key}",
            "X-Project-ID": self.client.project,
        }


@dataclass(frozen=True, slots=True)
class Continue:
    """Upstream Continue: `provider: openai` and a `data:` destination."""

    client: Client = Client(model="Qwen2.5-Coder-1.5B")

    @property
    def cuts(self) -> bool:
        return True

    def request(self, prompt: FimPrompt, user: User) -> Call:
        body: dict[str, Any] = {"model": self.client.model, "max_tokens": self.client.max_tokens}
        _sampling(body, self.client)
        body |= {"stream": True, "stop": list(CONTINUE_STOPS), "prompt": fim_text(prompt)}
        headers = {
            "Content-Type": "application/json",
            "Authorization": f"Bearer {self.client.key}",
            "api-key": self.client.key,
            "X-User-ID": user.name,
        }
        return Call("/v1/completions", headers, orjson.dumps(body))

    def display(self, text: str) -> str:
        # Qwen's answers often begin with a space too many; a blank answer is not shown at all.
        text = text.removeprefix(" ")
        return text if text.strip() else ""

    def reports(self, display: Display, reaction: Reaction) -> tuple[Call, ...]:
        return tuple(
            self._event(display, reaction, accepted, after) for accepted, after in _outcomes(reaction)
        )

    def _event(self, display: Display, reaction: Reaction, accepted: bool, after: float) -> Call:
        seen, text, completion_id = _second_display(display, reaction)
        data = {
            "timestamp": _iso(display.at + timedelta(seconds=after)),
            "userId": "",
            "userAgent": "Visual Studio Code/1.104.0 (Continue/2.0.0)",
            "selectedProfileId": "local",
            "eventName": "autocomplete",
            "schema": "0.2.0",
            "accepted": accepted,
            "time": round(display.seconds * 1000),
            "prefix": seen.prefix,
            "suffix": seen.suffix,
            "prompt": fim_text(seen),
            "completion": text,
            "modelProvider": "openai",
            "modelName": self.client.model,
            "cacheHit": reaction.cached,
            "filepath": f"file:///project/{seen.path}",
            "completionId": completion_id,
            "uniqueId": _machine(display.user),
            "disable": False,
            "useCache": True,
            "onlyMyCode": True,
            "useRecentlyEdited": True,
            "debounceDelay": 60,
            "maxPromptTokens": 1024,
        }
        body = {
            "name": "autocomplete",
            "data": data,
            "schema": "0.2.0",
            "level": "all",
            "profileId": "local",
        }
        headers = {
            "Content-Type": "application/json",
            "Authorization": f"Bearer {self.client.key}",
            "X-Project-ID": self.client.project,
        }
        return Call("/api/training/submit", headers, orjson.dumps(body), after)


@dataclass(frozen=True, slots=True)
class Fork:
    """The patched Continue of the seed: the same request, flat JSON as feedback, a fixed token."""

    client: Client = Client(model="Qwen2.5-Coder-1.5B")

    @property
    def cuts(self) -> bool:
        return True

    def request(self, prompt: FimPrompt, user: User) -> Call:
        call = Continue(self.client).request(prompt, user)
        # Its configuration names no user.
        headers = {name: value for name, value in call.headers.items() if name != "X-User-ID"}
        return Call(call.path, headers, call.body)

    def display(self, text: str) -> str:
        return Continue(self.client).display(text)

    def reports(self, display: Display, reaction: Reaction) -> tuple[Call, ...]:
        return tuple(
            self._event(display, reaction, accepted, after) for accepted, after in _outcomes(reaction)
        )

    def _event(self, display: Display, reaction: Reaction, accepted: bool, after: float) -> Call:
        seen, text, completion_id = _second_display(display, reaction)
        body = {
            "completionId": completion_id,
            "filepath": f"file:///project/{seen.path}",
            "prefix": seen.prefix,
            "suffix": seen.suffix,
            "prompt": fim_text(seen),
            "completion": text,
            "modelProvider": "openai",
            "modelName": self.client.model,
            "accepted": accepted,
            "timestamp": _iso(display.at + timedelta(seconds=after)),
            "time": round(display.seconds * 1000),
            "uniqueId": _machine(display.user),
            "numLines": text.count("\n") + 1,
            "cacheHit": reaction.cached,
        }
        headers = {
            "Content-Type": "application/json",
            "Authorization": "Bearer test-token",
            "X-Project-ID": self.client.project,
        }
        return Call("/api/training/submit", headers, orjson.dumps(body), after)


def wire(form: WireForm, client: Client) -> Wire:
    """The dialect of that name. Raises RequestError for Tabby, which is not spoken yet."""
    match form:
        case WireForm.NATIVE:
            return Native(client)
        case WireForm.CONTINUE:
            return Continue(client)
        case WireForm.FORK:
            return Fork(client)
        case WireForm.TABBY:
            raise RequestError(
                "the tabby protocol is not spoken yet: use --protocol native, continue or fork",
                parameter="protocol",
            )


def _sampling(body: dict[str, Any], client: Client) -> None:
    if client.temperature is not None:
        body["temperature"] = client.temperature
    if client.top_p is not None:
        body["top_p"] = client.top_p


def _outcomes(reaction: Reaction) -> tuple[tuple[bool, float], ...]:
    """Continue's reports: accepted at once, or refused when its clock runs out; it has no dismissal."""
    match reaction.act:
        case Act.ACCEPT:
            return ((True, reaction.seconds),)
        case Act.REJECT | Act.TIMEOUT:
            return ((False, PATIENCE),)
        case Act.LATE_ACCEPT:
            return ((False, PATIENCE), (True, PATIENCE + reaction.seconds))
        case Act.UNRATED | Act.NOTHING:
            return ()


def _second_display(display: Display, reaction: Reaction) -> tuple[FimPrompt, str, str]:
    """What Continue reports on: after a cache hit a prompt that was never sent, under a new id."""
    if not reaction.cached:
        return display.prompt, display.text, display.completion_id
    typed = display.text[: reaction.typed]
    prompt = display.prompt
    moved = FimPrompt(prompt.prefix + typed, prompt.suffix, prompt.middle, prompt.path, prompt.language)
    return moved, display.text[reaction.typed :], display.cached_id


def _iso(at: datetime) -> str:
    """As JavaScript's toISOString writes it."""
    return at.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%S.") + f"{at.microsecond // 1000:03d}Z"


def _machine(user: User) -> str:
    return hashlib.sha256(user.name.encode()).hexdigest()
