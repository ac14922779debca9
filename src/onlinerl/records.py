"""All that travels, in the order in which it travels.

    request → Generation → Token… Finish → Interaction → Feedback → Sample → Scored → Batch → Version → Run
            → Experiment → Decision

Each record is frozen and names who makes it and who eats it. Times are seconds since the epoch on
the server's clock (`float`); token ids are `int`; log-probabilities are natural logarithms. The
transition tables of everything that has states stand at the end; the store enforces them.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from enum import StrEnum
from types import MappingProxyType
from typing import Any

# ------------------------------------------------------------------------------------ generation


@dataclass(frozen=True, slots=True)
class Generation:
    """One sequence to sample. Made by the gateway, eaten by an engine.

    >>> Generation(id="cmpl-1", policy="tab", version=0, prompt_ids=(5, 6), max_tokens=16).temperature
    1.0
    """

    id: str
    policy: str
    version: int
    prompt_ids: tuple[int, ...]
    max_tokens: int
    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    seed: int | None = None
    stop_ids: tuple[int, ...] = ()
    """Token ids that end the sequence (the end-of-text tokens); the one sampled is returned too."""
    top_logprobs: int = 0
    """How many alternatives to report for each token."""


@dataclass(frozen=True, slots=True)
class Token:
    """One sampled token. Made by an engine, eaten by the gateway.

    `logprob` is that of the distribution the token was drawn from: after temperature and top-p
    (the **behaviour** log-probability). For greedy sampling it is that of the untempered softmax.
    """

    id: int
    logprob: float
    version: int
    top: tuple[tuple[int, float], ...] = ()


class FinishReason(StrEnum):
    """Why a sequence ended."""

    STOP = "stop"
    """An end-of-text token or a stop string."""
    LENGTH = "length"
    """`max_tokens` or the context was used up."""
    ABORT = "abort"
    """The client left."""
    ERROR = "error"
    """The engine failed: in mid-stream or, where the request was assigned in an experiment, before it."""


@dataclass(frozen=True, slots=True)
class Finish:
    """The end of a sequence. Made by an engine, eaten by the gateway."""

    reason: FinishReason


# ---------------------------------------------------------------------------- interaction, feedback


class Verdict(StrEnum):
    """What the user made of an answer, after all its feedback so far."""

    ACCEPTED = "accepted"
    REJECTED = "rejected"
    """Dismissed by hand."""
    TIMEOUT = "timeout"
    """Shown, and nothing happened until the client's clock ran out."""
    SILENT = "silent"
    """The policy chose to show nothing; labelled by the server when it was served."""


