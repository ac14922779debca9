"""Version 1 of the controller's interface: the shapes of its answers, as the client gets them.

The OpenAPI document is made of these, and `onlinerl.client` is typed with them. Within version 1 fields may
be added, none goes and none changes its kind; `tests/recorded` holds every later server to it.
"""

from __future__ import annotations

from typing import Any, Literal, NotRequired, Required

from typing_extensions import TypedDict  # pydantic reads no other before Python 3.12

VersionState = Literal["candidate", "canary", "live", "retired", "rejected"]
ExperimentState = Literal["running", "waiting", "promoted", "futile", "aborted", "stopped"]
DecisionKind = Literal["start", "continue", "ramp", "promote", "futile", "abort", "stop"]
RunState = Literal["pending", "running", "paused", "finished", "stopped", "failed"]


class Version(TypedDict):
    """A version of a policy: an immutable set of weights."""

    policy: str
    id: int
    state: VersionState
    parent: int | None
    run: int | None
    created_at: str
    live_at: str | None
    collected_at: str | None
    """When its files were deleted; they cannot be downloaded any more."""
    url: str
    digest: str
    """SHA-256 of its manifest."""
    metrics: dict[str, float | None]


class Run(TypedDict):
    """A training run."""

    policy: str
    id: int
    state: RunState
    parent: int
    """The version it starts from."""
    created_at: str
    heartbeat_at: str
    heartbeat_age: float
    """Seconds since its process said that it lives."""
    alive: bool
    """Whether it has a process now."""
    step: int
    last_batch: int | None
    """The step after which it ends; null: no such bound."""
    follow: bool
    tau: float
    wish: Literal["", "stop", "pause"]
    """What was asked of it."""
    message: str
    """Why it ended."""


class RunProgress(Run):
    """A run with its last numbers (docs/metrics.md) and the versions that it made."""

    metrics: dict[str, float | None]
    versions: list[int]


class Decision(TypedDict):
    """Something that was decided about an experiment."""

    at: str
    stage: int
    kind: DecisionKind
    actor: str
    proposed: bool
    """A person must confirm it; nothing was done yet."""
    reason: str
    numbers: dict[str, float]
    """What it rests on: `estimate`, `low`, `high`, `units/control`, …"""


class Experiment(TypedDict):
    """Two arms on live users."""

    policy: str
    id: int
    state: ExperimentState
    control: str
    """`tab@3`."""
    treatment: str
    stage: int
    """Place in the plan's stages, from 0."""
    share: float
    """Of those who take part, who get the treatment."""
    stage_at: str | None
    """When the stage began; null: the engines do not hold both arms yet."""
    created_at: str
    ended_at: str | None
    tau: float
    alpha: float
    actor: str
    message: str
    """Why it ended."""
    plan: dict[str, Any]
    """The settings that it was started with."""


class ExperimentProgress(Experiment):
    """One experiment, with its history."""

    now: Decision | None
    """What its numbers say now; null where it has ended or not begun."""
    decisions: list[Decision]
    """Oldest first."""


class FileOfVersion(TypedDict):
    """A file as a manifest has it."""

    size: int
    sha256: str


class Manifest(TypedDict):
    """What a version is made of. Its bytes are stable: the version's digest is their SHA-256."""

    format: int
    policy: str
    id: int
    parent: int | None
    run: int | None
    created_at: float
    files: dict[str, FileOfVersion]
    tensors: dict[str, Any]
    data: dict[str, Any]
    settings: dict[str, Any]
    metrics: dict[str, float]
    adapter_base: NotRequired[int]


class Pushed(TypedDict, total=False):
    """An answer that was served elsewhere; docs/controller.md says what of it learning needs."""

    id: Required[str]
    index: int
    version: Required[int]
    prompt: str
    completion: str
    prompt_ids: list[int]
    completion_ids: list[int]
    behavior_logprobs: list[float | None]
    temperature: float
    top_p: float
    finish: Literal["stop", "length", "abort", "error"]
    user: str
    language: str
    multiline: bool
    label: str
    age: float
    duration: float


class Feedback(TypedDict, total=False):
    """What a user made of an answer; unknown fields are kept."""

    id: Required[str]
    index: int
    event: Required[Literal["shown", "accepted", "rejected", "ignored", "edited", "retained"]]
    displayed_text: str
    accepted_text: str
    retained_characters: int
    score: float
    user: str
    at: Any


class Taken(TypedDict):
    """What became of one item of a batch, in the order in which they were sent."""

    id: str | None
    index: int
    status: str
    """Of interactions: recorded, duplicate, refused. Of feedback: refused, or a status of feedback."""
    reason: str
    """Why it was refused, or why what was recorded cannot be learned from; "" where neither."""


class Batch(TypedDict):
    """The answer to a batch."""

    results: list[Taken]


class FeedbackStatus(TypedDict):
    """The answer to a single piece of feedback."""

    status: Literal["matched", "duplicate", "late", "superseded", "unmatched"]


class Submitted(TypedDict):
    """The answer to a Continue event."""

    status: Literal["submitted"]
    message: str
    queue_position: int
    feedback: Literal["matched", "duplicate", "late", "superseded", "unmatched"]


class Told(TypedDict):
    """How it stands with telling one webhook about one policy."""

    policy: str
    waiting: int
    """Events that it has not been told yet."""
    delivered: int
    dropped: int
    """Events that were given up: it took none for three days."""
    failing_since: str | None
    error: str


class Webhook(TypedDict):
    """A webhook of the settings; of its address only the machine."""

    host: str
    events: list[str]
    policies: list[Told]


class Notice(TypedDict):
    """The body that a webhook gets."""

    id: str
    """Tells a repetition."""
    type: str
    at: str
    policy: str
    data: dict[str, Any]


class Replica(TypedDict):
    """An engine."""

    name: str
    policy: str
    versions: list[int]
    state: NotRequired[Literal["up", "down"]]
    running: NotRequired[int]
    waiting: NotRequired[int]


class Model(TypedDict):
    """A policy, or a version of one that is loaded, in OpenAI's shape."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str


class Models(TypedDict):
    """All of them."""

    object: Literal["list"]
    data: list[Model]


class Choice(TypedDict):
    """One answer."""

    index: int
    text: str
    finish_reason: str | None
    logprobs: Any


class Completion(TypedDict):
    """OpenAI's text completion."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[Choice]
    usage: dict[str, Any]


class Health(TypedDict):
    """The process lives."""

    status: Literal["ok"]


class Ready(TypedDict):
    """Which version of each policy new requests get."""

    status: Literal["ready"]
    live: dict[str, int | None]


class Fault(TypedDict):
    """OpenAI's error object."""

    message: str
    type: str
    param: str | None
    code: str | None


class Failure(TypedDict):
    """Every answer that is not 2xx or 3xx."""

    error: Fault
