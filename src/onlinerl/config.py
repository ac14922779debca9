"""The whole settings tree. Every field says below it what it does; unknown names are refused.

A file is YAML; overrides are dotted, `policies.tab.train.lr=2e-6`, and win over the file.
"""

from __future__ import annotations

import itertools
import re
import reprlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

import yaml
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PlainSerializer,
    SerializationInfo,
    ValidationError,
    field_validator,
    model_validator,
)
from pydantic.fields import FieldInfo

from onlinerl.errors import SettingsError
from onlinerl.redaction import redacted_url

POLICY_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
BUILTIN_MODEL = "fim-27m"
REWARD_FUNCTION = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*(\.[^\W\d]\w*)*")
REWARD_SOURCES = ("verdict", "retained", "score", "function")


class Open:
    """Marks a setting of text that may come over HTTP all the same: it names neither code nor a path."""


OPEN = Open()

Fraction = Annotated[float, Field(ge=0, le=1)]
Positive = Annotated[float, Field(gt=0)]
Count = Annotated[int, Field(ge=1, lt=2**63)]
Port = Annotated[int, Field(ge=0, le=65535)]
WHOLE = {"secrets": "whole"}
"""Context of a dump that is for a process and nobody else: `settings.model_dump_json(context=WHOLE)`. Every
other dump may be published, so it has no secrets in it."""


def _address(url: str, info: SerializationInfo) -> str:
    return url if info.context == WHOLE else redacted_url(url)


Address = Annotated[str, PlainSerializer(_address)]
"""A URL, which may hold a key or a password."""


class Node(BaseModel):
    """Base of every branch: frozen, strict about names, documented by attribute docstrings."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False)


class Server(Node):
    """Where `serve` listens and what it refuses."""

    host: str = "127.0.0.1"
    """Address to listen on."""
    port: Port = 8081
    """Port of the inference API; 0 takes a free one."""
    feedback_port: Port = 8082
    """Port of the feedback API; the same application answers on both. 0 takes a free one."""
    body_limit: Count = 4_000_000
    """Largest request body, in bytes; larger ones get 413."""
    dashboard: bool = True
    """Pages for people on `/`. Counts, versions and runs are read there without a key, as under /metrics."""


class Store(Node):
    """Where interactions, feedback, versions and runs are kept."""

    url: Address | None = None
    """SQLAlchemy URL of the database; default is SQLite in `home`."""


class Engine(Node):
    """The embedded engine's processes."""

    replicas: Count = 1
    """How many processes serve this policy."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where the weights live; auto takes CUDA when torch sees it."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Number format of the weights while serving; auto is float32 on CPU and bfloat16 on CUDA."""
    threads: Count | None = None
    """Torch threads of a replica on CPU; default is half of the cores, at least one."""
    concurrency: Count = 16
    """Sequences decoded together; more wait in the queue."""
    queue: Count = 256
    """Sequences that may wait; beyond it requests get 429 with Retry-After."""
    resident: Annotated[int, Field(ge=2)] = 4
    """Versions held in memory at once; the least recently wanted is unloaded first."""
    context: Count | None = None
    """Longest prompt plus answer, in tokens; default is the model's own limit."""
    prefill: Count = 128
    """Prompt tokens processed between two decode steps, so that a long prompt does not stall the others."""
    graphs: bool = True
    """On CUDA, repeat decode steps as CUDA graphs: several times faster where a model is small. Keeps one
    more version's weights and cache in memory."""


class Sampling(Node):
    """What a request gets that does not say otherwise."""

    temperature: Annotated[float, Field(ge=0, le=2)] = 1.0
    """Softmax temperature; below 0.3 an interaction cannot be learned from."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Nucleus; 1 keeps every token."""
    max_tokens: Count = 128
    """Longest answer in tokens."""


class Exploration(Node):
    """Lets a share of the traffic sample at temperature 1 and top-p 1, whatever the client asked for.

    What is sampled below `train.temperature_floor` teaches nothing. Explored answers are more varied, and
    each of them more of a gamble: so users opt in.
    """

    users: Annotated[Literal["none", "all"] | tuple[str, ...], OPEN] = "none"
    """Who opted in: nobody, everybody, or a list of sticky user keys."""
    share: Fraction = 0.1
    """Share of those who opted in that explores."""
    unit: Literal["user", "request"] = "user"
    """What is drawn: user: one keeps exploring or never does (requests without a user key are drawn one by
    one); request: everybody explores now and then, which suits few users."""


class Joins(Node):
    """How feedback finds its interaction, and how long verdicts may change."""

    window: Positive = 1800.0
    """Seconds after a request in which feedback that has no id of ours can be matched by its text."""
    deadline: Positive = 86_400.0
    """Seconds after a request in which feedback counts at all; later it is recorded as late."""
    rest: Annotated[float, Field(ge=0)] = 30.0
    """Seconds that a timeout reject rests before it is trained on, so that a late accept can replace it."""


