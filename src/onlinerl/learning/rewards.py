"""From verdict to number (ALGORITHMS 3), and the worker that does it inside a run.

Accept 1−τ, reject −τ, silent 0. τ is the accept rate at which showing and staying silent are worth the
same: above it showing pays, below it silence does.

A reward may have more sources than the verdict. Each is multiplied with its weight (`rewards.weights`) and
their sum is the reward. One source is a function of the user's own (`rewards.function`):

    from onlinerl.records import Sample, Verdict

    def reward(sample: Sample) -> float:
        # a suggestion that opens with a comment is not wanted here
        return -0.5 if sample.completion.lstrip().startswith("#") else 0.0

It gets the `Sample` itself: frozen, and all that there is to know (prompt, completion, verdict, language,
token ids, …); fields may be added to it, none changes its meaning. It returns one finite number, or several
by name, the same names for each sample (0.0 where one does not apply); those show up as `function/NAME`,
each with a weight of its own. It is asked about every sample, silent ones included: what it says of silence
is weighed against what showing earns. It must answer the same when it is asked again, since batches are
repeated after a crash. `check_function(reward)` asks it about samples of every kind and says what is wrong,
at the start of each run and in tests of your own. A sample on which it fails all the same is dropped
(reason `reward`) and counted.
"""

from __future__ import annotations

import importlib
import inspect
import math
import traceback
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from numbers import Real
from types import MappingProxyType

from onlinerl import config
from onlinerl.errors import SettingsError
from onlinerl.flow.channel import Channel
from onlinerl.flow.worker import Worker
from onlinerl.records import Sample, Scored, Verdict
from onlinerl.worth import ONLY_TIMEOUTS

RewardFunction = Callable[[Sample], float | Mapping[str, float]]
"""A reward of the user's own; the module says what it must keep to."""


@dataclass(frozen=True, slots=True)
class RewardTable:
    """The rule of one run; τ is held from its start to its end.

    >>> table = RewardTable(tau=0.25, weights={"verdict": 1.0, "score": 0.5})
    >>> from dataclasses import replace
    >>> rated = replace(examples()[0], score=0.8, retained_characters=None)
    >>> dict(table.score(rated).parts)
    {'accepted': 0.75, 'score': 0.4}
    """

    tau: float
    timeout_weight: float = 0.5
    retention_bonus: float = 0.0
    weights: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))
    """By source: verdict, retained, score, function, function/NAME; 1 where it names none."""
    function: RewardFunction | None = None

    @classmethod
    def of(cls, settings: config.Rewards, tau: float) -> RewardTable:
        """The rule that `settings` describe, with the run's τ. Their function is loaded and checked: raises
        SettingsError as `check_function` does."""
        function = None
        if settings.function:
            function = load_function(settings.function)
            names = check_function(function, settings.function)
            unknown = {n for n in settings.weights if n.startswith("function/")} - names
            if unknown:
                raise SettingsError(
                    f"rewards.weights: {settings.function} returns nothing named "
                    f"{', '.join(sorted(unknown))}, only {', '.join(sorted(names))}"
                )
        elif named := [name for name in settings.weights if name.startswith("function")]:
            raise SettingsError(f"rewards.weights names {named[0]}, but there is no rewards.function")
        return cls(tau, settings.timeout_weight, settings.retention_bonus, settings.weights, function)

    def rejection(self, verdict: Verdict, source: str) -> float:
        """How much of a reject this verdict is: 1 explicit, `timeout_weight` or 1 a timeout, else 0."""
        if verdict is Verdict.REJECTED:
            return 1.0
        if verdict is Verdict.TIMEOUT:
            return 1.0 if source in ONLY_TIMEOUTS else self.timeout_weight
        return 0.0

    def weight(self, source: str) -> float:
        """What a source is multiplied with; a number of the function has its own weight, else all of its."""
        fallback = self.weights.get("function", 1.0) if source.startswith("function/") else 1.0
        return self.weights.get(source, fallback)

    def counts_verdict(self, sample: Sample) -> bool:
        """Whether the verdict's number is part of the reward: a client's own score takes its place, unless
        the weights name both."""
        return sample.score is None or {"verdict", "score"} <= self.weights.keys()

    def parts(self, sample: Sample) -> dict[str, float]:
        """Reward by source, weighted, without the function's; never fails."""
        parts: dict[str, float] = {}
        if self.counts_verdict(sample):
            parts[sample.verdict.value] = self.weight("verdict") * self._verdict(sample)
            if self.retention_bonus and sample.verdict is Verdict.ACCEPTED and sample.completion:
                kept = sample.retained_characters
                if kept is not None:
                    share = min(1.0, kept / len(sample.completion))
                    parts["retained"] = self.weight("retained") * (self.retention_bonus * share)
        if sample.score is not None:
            parts["score"] = self.weight("score") * sample.score
        return parts

    def _verdict(self, sample: Sample) -> float:
        if sample.verdict is Verdict.SILENT:
            return 0.0
        if sample.verdict is Verdict.ACCEPTED:
            return 1.0 - self.tau
        return -self.tau * self.rejection(sample.verdict, sample.verdict_source)

    def score(self, sample: Sample) -> Scored:
        """The sample with its reward; where the function failed, with none and the `fault` instead."""
        parts = self.parts(sample)
        if self.function is not None:
            numbers, fault = _ask(self.function, sample)
            if fault:
                return Scored(sample, 0.0, fault=f"rewards.function: {fault}")
            parts |= {name: self.weight(name) * number for name, number in numbers.items()}
        reward = sum(parts.values())
        if not math.isfinite(reward):
            return Scored(sample, 0.0, fault=f"the reward is not a finite number ({reward})")
        return Scored(sample, reward, parts)