@dataclass(frozen=True, slots=True)
class Interaction:
    """A request and one answer to it, as served: the unit that is rated and learned from.

    Made by the gateway, kept by the store, turned into a `Sample` when it is claimed. A request
    with `n` > 1 or a list of prompts makes one interaction per choice: same `id`, other `index`.

    >>> one = Interaction.example()
    >>> one.silent, one.loss_mask()
    (False, (True, True, True))
    >>> from dataclasses import replace
    >>> replace(one, displayed=4).loss_mask()  # the client cut the stream after "retu"
    (True, False, False)
    """

    id: str
    index: int
    policy: str
    version: int
    """Version of the first token."""
    version_end: int
    """Version of the last token."""
    arm: str
    project: str
    user: str
    """Sticky key: `user` of the body, else `x-user-id`, else the API key's name, else ""."""
    at: float
    """When the request was received."""
    finished_at: float
    prompt: str
    prompt_ids: tuple[int, ...]
    completion: str
    """Text as sent to the client: without special tokens, cut before a stop string."""
    completion_ids: tuple[int, ...]
    """Every sampled token, the end-of-text token included."""
    behavior_logprobs: tuple[float, ...]
    offsets: tuple[int, ...]
    """For each token the length of `completion`, in characters, once that token was out."""
    temperature: float
    top_p: float
    finish: FinishReason
    language: str = ""
    """Known at the request: from the file name where a client tells it, else ""."""
    multiline: bool = False
    """As asked: False where a stop string forbids a newline."""
    label: str = ""
    """`X-Project-ID`: a label only, never a right."""
    untrainable: str = ""
    """Why it cannot be learned from; "" means that it can."""
    displayed: int | None = None
    """Characters of `completion` that were displayed; None: all, or nobody said."""
    verdict: Verdict | None = None
    verdict_source: str = ""
    """Protocol of the feedback that set the verdict: native, continue, fork, tabby; "server" for silence."""
    verdict_at: float | None = None
    score: float | None = None
    """A client's own number, where it sent one; rewards may use it instead of the verdict."""
    retained_characters: int | None = None
    shown_at: float | None = None
    suffix_hash: str = ""
    """`text_hash` of the text after the cursor, where the request has one; joins find it by this."""
    propensity: float = 1.0
    """Probability with which its unit (user or request) was assigned to `arm`; 1 where nothing was drawn."""
    experiment: int | None = None
    """The experiment that it counts in; None: in none."""
    unit: str = ""
    """What was assigned in that experiment: the user, or one of their file sessions."""

    @property
    def silent(self) -> bool:
        """True when the policy chose to end before any text."""
        return self.completion == "" and self.finish is FinishReason.STOP

    def loss_mask(self) -> tuple[bool, ...]:
        """True for each token that the user could judge.

        A token counts when it began before the end of the displayed text. End-of-text tokens and
        tokens of a stop string count only when the whole answer was displayed: only then did the
        user see the answer end there.
        """
        if self.displayed is None or self.displayed >= len(self.completion):
            return (True,) * len(self.completion_ids)
        starts = (0, *self.offsets[:-1])
        return tuple(start < self.displayed for start in starts)

    @staticmethod
    def example() -> Interaction:
        """A small one, for tests and documentation."""
        return Interaction(
            id="cmpl-0001",
            index=0,
            policy="tab",
            version=0,
            version_end=0,
            arm="live",
            project="default",
            user="u1",
            at=1000.0,
            finished_at=1000.2,
            prompt="<|fim_prefix|>def f(x):\n    <|fim_suffix|>\n<|fim_middle|>",
            prompt_ids=(8184, 40, 8186, 41, 8185),
            completion="return x",
            completion_ids=(400, 88, 8183),
            behavior_logprobs=(-0.7, -1.1, -0.2),
            offsets=(6, 8, 8),
            temperature=1.0,
            top_p=1.0,
            finish=FinishReason.STOP,
            language="python",
        )


class Event(StrEnum):
    """What a client reports."""

    SHOWN = "shown"
    ACCEPTED = "accepted"
    REJECTED = "rejected"
    IGNORED = "ignored"
    """Shown, then the client's clock ran out: becomes the verdict `timeout`."""
    EDITED = "edited"
    """Accepted, then changed by hand: an accept, with the text that stayed."""
    RETAINED = "retained"
    """How much of an accepted text is still there later."""


class FeedbackStatus(StrEnum):
    """What became of a piece of feedback. Every piece has a row and one of these."""

    MATCHED = "matched"
    """Joined to an interaction and taken into account."""
    DUPLICATE = "duplicate"
    """Says again what is known."""
    LATE = "late"
    """Joined, but the interaction was already trained on, or its window is over."""
    SUPERSEDED = "superseded"
    """Contradicted by a stronger verdict: an accept beats a reject of the same answer."""
    UNMATCHED = "unmatched"
    """No interaction found (yet): kept, and joined if the interaction arrives after it."""


@dataclass(frozen=True, slots=True)
class Feedback:
    """One report by a client about one answer. Made by the gateway, joined and kept by the store.

    `id` and `index` name the interaction where the client knows it; otherwise the texts find it.
    """

    source: str
    """native, continue, fork or tabby."""
    event: Event
    at: float
    """Receive time on the server: clients' clocks are never used."""
    project: str
    id: str | None = None
    index: int = 0
    user: str = ""
    prompt: str | None = None
    prefix: str | None = None
    suffix: str | None = None
    displayed_text: str | None = None
    accepted_text: str | None = None
    retained_characters: int | None = None
    score: float | None = None
    client_id: str | None = None
    """The client's own id of the completion (Continue's `completionId`): ties its events together."""
    cached: bool = False
    """The client says that it showed this from its own cache."""
    payload: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    """The event as received, unknown fields included."""


def text_hash(text: str) -> str:
    """The digest by which prompts and suffixes are found again (SHA-256, 32 hex digits)."""
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:32]