class Rewards(Node):
    """From verdict to number: accept 1−τ, reject −τ, silent 0."""

    tau: Fraction | Literal["auto"] = "auto"
    """The accept rate at which showing and silence are worth the same. auto: half of the running mean
    of accepts per opportunity, at most `tau_limit`, set when a run starts and held for it; 0 in raw mode."""
    tau_limit: Fraction = 0.25
    """Upper bound of τ under auto."""
    timeout_weight: Fraction = 0.5
    """Weight of a timeout reject where the client reports explicit ones too; 1 where it cannot (Continue)."""
    retention_bonus: Annotated[float, Field(ge=0)] = 0.0
    """Added to an accept in proportion to the share of the text that is still there later."""
    function: str = ""
    """A function of your own, `module:function`, whose number is added (`learning/rewards.py` has its
    contract). The module is looked for where the command was started and among what is installed. It is
    code: a file or the command line may name it, nothing that comes over HTTP ever may."""
    weights: Annotated[dict[str, float], OPEN] = {}
    """What each source is multiplied with before they are summed: `verdict`, `retained`, `score`, `function`,
    and `function/NAME` where the function returns several numbers by name. One that is left out has 1. A
    client's own score takes the verdict's place, unless both are named here."""

    @field_validator("function")
    @classmethod
    def _named(cls, function: str) -> str:
        if function and not REWARD_FUNCTION.fullmatch(function):
            raise ValueError("write module:function, such as rewards_of_mine:reward")
        return function

    @field_validator("weights")
    @classmethod
    def _sources(cls, weights: dict[str, float]) -> dict[str, float]:
        for name in weights:
            if name not in REWARD_SOURCES and not name.startswith("function/"):
                raise ValueError(
                    f"there is no source {name!r}: {', '.join(REWARD_SOURCES)} and function/NAME are known"
                )
        return weights


class Cleaning(Node):
    """What is not worth learning from. Every rule looks at requests, shown and silent ones alike, and never
    at what was said of the answer; what it drops is counted by its reason."""

    window: Count = 1000
    """Samples learned from last among which repetitions are looked for; earlier runs count too."""
    copies: Fraction = 0.01
    """The same answer to the same user and prompt again is a copy, and dropped (duplicate), where that many
    or fewer were to be expected by chance; 0: none is."""
    repeats: Count | None = 64
    """Requests of one user at the same place, or nearly, that the window may hold; further ones are dropped
    (repeated, near_duplicate); none: any number."""
    similarity: Annotated[float, Field(gt=0, le=1)] = 0.9
    """Jaccard similarity of the text around the cursor from which two places are nearly the same; 1: only
    prompts that are equal are."""
    per_minute: Count | None = 60
    """Answers that a person can judge by hand in a minute; where one user judged more, all that they asked
    for meanwhile is dropped (burst). Where `trust.owner` is false; none: any number."""
    fastest: Annotated[float, Field(ge=0)] = 0.15
    """Seconds from request to verdict by hand. A user whose median over at least 20 is below is no person,
    and what they asked for is dropped (bot). Where `trust.owner` is false; 0: nobody is."""
    generated: bool = True
    """Drop requests from files that say that they are generated."""
    minified: bool = True
    """Drop requests from minified files, and those with blobs of encoded data (blob)."""
    shortest: Annotated[int, Field(ge=0)] = 3
    """Characters, white space not counted, that a prompt must have (short)."""
    languages: Annotated[tuple[str, ...], OPEN] = ()
    """Languages to learn from, such as python; others are dropped (language), unknown ones are not. None
    named: all."""
    broken: Fraction | None = 0.01
    """Largest share of a prompt's characters that no text holds: U+FFFD, control characters, lone surrogates
    (encoding); none: any."""


class Trust(Node):
    """How much one user may say."""

    owner: bool = True
    """One person teaches their own model, or a team that trusts its own: nobody is capped. False where
    strangers teach: then the settings below hold, and `cleaning.per_minute` and `cleaning.fastest` too."""
    dominance: Annotated[float, Field(gt=0, le=1)] = 0.5
    """Largest share of a batch that one user may have while fewer than `crowd` are active. What is beyond
    waits for a later batch; a run that finds nothing else ends."""
    crowd: Count = 200
    """Active users from which on `share` and `users` hold instead."""
    share: Fraction = 0.01
    """Largest share of a batch that one of a crowd may have, but at least one sample; what is beyond is
    dropped (crowd)."""
    users: Positive = 3.0
    """The share is at least so much divided by the number of active users."""
    window: Positive = 604_800.0
    """Seconds in which a user must have judged an answer to be active."""