# ------------------------------------------------------------------------------- the user's function


def load_function(path: str) -> RewardFunction:
    """The function that `module:function` names. Raises SettingsError that says what is missing.

    >>> load_function("math:sqrt")(9.0)  # any function; whether it is a reward is for check_function to say
    3.0
    """
    module, _, name = path.partition(":")
    try:
        found: object = importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise SettingsError(
            f"rewards.function {path}: there is no module {error.name}; it is looked for where the command "
            "was started, on PYTHONPATH and among what is installed"
        ) from None
    except (Exception, SystemExit) as error:  # translated: a stranger's module may raise anything
        raise SettingsError(
            f"rewards.function {path}: the module {module} cannot be imported: {_told(error)}"
        ) from error
    for part in name.split("."):
        found = getattr(found, part, None)
    if not callable(found):
        what = "is not a function" if found is not None else "is not in that module"
        raise SettingsError(f"rewards.function {path}: {name} {what}")
    function: RewardFunction = found
    return function


def check_function(function: RewardFunction, name: str = "") -> frozenset[str]:
    """Ask `function` twice about each of `examples()`; returns the names of its numbers (`function`, or
    `function/NAME` for each).

    Raises SettingsError with the function's name and what was wrong: it failed, it returned no finite
    number, other names for another sample, or another number for the same one.
    """
    name = name or f"{function.__module__}:{getattr(function, '__qualname__', function)}"
    if inspect.iscoroutinefunction(function):
        raise SettingsError(f"rewards.function {name} is a coroutine: a plain function is needed")
    names: frozenset[str] | None = None
    for sample in examples():
        kind = f"a sample that is {sample.verdict.value}"
        numbers, fault = _ask(function, sample, told=True)
        if fault:
            raise SettingsError(f"rewards.function {name}: for {kind} {fault}")
        again, fault = _ask(function, sample, told=True)
        if fault or again != numbers:
            raise SettingsError(
                f"rewards.function {name}: for the same sample, one that is {sample.verdict.value}, it "
                f"first returned {_shown(numbers)} and then {fault or _shown(again)}: it must not depend on "
                "chance, time or what it was asked before"
            )
        if names is not None and names != numbers.keys():
            raise SettingsError(
                f"rewards.function {name}: for {kind} it returned {_list(numbers.keys())}, for others "
                f"{_list(names)}: the names must be the same for each sample"
            )
        names = frozenset(numbers)
    assert names is not None
    return names


