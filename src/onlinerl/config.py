"""The whole settings tree. Every field says below it what it does; unknown names are refused.

A file is YAML; overrides are dotted, `policies.tab.train.lr=2e-6`, and win over the file.
"""

from __future__ import annotations

import re
import reprlib
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from onlinerl.errors import SettingsError

POLICY_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
BUILTIN_MODEL = "fim-27m"

Fraction = Annotated[float, Field(ge=0, le=1)]
Positive = Annotated[float, Field(gt=0)]
Count = Annotated[int, Field(ge=1, lt=2**63)]
Port = Annotated[int, Field(ge=0, le=65535)]


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


class Store(Node):
    """Where interactions, feedback, versions and runs are kept."""

    url: str | None = None
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


class Sampling(Node):
    """What a request gets that does not say otherwise."""

    temperature: Annotated[float, Field(ge=0, le=2)] = 1.0
    """Softmax temperature; below 0.3 an interaction cannot be learned from."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Nucleus; 1 keeps every token."""
    max_tokens: Count = 128
    """Longest answer in tokens."""


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
    targets: Literal["all-linear"] | tuple[str, ...] = "all-linear"
    """Which linear layers get one: all below the head, or names of modules, as `[q_proj, v_proj]`."""
    lr: Positive | None = None
    """The adapter's learning rate; default is `train.lr`. About ten times that of full training suits."""


class Train(Node):
    """The trainer: critic-free clipped PPO on the tokens that were served."""

    mode: Literal["baseline", "raw"] = "baseline"
    """baseline: advantage over a running mean per context; raw: the reward itself, the seed's setting."""
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
    dual_clip: Positive = 3.0
    """Bound of the loss for negative advantages."""
    importance_cap: Positive = 2.0
    """Cap C of the weight π_prox/π_behav (truncated importance sampling)."""
    veto: Fraction = 1e-4
    """A sequence with a token ratio below this is left out."""
    staleness: Annotated[int, Field(ge=0)] = 2
    """Versions that may lie between sampling and training; older samples are dropped and counted."""
    baseline_decay: Fraction = 0.99
    """Forgetting of the baseline's counts, per batch."""
    advantage_limit: Positive = 3.0
    """Normalised advantages are clipped to ± this."""
    kl_coefficient: Annotated[float, Field(ge=0)] = 0.02
    """Weight in the loss of the KL to the last promoted version (at first the run's parent); raw mode has
    none."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """AdamW's decoupled weight decay."""
    gradient_clip: Positive = 1.0
    """Largest gradient norm."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where the run computes."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Number format of the matrix products (weights stay float32); auto is float32 on CPU and bfloat16 on
    CUDA. bfloat16 helps on CPUs that have it (AVX512-BF16, AMX) and is slow on others."""
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


class Policy(Node):
    """A named model that learns."""

    model: str = BUILTIN_MODEL
    """`fim-27m` (built in), a directory, or a Hugging Face id of a causal language model."""
    aliases: tuple[str, ...] = ()
    """Other names that clients use for it."""
    publish: Literal["candidate", "immediately"] = "candidate"
    """What becomes of a new version: it waits as a candidate, or goes live at once."""
    engine: Engine = Engine()
    """Its engines."""
    sampling: Sampling = Sampling()
    """Defaults of its requests."""
    joins: Joins = Joins()
    """How feedback finds its interactions."""
    rewards: Rewards = Rewards()
    """From verdict to number."""
    train: Train = Train()
    """How it learns."""
    trigger: Trigger = Trigger()
    """When it learns."""


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

    @field_validator("home")
    @classmethod
    def _path(cls, home: Path) -> Path:
        if "\0" in str(home):
            raise ValueError("a path cannot hold a NUL character")
        return home

    @model_validator(mode="after")
    def _names(self) -> Settings:
        seen: dict[str, str] = {}
        for name, policy in self.policies.items():
            if not POLICY_NAME.fullmatch(name):
                raise ValueError(f"policy name {name!r}: letters, digits, dot, dash and underscore only")
            for alias in (name, *policy.aliases):
                if alias in seen and seen[alias] != name:
                    raise ValueError(f"the name {alias!r} belongs to both {seen[alias]!r} and {name!r}")
                seen[alias] = name
        return self

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
    ]
    queue: list[tuple[str, type[Node]]] = [("", Settings)]
    while queue:
        path, node = queue.pop(0)
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
            where = f"{path}.{name}" if path else name
            if name == "policies":
                queue.append(("policies.NAME", Policy))
                default = "one policy, `tab`"
            elif isinstance(item.default, Node):
                queue.append((where, type(item.default)))
                default = f"[below](#{where.replace('.', '').lower()})"
            else:
                shown = str(item.default) if isinstance(item.default, Path) else item.default
                default = f"`{yaml.safe_dump(shown, default_flow_style=True).splitlines()[0]}`"
                if isinstance(shown, tuple):
                    default = f"`{list(shown)}`"
            text = " ".join((item.description or "").split()).replace("|", "\\|")
            parts.append(f"| `{where}` | {default} | {text} |")
    return "\n".join(parts) + "\n"