class Guards(Node):
    """Bands that a training step must keep; outside of one the run ends and the last good version stays."""

    kl: Positive = 0.5
    """Largest mean KL per token of a batch to the last promoted version (at first the run's parent), in
    nats. Healthy runs of the default model reached 0.26 at lr 3e-5 with a version every 8 steps, 0.63 at
    1e-4 with one every 4 and 1.2 with one every 8 (3 seeds each)."""
    entropy: Fraction = 0.3
    """Smallest entropy, as a share of the run's start."""
    length_low: Annotated[float, Field(ge=0)] = 0.3
    """Smallest mean answer length, as a share of the run's start."""
    length_high: Positive = 2.0
    """Largest mean answer length, as a multiple of the run's start."""
    clip_fraction: Fraction = 0.4
    """Largest share of tokens whose ratio was clipped."""
    gradient: Positive = 20.0
    """Largest gradient norm, as a multiple of its running median."""
    ess: Fraction = 0.5
    """Effective sample size per token below which a warning is logged."""
    contradiction: bool = True
    """End a run whose rewards contradict the verdicts: accepted answers earned less than refused ones, by
    more than three standard errors over the last answers (16 of each at least). Off where rewards are meant
    to."""


class Silence(Node):
    """Keeps the policy from falling silent."""

    floor: Fraction = 0.6
    """Least show rate, as a share of the hold-out version's (the first version)."""
    step: Annotated[float, Field(ge=0)] = 0.5
    """How fast the Lagrange multiplier grows while the show rate is under the floor."""
    patience: Count = 3
    """Violating batches in a row after which the run halts."""


class Lora(Node):
    """Trains a small adapter beside the weights instead of the weights (LoRA)."""

    rank: Annotated[int, Field(ge=0)] = 0
    """Rank of the adapter's matrices; 0 trains the weights themselves."""
    alpha: Count = 32
    """The adapter's product is scaled by this over `rank`."""
    targets: Annotated[Literal["all-linear"] | tuple[str, ...], OPEN] = "all-linear"
    """Which linear layers get one: all below the head, or names of modules, as `[q_proj, v_proj]`."""
    lr: Positive | None = None
    """The adapter's learning rate; default is `train.lr`. About ten times that of full training suits."""


class Train(Node):
    """The trainer: critic-free clipped PPO on the tokens that were served."""

    mode: Literal["baseline", "raw", "group"] = "baseline"
    """baseline: advantage over a running mean per context; raw: the reward itself, the seed's setting; group:
    over the other answers of the same request (GRPO), so requests need `n` > 1."""
    lr: Positive = 3e-5
    """AdamW's learning rate; 2e-6 suits 1.5 B parameters, 3e-5 the 27 M default model."""
    batch: Count = 32
    """Samples of one step."""
    minibatches: Annotated[int, Field(ge=1, le=4)] = 2
    """Optimiser steps per batch."""
    microbatch: Count | Literal["auto"] = "auto"
    """Tokens packed into one forward pass; smaller needs less memory, the gradient is the same. auto is 4096
    on CPU, and on CUDA what fits its free memory, at most 32768."""
    recompute: bool | Literal["auto"] = "auto"
    """Computes activations again in the backward pass instead of keeping them: far less memory for a third
    more time. auto does so on CUDA where otherwise fewer than 4096 tokens (or `microbatch`, or the longest
    sample) would fit its free memory, by what one token of this model is measured to keep."""
    compile: bool | Literal["auto"] = "auto"
    """Compiles the model's layers: faster steps, after up to a minute when a run begins. auto does so on CUDA
    for models of half a billion parameters or more."""
    clip_low: Fraction = 0.2
    """PPO's ε below 1."""
    clip_high: Fraction = 0.28
    """PPO's ε above 1."""
    dual_clip: Positive | None = 3.0
    """Bound of the loss for negative advantages; none: no bound."""
    importance_cap: Positive | None = 2.0
    """Cap C of the weight π_prox/π_behav (truncated importance sampling); none: the weight is 1, and nothing
    corrects for the weights or the number format that sampled."""
    veto: Fraction = 1e-4
    """A sequence with a token ratio below this is left out."""
    staleness: Annotated[int, Field(ge=0)] = 2
    """Versions that may lie between sampling and training; older samples are dropped and counted."""
    baseline_decay: Fraction = 0.99
    """Forgetting of the baseline's counts, per batch."""
    normalise: bool = True
    """Divide a batch's advantages by their standard deviation (at least 0.1); mode `baseline` alone."""
    advantage_limit: Positive = 10.0
    """Normalised advantages are clipped to ± this. Where few answers are accepted an accept is worth many
    standard deviations (4.4 at 5 %): a limit of 3 would cut accepts alone, and so teach silence."""
    warmup: Annotated[int, Field(ge=0)] = 10
    """Optimiser steps over which a new optimiser's learning rate rises to `lr`: Adam's first steps are the
    largest, and know the least."""
    kl_coefficient: Annotated[float, Field(ge=0)] = 0.02
    """Weight in the loss of the KL to the last promoted version (at first the run's parent); raw mode has
    none."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """AdamW's decoupled weight decay."""
    gradient_clip: Positive = 1.0
    """Largest gradient norm."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where the run computes."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Number format of the matrix products (weights stay float32); auto is float32 on CPU and bfloat16 on
    CUDA. bfloat16 helps on CPUs that have it (AVX512-BF16, AMX) and is slow on others. float16 has no scaling
    of the loss: small gradients vanish in it."""
    threads: Count | None = None
    """Torch threads on CPU; default is half of the cores, at least one."""
    version_every: Count = 8
    """Steps between two versions."""
    checkpoint_every: Count = 4
    """Steps between two checkpoints; a killed run repeats at most so many."""
    holdout: Fraction = 0.1
    """Share of the feedback that is never trained on and tells a run when to end."""
    patience: Annotated[int, Field(ge=0)] = 5
    """Versions without a rise of the held-back reward after which a run ends by itself; 0 never."""
    temperature_floor: Positive = 0.3
    """Interactions sampled colder than this are not trained on: their ratio is noise."""
    seed: int = 0
    """Seed of the data order, and of a new adapter."""
    lora: Lora = Lora()
    """Trains an adapter instead of the weights."""
    guards: Guards = Guards()
    """Bands that a step must keep."""
    silence: Silence = Silence()
    """The show rate's floor."""