# ---------------------------------------------------------------------------------------- learning


@dataclass(frozen=True, slots=True)
class Sample:
    """A labelled interaction, claimed by a run. Made by the store's `claim`, eaten by ComputeReward."""

    id: str
    index: int
    policy: str
    version: int
    project: str
    user: str
    at: float
    prompt_ids: tuple[int, ...]
    completion_ids: tuple[int, ...]
    behavior_logprobs: tuple[float, ...]
    loss_mask: tuple[bool, ...]
    temperature: float
    top_p: float
    language: str
    multiline: bool
    verdict: Verdict
    verdict_source: str
    completion: str = ""
    score: float | None = None
    retained_characters: int | None = None
    batch: int = 0
    """Number of the batch for which the run claimed it; 0: not claimed (the held-back share)."""
    prompt: str = ""
    """The prompt as text: cleaning looks at it, training does not."""
    arm: str = ""
    """"live", or "explore": sampled at temperature 1 and top-p 1 whatever the client asked for."""

    @property
    def silent(self) -> bool:
        """True when nothing was shown."""
        return self.verdict is Verdict.SILENT


@dataclass(frozen=True, slots=True)
class Scored:
    """A sample with its reward. Made by ComputeReward, eaten by the Trainer."""

    sample: Sample
    reward: float
    parts: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))
    """Reward by source (verdict, retention, …), each with its weight; they add up to `reward`."""
    fault: str = ""
    """Why it has no reward; "" where it has one. Such a sample is dropped and counted, never trained on."""


@dataclass(frozen=True, slots=True)
class Batch:
    """The samples of one optimiser step's worth of data. Made and eaten by the Trainer."""

    number: int
    """Counts from 1 within a run; the store's claims carry it."""
    samples: tuple[Scored, ...]


# -------------------------------------------------------------------------------- versions and runs


def iso(seconds: float | None) -> str | None:
    """A time as ISO 8601 in UTC, to the millisecond.

    >>> iso(0.5)
    '1970-01-01T00:00:00.500Z'
    """
    if seconds is None:
        return None
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


class VersionState(StrEnum):
    """Where a version stands; see VERSION_TRANSITIONS."""

    CANDIDATE = "candidate"
    CANARY = "canary"
    LIVE = "live"
    RETIRED = "retired"
    REJECTED = "rejected"


@dataclass(frozen=True, slots=True)
class Version:
    """An immutable set of weights of one policy. Made by a run (or, as 0, from the base model).

    Its files and their digests are in the manifest (`weights.directory`), its state in the store.
    """

    policy: str
    id: int
    """Counts from 0, the base model, within a policy."""
    state: VersionState
    parent: int | None
    run: int | None
    created_at: float
    url: str
    """Where its folder is."""
    digest: str
    """SHA-256 of its manifest."""
    metrics: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))
    live_at: float | None = None
    """When it last went live."""
    step: int = 0
    """Batches of its run that went into it; a version of a run has at least one, others have 0."""
    collected_at: float | None = None
    """When gc took its files: it cannot be served or verified any more."""

    @property
    def name(self) -> str:
        """As clients see it, `tab@3`."""
        return f"{self.policy}@{self.id}"

    def describe(self) -> dict[str, Any]:
        """As JSON for people and programs: what `versions list --json` and the admin interface give."""
        return {
            "policy": self.policy,
            "id": self.id,
            "state": self.state.value,
            "parent": self.parent,
            "run": self.run,
            "created_at": iso(self.created_at),
            "live_at": iso(self.live_at),
            "collected_at": iso(self.collected_at),
            "url": self.url,
            "digest": self.digest,
            "metrics": dict(self.metrics),
        }