def examples() -> list[Sample]:
    """Samples of every kind, to try a reward function on: each verdict, from several clients, with and
    without a score, cut, silent, in an unknown language, with text that is no ASCII."""
    accepted = Sample(
        id="example-accepted",
        index=0,
        policy="tab",
        version=3,
        project="default",
        user="u1",
        at=1000.0,
        prompt_ids=(8184, 40, 8186, 41, 8185),
        completion_ids=(400, 88, 8183),
        behavior_logprobs=(-0.7, -1.1, -0.2),
        loss_mask=(True, True, True),
        temperature=1.0,
        top_p=1.0,
        language="python",
        multiline=False,
        verdict=Verdict.ACCEPTED,
        verdict_source="native",
        completion="return x",
        retained_characters=8,
        batch=1,
        prompt="<|fim_prefix|>def f(x):\n    <|fim_suffix|>\n<|fim_middle|>",
        arm="live",
    )
    rejected = replace(
        accepted,
        id="example-rejected",
        verdict=Verdict.REJECTED,
        loss_mask=(True, False, False),
        retained_characters=None,
    )
    return [
        accepted,
        replace(accepted, id="example-scored", score=0.5, retained_characters=None, user="", index=1),
        rejected,
        replace(rejected, id="example-other", completion="größe = 1\n", multiline=True, language=""),
        replace(rejected, id="example-timeout", verdict=Verdict.TIMEOUT, verdict_source="continue"),
        replace(
            rejected,
            id="example-silent",
            verdict=Verdict.SILENT,
            verdict_source="server",
            completion="",
            completion_ids=(8183,),
            behavior_logprobs=(-0.9,),
            loss_mask=(True,),
        ),
    ]


def _ask(function: RewardFunction, sample: Sample, *, told: bool = False) -> tuple[dict[str, float], str]:
    """The function's numbers by source, or what was wrong. The words of an exception are given only where
    `told`: they may quote the sample, and what people type stays out of logs."""
    try:
        value = function(sample)
    except (Exception, SystemExit) as error:  # noqa: BLE001 - a stranger's code: this sample is isolated
        return {}, f"it raised {_told(error) if told else _place(error)}"
    if isinstance(value, Mapping):
        numbers = {f"function/{name}": number for name, number in value.items()}
        if not numbers:
            return {}, "it returned an empty mapping"
    else:
        numbers = {"function": value}
    for name, number in numbers.items():
        if not isinstance(number, Real):
            return {}, f"it returned {type(number).__name__} as {name}, which is not a number"
        try:
            finite = math.isfinite(number)
        except OverflowError:  # an int or a fraction beyond all floats
            return {}, f"it returned a number as {name} that is too large"
        if not finite:
            return {}, f"it returned {number} as {name}, which is not finite"
    return {name: float(number) for name, number in numbers.items()}, ""


def _place(error: BaseException) -> str:
    """The kind of an exception and the line that raised it."""
    frames = traceback.extract_tb(error.__traceback__)
    last = frames[-1]
    return f"{type(error).__name__} in line {last.lineno} of {last.name}"


def _told(error: BaseException) -> str:
    """An exception in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


def _shown(numbers: Mapping[str, float]) -> str:
    return ", ".join(f"{number:g} ({name})" for name, number in numbers.items())


def _list(names: Iterable[str]) -> str:
    return ", ".join(sorted(names))


# ------------------------------------------------------------------------------------------ the worker


class ComputeReward(Worker[Sample, Scored]):
    """Samples in, scored samples out, in the same order."""

    def __init__(self, table: RewardTable) -> None:
        self.table = table

    def run(self, input: Channel[Sample] | None, output: Channel[Scored] | None) -> None:
        """Until the input ends."""
        assert input is not None
        assert output is not None
        for sample in input:
            output.put(self.table.score(sample))