class Guardrails(Node):
    """How much worse the treatment of an experiment may be. Beyond a margin, surely, it is taken back."""

    latency: Annotated[float, Field(ge=0)] = 0.05
    """Share of answers slower than the control's 95th percentile that may be added; 5 % of its own are."""
    errors: Annotated[float, Field(ge=0)] = 0.01
    """Share of requests ending in an error that may be added."""
    shown: Fraction = 0.6
    """Least show rate, as a share of the control's: fewer suggestions can be the aim, silence is not."""
    reverted: Annotated[float, Field(ge=0)] = 0.05
    """Share of accepted answers that are gone a minute later that may be added; where clients report it."""
    length: Positive = 2.0
    """Largest mean answer length, as a multiple of the control's."""


class Experiments(Node):
    """How a new version earns its traffic: stages, an A/B test, and what follows from it."""

    decide: Literal["automatic", "ask"] = "automatic"
    """Who promotes or gives up: the experiment, or a person whom it asks. It always aborts by itself."""
    users: Annotated[Literal["all"] | tuple[str, ...], OPEN] = "all"
    """Who may take part: everybody with a user key, or a list of sticky user keys."""
    projects: Annotated[tuple[str, ...], OPEN] = ()
    """Projects that may take part; none named: all."""
    share: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Share of those who may that do take part."""
    unit: Literal["user", "session"] = "user"
    """What is assigned: user: each stays in one arm; session: each user's work on one file in one day, which
    suits teams of ten."""
    stages: Annotated[tuple[Annotated[float, Field(gt=0, lt=1)], ...], Field(min_length=1)] = (
        0.01,
        0.05,
        0.25,
        0.5,
    )
    """Share of those who take part that gets the treatment, stage by stage; rising. The last one decides."""
    stage_hours: Annotated[float, Field(ge=0)] = 1.0
    """Least hours of a stage before the next."""
    stage_units: Count = 10
    """Least units of the treatment in a stage before the next. With fewer than ten nothing can be said and no
    stage ends: a share that so few units get is too small for the traffic."""
    least_units: Count = 100
    """Least units of each arm, exposure over, before a promotion; below 20 there is no interval."""
    least_hours: Annotated[float, Field(ge=0)] = 24.0
    """Least hours of the last stage before a promotion."""
    most_hours: Positive = 336.0
    """Hours of a stage after which an experiment without an answer is given up."""
    window_hours: Positive = 24.0
    """Hours from a unit's first request of a stage in which its requests count; it counts once, when these
    are over."""
    alpha: Annotated[float, Field(gt=0, lt=0.5)] = 0.05
    """Probability that a policy ever promotes a version that is no better, over all its experiments; and that
    one stage takes back a version that is within all margins."""
    tuned: Count = 1000
    """Units of each arm at which the interval is tightest (n* of ALGORITHMS.md)."""
    goal: Literal["better", "equal"] = "better"
    """better: the treatment must beat the control; equal: it must not be worse by more than `margin`."""
    margin: Annotated[float, Field(ge=0)] = 0.02
    """For `equal`: loss of reward per opportunity that is accepted, such as 0.02 of 0.2."""
    tau: Fraction | Literal["auto"] = "auto"
    """τ of an experiment's rewards; auto takes what a run that starts now would take."""
    holdout: Fraction = 0.0
    """Share of users who stay on the first version for good: what all learning together was worth."""
    interval: Positive = 5.0
    """Seconds between two looks at the numbers."""
    guardrails: Guardrails = Guardrails()
    """How much worse the treatment may be."""

    @field_validator("stages")
    @classmethod
    def _rising(cls, stages: tuple[float, ...]) -> tuple[float, ...]:
        if any(b <= a for a, b in itertools.pairwise(stages)):
            raise ValueError("each stage must be larger than the one before")
        return stages