class RunState(StrEnum):
    """Where a run stands; see RUN_TRANSITIONS."""

    PENDING = "pending"
    RUNNING = "running"
    PAUSED = "paused"
    FINISHED = "finished"
    STOPPED = "stopped"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Run:
    """One training run. Made by `train`, the trigger or the controller; kept by the store."""

    policy: str
    id: int
    state: RunState
    parent: int
    """The version it starts from."""
    created_at: float
    heartbeat_at: float
    host: str = ""
    pid: int = 0
    pid_started: str = ""
    """When that process was started, in the kernel's words: tells it from a later one with its pid."""
    step: int = 0
    """Optimiser batches done, as of the last checkpoint."""
    tau: float = 0.0
    """The reward's threshold, set at the start and held."""
    wish: str = ""
    """What somebody asked of it: "", "stop" or "pause"."""
    message: str = ""
    """Why it ended, in words."""
    follow: bool = False
    """Whether it keeps going as feedback arrives; whoever carries it on after a crash does the same."""
    last_batch: int | None = None
    """Batch after which it ends; None: it has no such bound."""


@dataclass(frozen=True, slots=True)
class Step:
    """What one batch of a run measured. Made by the Trainer, kept by the store, eaten by people."""

    run: int
    batch: int
    at: float
    numbers: Mapping[str, float]
    """By name; docs/metrics.md explains each."""


# ------------------------------------------------------------------------------------- experiments


@dataclass(frozen=True, slots=True)
class Arm:
    """One of the two ways of being served that an experiment compares; frozen for its whole life.

    A version of a policy, or, with `upstream`, a service that no policy of ours serves.
    """

    policy: str
    """Whose version it is; with `upstream` the policy that the service stands in for."""
    version: int | None
    """None for an upstream."""
    upstream: str = ""
    """Name of the service in the settings (`upstreams`); "" for a version."""

    @property
    def name(self) -> str:
        """`tab@3`, or `upstream:NAME`."""
        return f"upstream:{self.upstream}" if self.upstream else f"{self.policy}@{self.version}"


class ExperimentState(StrEnum):
    """Where an experiment stands; see EXPERIMENT_TRANSITIONS."""

    RUNNING = "running"
    WAITING = "waiting"
    """It has an answer that a person must confirm; arms are served as before."""
    PROMOTED = "promoted"
    """The treatment proved better (or good enough) and went live."""
    FUTILE = "futile"
    """No such proof came in time, or none can: the control stays."""
    ABORTED = "aborted"
    """A guardrail broke, or the arms' users cannot be compared: the control stays."""
    STOPPED = "stopped"
    """Ended by a person, or because its arms changed under it."""


@dataclass(frozen=True, slots=True)
class Experiment:
    """Two arms on live users. Made by a person, the controller or `publish: experiment`; kept by the store.

    >>> Experiment.example().share
    0.05
    """

    id: int
    policy: str
    """Whose requests take part."""
    state: ExperimentState
    control: Arm
    treatment: Arm
    plan: Mapping[str, Any]
    """The settings it was started with (`config.Experiments` as JSON): frozen."""
    salt: str
    """Of its lots: an experiment assigns independently of every other one."""
    tau: float
    """τ of its rewards, the same for both arms and all its life."""
    alpha: float
    """What it may spend of the policy's α (`analysis.spend`)."""
    stage: int
    """Place in `plan["stages"]`; each stage is analysed by itself."""
    stage_at: float
    """When that stage began; infinite until both arms can be served, and nobody is assigned before that."""
    created_at: float
    ended_at: float | None = None
    actor: str = ""
    """Who started it."""
    message: str = ""
    """Why it ended, in words."""
    rewards: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    """What verdicts are worth in it (`config.Rewards` as JSON, of its start): frozen. What it does not name
    has its default."""

    @property
    def share(self) -> float:
        """Probability with which a unit that takes part gets the treatment."""
        return float(self.plan["stages"][self.stage])

    @property
    def begun(self) -> bool:
        """Whether requests are assigned: both arms could be served."""
        return self.stage_at < math.inf

    def describe(self) -> dict[str, Any]:
        """As JSON for people and programs: what `experiments list --json` and the admin interface give."""
        return {
            "policy": self.policy,
            "id": self.id,
            "state": self.state.value,
            "control": self.control.name,
            "treatment": self.treatment.name,
            "stage": self.stage,
            "share": self.share,
            "stage_at": iso(self.stage_at) if self.begun else None,
            "created_at": iso(self.created_at),
            "ended_at": iso(self.ended_at),
            "tau": self.tau,
            "alpha": self.alpha,
            "actor": self.actor,
            "message": self.message,
            "plan": dict(self.plan),
        }

    @staticmethod
    def example() -> Experiment:
        """A small one, for tests and documentation."""
        return Experiment(
            id=1,
            policy="tab",
            state=ExperimentState.RUNNING,
            control=Arm("tab", 0),
            treatment=Arm("tab", 1),
            plan={"stages": (0.01, 0.05, 0.25, 0.5), "share": 1.0, "unit": "user"},
            salt="s",
            tau=0.1,
            alpha=0.03,
            stage=1,
            stage_at=1000.0,
            created_at=900.0,
        )