class Judge(Node):
    """Who scores completions where there are no users."""

    kind: Literal["reference", "similarity", "llm"] = "reference"
    """reference: nearness to what the author wrote, less for broken syntax and repetition; similarity: ten
    times difflib's ratio, for reports; llm: a model behind an OpenAI-compatible chat endpoint, whose key is
    taken from the environment variable LLMASJUDGE_API_KEY alone."""
    url: Address | None = None
    """Address of the endpoint, with or without `/chat/completions`; default is LLMASJUDGE_API_URL. What
    may be a key in it (a user, a password, a query) is hidden in reports."""
    model: str | None = None
    """Name of the judging model; default is LLMASJUDGE_MODEL."""
    concurrency: Count = 8
    """Calls under way at once."""
    timeout: Positive = 60.0
    """Seconds that one call may take."""
    attempts: Count = 6
    """Calls for one completion before it is given up: its sample is masked and counted."""
    deadline: Positive = 120.0
    """Seconds for the grade of one completion, all its calls and the waits between them included; then it is
    given up."""
    wait: Annotated[float, Field(ge=0)] = 0.5
    """Seconds before the second attempt; doubled for each further one, with jitter."""
    wait_limit: Positive = 30.0
    """Longest wait between two attempts, in seconds, also where the endpoint asks for a longer one."""
    temperature: Annotated[float, Field(ge=0, le=2)] = 0.0
    """Softmax temperature of the judging model."""
    answer_tokens: Count = 64
    """Longest answer in tokens; a model that thinks before it answers needs more."""
    price_input: Annotated[float, Field(ge=0)] | None = None
    """Price of a million input tokens, in whatever currency; shown before the start, never limits."""
    price_output: Annotated[float, Field(ge=0)] | None = None
    """Price of a million output tokens."""


class Trigger(Node):
    """When `serve` starts a run by itself."""

    feedback: Count | None = None
    """Start a run when so many trainable verdicts wait; none: never."""
    drift: Positive | None = None
    """Start a run when the accept rate of the last `window` verdicts lies so many standard errors from
    the `window` before; none: never."""
    window: Annotated[int, Field(ge=10)] = 200
    """Verdicts in each of drift's two windows."""
    interval: Positive = 1.0
    """Seconds between two looks."""
    cooldown: Annotated[float, Field(ge=0)] = 5.0
    """Least seconds between the end of one run and the start of the next."""
    follow: bool = False
    """Runs that the trigger starts keep going as feedback arrives."""


class Dashboard(Node):
    """What the pages on `/` show of this policy to who has the admin key."""

    code: Literal["shown", "hidden"] = "shown"
    """Whether prompts and answers may be read and exported; hidden: lengths and log-probabilities alone."""


class Policy(Node):
    """A named model that learns."""

    model: str = BUILTIN_MODEL
    """`fim-27m` (built in), a directory, or a Hugging Face id of a causal language model."""
    aliases: tuple[str, ...] = ()
    """Other names that clients use for it."""
    publish: Literal["candidate", "immediately", "experiment"] = "candidate"
    """What becomes of a new version: it waits as a candidate, goes live at once, or enters an experiment
    against the live one as soon as none runs."""
    engine: Engine = Engine()
    """Its engines."""
    sampling: Sampling = Sampling()
    """Defaults of its requests."""
    exploration: Exploration = Exploration()
    """Who samples at temperature 1."""
    joins: Joins = Joins()
    """How feedback finds its interactions."""
    rewards: Rewards = Rewards()
    """From verdict to number."""
    cleaning: Cleaning = Cleaning()
    """What is not worth learning from."""
    trust: Trust = Trust()
    """How much one user may say."""
    train: Train = Train()
    """How it learns."""
    trigger: Trigger = Trigger()
    """When it learns."""
    experiments: Experiments = Experiments()
    """How new versions prove themselves."""
    dashboard: Dashboard = Dashboard()
    """What pages show of its traffic."""


class WarmStart(Node):
    """Supervised fine-tuning before the offline learning; the report shows what it gained by itself."""

    source: str = "none"
    """none; accepted: completions of the base model that the rater accepted; or a JSONL file of `prefix`,
    `suffix` and, as `middle`, the completion of a larger model."""
    completions: Count = 2000
    """Completions sampled to find accepted ones; they do not count as `validation.completions`."""
    epochs: Count = 1
    """Times that each of them is trained on."""
    lr: Positive = 1e-5
    """AdamW's learning rate; a batch is `train.batch`."""


class Validation(Node):
    """Offline learning: a judge or simulated users instead of people, on prompts from a code folder."""

    name: str = "offline"
    """Name of the report's folder, `home/validation/NAME`."""
    policy: str | None = None
    """The policy whose model, sampling, rewards and training are used; needed where there are several."""
    data: Path | None = None
    """A folder of Python, or a JSONL file of prompts (docs/validation.md, "Your own data"); default is the
    standard library's packages that the built-in model never saw."""
    fields: dict[str, str] = {}
    """Columns of a JSONL file by what they hold, where they are called otherwise: `prefix`, `suffix`,
    `middle`, `path`, `language`, or `prompt` for prefix and suffix between FIM markers; `a.b` is b in a."""
    languages: tuple[str, ...] = ()
    """Languages of a JSONL file to use, in lower case; none: all."""
    language: str = ""
    """Language of a JSONL file's rows that do not say, neither in a column nor by their path's ending."""
    half: bool = False
    """Learn from one half of the libraries (packages at the top of the paths) and hold out files of the
    other: the report tells how far learning carries."""
    test: Path | None = None
    """A JSONL file that the held-out prompts are taken from instead, whatever side of the split its files are
    on; those of files that are learned from are left out."""
    shortest: Count = 1
    """Least characters of what the author wrote, without surrounding space."""
    longest: Count | None = None
    """Most characters of what the author wrote; none: all of a JSONL file, and 400 in a folder."""
    characters: Annotated[int, Field(ge=16)] = 2048
    """Characters around the cursor, three quarters of them before it."""
    train_prompts: Count = 3000
    """Most prompts to learn from."""
    test_prompts: Count = 1000
    """Most held-out prompts, of other files."""
    completions: Count = 6000
    """Completions sampled to learn from, those included that nobody rated and those that `tau: auto` asks."""
    group: Count = 1
    """Completions of one prompt in a batch; mode `group` needs more than one."""
    publish_every: Annotated[int, Field(ge=0)] = 1
    """Steps between two publications into the engine: more than one makes samples stale; 0 never publishes,
    which is offline learning from the start's own completions."""
    rater: Literal["judge", "user"] = "user"
    """Who rates completions: a judge by its score (a tenth of it is the reward), or simulated users by
    accepting and rejecting (the reward is that of `rewards`)."""
    judge: Judge = Judge()
    """The judge to train with."""
    report_judge: Judge = Judge(kind="similarity")
    """The judge to report with; it should be another one."""
    tastes: Annotated[tuple[str, ...], Field(min_length=1)] = ("similar",)
    """Tastes of the simulated users, in turn: the users of one taste are a cohort."""
    users: Count = 8
    """Simulated users; prompts go to them in turn."""
    spread: Annotated[float, Field(ge=0, le=1)] = 0.0
    """How far a user's own taste may lie from their cohort's (`datasets/users.py`); 0: they share it."""
    user: str | None = None
    """Only this one of the users, such as `short-1`, rates, and the report's accept rate is theirs."""
    silent: Literal["rated", "all"] = "rated"
    """Silent answers that are learned from: `rated` draws them at the rate at which shown ones are rated, as
    the online system does; `all` takes each, which pays silence where verdicts are missing."""
    noise_flip: Fraction = 0.0
    """Share of the verdicts that come as their opposite."""
    noise_missing: Fraction = 0.0
    """Share of the shown answers that nobody rates."""
    noise_timeout: Fraction = 0.0
    """Share of the shown answers that nobody gets round to: they come as timeouts, whatever their worth."""
    quantise: Literal["none", "int8"] = "none"
    """int8: the engine's linear layers are rounded to 255 levels for each output channel, as a quantised
    engine's are; the trainer's are not."""
    warmstart: WarmStart = WarmStart()
    """Supervised fine-tuning before it."""
    evaluate_every: Annotated[int, Field(ge=0)] = 0
    """Steps between two points of the learning curve; 0: its ends alone."""
    evaluate_prompts: Count = 200
    """Held-out prompts of a point of the curve; the table uses all."""
    forgetting_prompts: Annotated[int, Field(ge=0)] = 0
    """Held-out prompts on whose files the loss from left to right is measured, and that on what the author
    wrote there; 0: not measured."""
    report_temperature: Annotated[float, Field(gt=0, le=2)] | None = None
    """Temperature of the second evaluation, beside the greedy one; default is that of `sampling`."""
    report_tastes: tuple[str, ...] = ()
    """Tastes that the report's accept rate is of, on average; none named: those of the users."""
    tau_report: Fraction | None = None
    """τ of the reported reward per opportunity, the same for all stages; default is half of the base's
    accept rate per opportunity. Give it to compare reports."""
    seed: int = 0
    """Seed of prompts, sampling and users; the order within a batch has `train.seed`."""
    data_seed: int | None = None
    """Seed of the prompts alone; default is `seed`. Give it so that other seeds answer the same prompts."""
    save: Path | None = None
    """Folder for the final weights, usable as a policy's `model`; must not exist yet."""

    @field_validator("name")
    @classmethod
    def _name(cls, name: str) -> str:
        if not POLICY_NAME.fullmatch(name):
            raise ValueError("letters, digits, dot, dash and underscore only")
        return name