class DecisionKind(StrEnum):
    """What was decided about an experiment."""

    START = "start"
    CONTINUE = "continue"
    RAMP = "ramp"
    """On to the next stage."""
    PROMOTE = "promote"
    FUTILE = "futile"
    ABORT = "abort"
    STOP = "stop"


@dataclass(frozen=True, slots=True)
class Decision:
    """A row of an experiment's history. Made by `decisions.decide` or a person, kept by the store."""

    kind: DecisionKind
    reason: str
    """One sentence for people."""
    numbers: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))
    """What it rests on, by name: `estimate`, `low`, `high`, `units/control`, …"""
    at: float = 0.0
    actor: str = "experiment"
    stage: int = 0
    proposed: bool = False
    """A person must confirm it; nothing was done yet."""

    def describe(self) -> dict[str, Any]:
        """As JSON."""
        return {
            "at": iso(self.at),
            "stage": self.stage,
            "kind": self.kind.value,
            "actor": self.actor,
            "proposed": self.proposed,
            "reason": self.reason,
            "numbers": {name: number for name, number in self.numbers.items() if math.isfinite(number)},
        }


EXPERIMENT_TRANSITIONS: Mapping[ExperimentState, frozenset[ExperimentState]] = MappingProxyType(
    {
        ExperimentState.RUNNING: frozenset(set(ExperimentState) - {ExperimentState.RUNNING}),
        ExperimentState.WAITING: frozenset(set(ExperimentState) - {ExperimentState.WAITING}),
        ExperimentState.PROMOTED: frozenset(),
        ExperimentState.FUTILE: frozenset(),
        ExperimentState.ABORTED: frozenset(),
        ExperimentState.STOPPED: frozenset(),
    }
)

VERSION_TRANSITIONS: Mapping[VersionState, frozenset[VersionState]] = MappingProxyType(
    {
        VersionState.CANDIDATE: frozenset({VersionState.CANARY, VersionState.LIVE, VersionState.REJECTED}),
        VersionState.CANARY: frozenset({VersionState.LIVE, VersionState.REJECTED}),
        VersionState.LIVE: frozenset({VersionState.RETIRED}),
        VersionState.RETIRED: frozenset({VersionState.LIVE}),
        VersionState.REJECTED: frozenset(),
    }
)

RUN_TRANSITIONS: Mapping[RunState, frozenset[RunState]] = MappingProxyType(
    {
        RunState.PENDING: frozenset({RunState.RUNNING, RunState.STOPPED, RunState.FAILED}),
        RunState.RUNNING: frozenset({RunState.PAUSED, RunState.FINISHED, RunState.STOPPED, RunState.FAILED}),
        RunState.PAUSED: frozenset({RunState.RUNNING, RunState.STOPPED, RunState.FAILED}),
        RunState.FINISHED: frozenset(),
        RunState.STOPPED: frozenset(),
        RunState.FAILED: frozenset(),
    }
)

EVENT_VERDICTS: Mapping[Event, Verdict] = MappingProxyType(
    {
        Event.ACCEPTED: Verdict.ACCEPTED,
        Event.EDITED: Verdict.ACCEPTED,
        Event.REJECTED: Verdict.REJECTED,
        Event.IGNORED: Verdict.TIMEOUT,
    }
)
"""The verdict that an event carries; `shown` and `retained` carry none."""

VERDICT_STRENGTH: Mapping[Verdict, int] = MappingProxyType(
    {Verdict.TIMEOUT: 1, Verdict.REJECTED: 2, Verdict.ACCEPTED: 3}
)
"""A stronger verdict replaces a weaker one of the same answer, never the other way round: the text
ended up in the file, whatever the client's clock said before. Silence stands outside: the server saw it
itself, and a verdict on an empty answer is recorded but earns nothing."""