class Webhook(Node):
    """An address that is told what happens to versions, runs and experiments (docs/controller.md)."""

    url: Annotated[str, Field(pattern=r"^https?://[^\s/]+")]
    """Where events are posted as JSON, signed."""
    secret: Annotated[str, Field(min_length=1)]
    """Name of the environment variable that holds the key of the signature; never the key itself."""
    events: Annotated[tuple[Literal["version", "run", "experiment"], ...], Field(min_length=1)] = (
        "version",
        "run",
        "experiment",
    )
    """What it is told about."""


class Settings(Node):
    """The root."""

    home: Path = Path("onlinerl-data")
    """Folder of the database, the weights, the runs and the logs."""
    server: Server = Server()
    """Where `serve` listens."""
    store: Store = Store()
    """The database."""
    policies: dict[str, Policy] = Field(default_factory=lambda: {"tab": Policy()}, min_length=1)
    """The policies by name."""
    validation: Validation = Validation()
    """What `onlinerl validate` does."""
    webhooks: tuple[Webhook, ...] = ()
    """Who is told what happens: a list of `url`, `secret` and `events`."""

    @field_validator("home")
    @classmethod
    def _path(cls, home: Path) -> Path:
        if "\0" in str(home):
            raise ValueError("a path cannot hold a NUL character")
        return home

    @model_validator(mode="after")
    def _names(self) -> Settings:
        seen: dict[str, str] = {}
        urls = [webhook.url for webhook in self.webhooks]
        if len(set(urls)) < len(urls):
            raise ValueError("webhooks: each url may be named once")
        for name, policy in self.policies.items():
            if not POLICY_NAME.fullmatch(name):
                raise ValueError(f"policy name {name!r}: letters, digits, dot, dash and underscore only")
            for alias in (name, *policy.aliases):
                if alias in seen and seen[alias] != name:
                    raise ValueError(f"the name {alias!r} belongs to both {seen[alias]!r} and {name!r}")
                seen[alias] = name
        return self

    def chosen(self, policy: str | None, *, option: str, where: str = "") -> str:
        """The policy that was named, or the only one.

        Raises SettingsError. `option` is how one is named; `where` begins the sentence about a wrong name.
        """
        names = ", ".join(self.policies)
        if policy is None:
            if len(self.policies) > 1:
                raise SettingsError(f"there are several policies ({names}): choose one with {option}")
            return next(iter(self.policies))
        if policy not in self.policies:
            raise SettingsError(f"{where}there is no policy {policy!r}; the settings name {names}")
        return policy

    @property
    def database_url(self) -> str:
        """SQLAlchemy URL of the store."""
        return self.store.url or f"sqlite:///{(self.home / 'onlinerl.db').resolve()}"

    @property
    def weights_url(self) -> str:
        """Folder of the version folders, one sub-folder a policy."""
        return str((self.home / "weights").resolve())


def load_settings(
    file: Path | None = None, overrides: Sequence[str] = (), *, home: Path | None = None
) -> Settings:
    """Read `file` (YAML), apply dotted `overrides` ("a.b=value", the value is YAML), then `home`.

    Raises SettingsError with one sentence a fault: file not found, not YAML, unknown or wrong setting.
    """
    tree: dict[str, Any] = {}
    if file is not None:
        try:
            text = file.read_text(encoding="utf-8")
        except FileNotFoundError:
            raise SettingsError(f"settings file {file} does not exist") from None
        except (OSError, UnicodeDecodeError) as error:
            raise SettingsError(f"settings file {file} cannot be read: {error}") from None
        loaded = _yaml(text, f"settings file {file}")
        if loaded is not None and not isinstance(loaded, dict):
            raise SettingsError(f"settings file {file} must hold a mapping at the top")
        tree = loaded or {}
    for override in overrides:
        name, separator, text = override.partition("=")
        if not separator or not name:
            raise SettingsError(f"{override!r} is not an override: write name.of.setting=value")
        _set(tree, name.split("."), _value(name, text), name)
    if home is not None:
        tree["home"] = home
    try:
        return Settings.model_validate(tree)
    except ValidationError as error:
        raise SettingsError(_explain(error)) from None


# ----------------------------------------------------------------------------- settings over HTTP

RUN_READS = ("train", "rewards", "cleaning", "trust", "joins.rest")
"""What a training run reads of its policy's settings."""


def leaves(node: type[Node], path: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """(dotted name, field) of every setting below a branch that is no branch itself."""
    for name, item in node.model_fields.items():
        below = item.annotation
        if isinstance(below, type) and issubclass(below, Node):
            yield from leaves(below, f"{path}{name}.")
        else:
            yield f"{path}{name}", item


def closed(item: FieldInfo) -> bool:
    """Whether a setting may not come over HTTP, because it could name code or a path.

    One rule for the whole tree, and a new setting falls under it by itself: whatever can hold free text is
    closed, unless it is marked OPEN. Numbers, switches and words from a fixed list are open.
    """
    return OPEN not in item.metadata and _text(item.annotation)


def _text(kind: Any) -> bool:
    if get_origin(kind) is Literal:
        return False
    branch = isinstance(kind, type) and issubclass(kind, Node)  # a list of them is looked at no further
    return branch or any(map(_text, get_args(kind))) or kind in (str, bytes, Path, Any, object)


def for_run(settings: Settings, policy: str, overrides: Mapping[str, Any]) -> Policy:
    """The settings of a policy for one run, with `overrides` that came over HTTP, by dotted name.

    Names are those of the command line, `policies.tab.train.lr`, or what follows the policy, `train.lr`.
    Raises SettingsError for a name that is unknown, closed, or that no run reads, and for a wrong value.
    """
    known = dict(leaves(Policy))
    tree = settings.policies[policy].model_dump(mode="json")
    for given, value in overrides.items():
        name = given.removeprefix(f"policies.{policy}.")
        if name not in known:
            raise SettingsError(f"there is no setting {given[:200]!r} of a policy that is one single value")
        if closed(known[name]):
            raise SettingsError(
                f"{name} can name code or a path, so HTTP cannot set it: put it into the settings file"
            )
        if not any(name == branch or name.startswith(f"{branch}.") for branch in RUN_READS):
            raise SettingsError(f"no run reads {name}: it can be set where `onlinerl serve` is started")
        _set(tree, name.split("."), value, name)
    try:
        return Policy.model_validate(tree)
    except ValidationError as error:
        raise SettingsError(_explain(error)) from None


def _yaml(text: str, what: str) -> Any:
    """The text's value. Raises SettingsError with one sentence that begins with `what`."""
    try:
        return yaml.safe_load(text)
    except RecursionError:
        raise SettingsError(f"{what} is not valid YAML: it is nested too deeply") from None
    except (yaml.YAMLError, ValueError) as error:  # ValueError: 2020-99-99 looks like a date and is none
        raise SettingsError(f"{what} is not valid YAML: {' '.join(str(error).split())}") from None


def _value(name: str, text: str) -> Any:
    value = _yaml(text, f"the value of {name}")
    if isinstance(value, str):
        # YAML 1.1 reads 2e-6 as text, since it wants a dot in the mantissa
        try:
            return float(value)
        except ValueError:
            return value
    return value


def _set(tree: dict[str, Any], path: Sequence[str], value: Any, name: str) -> None:
    # Only names are checked here; whether the setting exists is for the model to say.
    for part in path[:-1]:
        branch = tree.setdefault(part, {})
        if branch is None:
            branch = tree[part] = {}
        if not isinstance(branch, dict):
            raise SettingsError(f"{name}: {part} is a value, not a branch")
        tree = branch
    tree[path[-1]] = value


# Anchors make a small file into a value that fills the memory when it is written out.
_short = reprlib.Repr()
_short.maxlevel, _short.maxstring, _short.maxother = 3, 200, 200


def _explain(error: ValidationError) -> str:
    lines = []
    for fault in error.errors():
        where = ".".join(str(part) for part in fault["loc"]) or "settings"
        if fault["type"] == "extra_forbidden":
            lines.append(f"unknown setting {where}")
        else:
            lines.append(f"{where}: {fault['msg']} (got {_short.repr(fault['input'])})"[:400])
    return "; ".join(lines)


def reference() -> str:
    """The settings as Markdown: `docs/settings.md` is this text, and a test compares them."""
    parts = [
        "# Settings",
        "",
        "Written by `make docs` from `config.py`; edit there. A file (`-c FILE`) is YAML; overrides after it",
        "are dotted, `policies.tab.train.lr=2e-6`, and win over the file. Unknown names are refused.",
        "Each policy has a branch of its own under `policies`; without a file there is one, named `tab`.",
        "Where a description says what none means, none is written `null`.",
    ]
    queue: list[tuple[str, Node]] = [("", Settings())]
    while queue:
        path, branch = queue.pop(0)
        node = type(branch)
        intro = " ".join((node.__doc__ or "").split())
        parts += [
            "",
            f"## {path or 'top'}",
            "",
            intro,
            "",
            "| setting | default | what it does |",
            "|---|---|---|",
        ]
        for name, item in node.model_fields.items():
            where, value = f"{path}.{name}" if path else name, getattr(branch, name, None)
            if name == "policies":
                queue.append(("policies.NAME", Policy()))
                default = "one policy, `tab`"
            elif name == "webhooks":
                queue.append(("webhooks.N", Webhook(url="https://example.com", secret="NAME")))
                default = "none"
            elif item.is_required():
                default = "must be given"
            elif isinstance(value, Node):
                queue.append((where, value))
                default = f"[below](#{where.replace('.', '').lower()})"
            else:
                shown = str(value) if isinstance(value, Path) else value
                default = f"`{yaml.safe_dump(shown, default_flow_style=True).splitlines()[0]}`"
                if isinstance(shown, tuple):
                    default = f"`{list(shown)}`"
            text = " ".join((item.description or "").split()).replace("|", "\\|")
            parts.append(f"| `{where}` | {default} | {text} |")
    return "\n".join(parts) + "\n"
