"""The course of an offline run: base → warm start → learning from rewards, each measured on held-out prompts.

What differs from the online system is who rates and when: the same engine samples, the same rewards,
advantages, losses and guards make versions of the weights, and after `publish_every` steps the engine gets
them. A version is made, and the KL and the guards measured to it, every `train.version_every` steps.
"""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from onlinerl import config
from onlinerl.datasets.fim import FimPrompt
from onlinerl.errors import GuardTripped, JudgeError, RunError, SettingsError
from onlinerl.learning import memory
from onlinerl.learning.advantages import Baseline
from onlinerl.learning.batches import PolicyModel, Scorer, Sibling
from onlinerl.learning.guards import Bands, dominance
from onlinerl.learning.judges import Judge, make_judge
from onlinerl.learning.learner import INSPECTED, Learner
from onlinerl.learning.log import RunLog
from onlinerl.learning.rewards import RewardTable, auto_tau
from onlinerl.learning.update import update
from onlinerl.records import Sample, Scored, Verdict
from onlinerl.validate import evaluate, forgetting, starts, warmstart
from onlinerl.validate.evaluate import Scores
from onlinerl.validate.ground import Ground
from onlinerl.validate.raters import JudgeRater, Rater, UserRater, reported
from onlinerl.validate.report import Point, Report, Stage, libraries
from onlinerl.validate.rollouts import Answer
from onlinerl.validate.starts import Start

TAU_COMPLETIONS = 128
"""Completions of the start's weights that τ under `auto` is measured on."""
SHOWN = 8
"""Answers that the report shows for each stage."""


@dataclass(slots=True)
class Clock:
    """Seconds by what they were spent on."""

    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def spend(self, name: str) -> Iterator[None]:
        """Count the block."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - began


def policy_of(settings: config.Settings) -> str:
    """The policy to validate. Raises SettingsError when it is unclear or there is none."""
    name = settings.validation.policy
    return settings.chosen(name, option="validation.policy", where="validation.policy: ")


def check(settings: config.Settings) -> None:
    """Raise SettingsError for settings that contradict each other, before anything is computed."""
    mine, policy = settings.validation, settings.policies[policy_of(settings)]
    train = policy.train
    reported(mine)
    RewardTable.of(policy.rewards, 0.0)
    if isinstance(policy.exploration.users, tuple):
        raise SettingsError("exploration.users: a validation explores for `all` of its users or `none`")
    if policy.sampling.temperature < train.temperature_floor:
        raise SettingsError(
            f"the sampling temperature {policy.sampling.temperature:g} is below train.temperature_floor "
            f"({train.temperature_floor:g}): nothing could be learned from"
        )
    if train.batch % mine.group:
        raise SettingsError(f"train.batch ({train.batch}) must be a multiple of validation.group")
    if (train.mode == "group") != (mine.group > 1):
        raise SettingsError("train.mode: group needs validation.group above 1, and the other modes 1")
    steps = -(-mine.completions // train.batch)
    every = mine.publish_every or steps
    oldest = (every - 1) // train.version_every
    if oldest > train.staleness:
        raise SettingsError(
            f"validation.publish_every makes samples up to {oldest} versions old: raise train.staleness "
            f"({train.staleness}) to {oldest}, or train.version_every"
        )
    source = mine.warmstart.source
    if source not in ("none", "accepted") and not Path(source).is_file():
        raise SettingsError(
            f"validation.warmstart.source: {source} is none, accepted, or a file that is there"
        )
    if mine.data is not None and not mine.data.exists():
        raise SettingsError(f"validation.data: {mine.data} does not exist")
    for judge in (mine.judge, mine.report_judge):
        make_judge(judge, None)  # an endpoint that is missing should not cost the last report
    if mine.save is not None and mine.save.exists():
        raise SettingsError(f"validation.save: {mine.save} exists already")
    if mine.quantise != "none" and policy.engine.dtype not in ("auto", "float32", "bfloat16"):
        raise SettingsError("validation.quantise needs engine.dtype auto, float32 or bfloat16")


class Course:
    """One offline run. `go` runs it and gives its report; the weights are then the last good ones."""

    def __init__(
        self, settings: config.Settings, ground: Ground, log: RunLog, starts: Path | None = None
    ) -> None:
        self.settings = settings.validation
        self.ground = ground
        self.name = ground.name
        self.policy = settings.policies[self.name]
        self.train = self.policy.train
        self.log = log
        self.starts = starts
        self.clock = Clock({"load": ground.seconds})
        self.engine = ground.engine
        self.rollouts = ground.rollouts
        self.live = ground.live
        self.test = list(ground.test)
        self.judge, self.report_judge = ground.judge, ground.report_judge
        self.runner = asyncio.Runner()
        self.tastes = reported(self.settings)
        self.rater: Rater = (
            JudgeRater(self.judge, self.name)
            if self.settings.rater == "judge"
            else UserRater(self.settings, self.name)
        )
        given = self.settings.report_temperature
        self.temperature = self.policy.sampling.temperature if given is None else given
        """Of the second evaluation."""
        self.bands = Bands(self.train.guards, self.train.silence)
        self.baseline = Baseline(self.train.baseline_decay)
        self.completions = 0
        """Sampled to learn from so far."""
        self.step = 0
        self.engine_version = 0
        """Step after which the engine's weights stood so."""
        self.silent_seen = False
        """Whether the policy was silent in any batch so far."""
        self.dropped_stale = 0
        self.faults_of_judges: dict[str, str] = {}
        """By judge the last account of its failures in an evaluation."""
        self.faults = 0
        """Samples on which the user's own reward function failed."""
        self.stages: list[Stage] = []
        self.curve: list[Point] = []
        self.tau = 0.0
        self.tau_report = 0.0
        self._versions: dict[int, dict[str, Tensor]] = {}
        self._models: dict[str, PolicyModel] = {}
        self._base: Start
        self._last: Start
        """What the last stage measured."""
        self._pool: list[Sample] = []
        self._recent: list[Sample] = []
        self._prompts = _forever(ground.train, self.settings.seed)
        self._explorer = random.Random(f"{self.settings.seed}/explore")

    def close(self) -> None:
        """Give the event loop back."""
        self.runner.close()

    # ------------------------------------------------------------------------------------ the course

    def go(self) -> Report:
        """Raises OnlineRLError where there is nothing to report; a guard or a failing judge only ends it."""
        for text in self.live.fallbacks:
            self.log.event("warning", batch=0, text=text)
        if self.settings.quantise != "none":
            self._replace_start()  # what was read from the folder is not rounded
        self._stage("base", 0)
        # Sampled from it or not (`starts`): the engine goes on with nothing in its caches, to the last digit.
        self._replace_start()
        message, ended = "", "all completions are used"
        try:
            if self.settings.warmstart.source != "none":
                self._warm_start()
            self.learner = Learner(self.live, self.train, reference=0, load=self._load)
            self._versions[0] = self._snapshot()
            self.tau = self._tau()
            self.table = RewardTable.of(self.policy.rewards, self.tau)
            self._learn()
        except (GuardTripped, JudgeError) as error:
            message = ended = str(error)
            steps = self.step
            self.log.event("stopped", step=self.step, message=message)
            self._fall_back()
        else:
            steps = self.step
        self._publish()
        self._stage("RL", self.step)
        self.log.event("end", batch=steps, message=ended)
        return self._report(steps, message, ended)

    def _learn(self) -> None:
        train = self.train
        while True:
            batch = self._batch()
            if not batch:
                break
            self._step(batch)
            if self.step % train.version_every == 0:
                self._version()
            if self.settings.publish_every and self.step % self.settings.publish_every == 0:
                self._publish()
            every = self.settings.evaluate_every
            if every and self.step % every == 0:
                self._point()
        if self.step and self.step % train.version_every:
            self._version()

    def _batch(self) -> list[Scored]:
        """The next `train.batch` rated samples, whole groups only; [] when all completions are used."""
        size = self.train.batch
        while len(self._pool) < size:
            if self.completions + size > self.settings.completions:
                return []
            with self.clock.spend("rollouts"):
                answers = self._draw(size // self.settings.group)
            self.completions += len(answers)
            with self.clock.spend("rating"):
                self._pool += self.runner.run(self.rater.rate(answers))
            fresh = [one for one in self._pool if self._staleness(one) <= self.train.staleness]
            self.dropped_stale += len(self._pool) - len(fresh)
            self._pool = fresh
        end = size
        while 0 < end < len(self._pool) and self._pool[end].id == self._pool[end - 1].id:
            end -= 1
        taken, self._pool = self._pool[: end or size], self._pool[end or size :]
        return [self.table.score(sample) for sample in taken]

    def _step(self, whole: list[Scored]) -> None:
        trust = self.policy.trust
        few = not trust.owner and self.settings.users < trust.crowd
        one_voice = dominance([one.sample.user for one in whole], trust.dominance) if few else ""
        if one_voice:
            raise GuardTripped(one_voice)
        batch = [one for one in whole if not one.fault]
        self.faults += len(whole) - len(batch)
        self.bands.rewards(whole)
        self.silent_seen |= any(scored.sample.silent for scored in batch)
        numbers: dict[str, float] = {}
        if batch:
            with self.clock.spend("training"):
                numbers = update(
                    self.learner,
                    batch,
                    self.step + 1,
                    baseline=self.baseline,
                    table=self.table,
                    bands=self.bands,
                    staleness=[self._staleness(scored.sample) for scored in batch],
                    silent_expected=self.silent_seen,
                )
            self._recent = [scored.sample for scored in batch[:INSPECTED]]
        self.step += 1
        numbers["completions"] = float(self.completions)
        self.log.step(self.step, numbers, [f"{one.sample.id}/{one.sample.index}" for one in batch])

    # -------------------------------------------------------------------------------------- versions

    def _staleness(self, sample: Sample) -> int:
        """Versions made since the sample's weights."""
        every = self.train.version_every
        return self.step // every - sample.version // every

    def _version(self) -> None:
        """The weights become the last good version, to which KL and guards are measured from now on."""
        with self.clock.spend("training"):
            self.learner.inspect(self._recent, self.bands)
            self._versions = {0: self._versions[0], self.step: self._snapshot()}
            self.learner.rebase(self.step, moved=False)

    def _publish(self) -> None:
        """Put the weights into the engine."""
        with self.clock.spend("publishing"):
            if self.engine_version != self.step:
                self.engine.put(self.step, self.tensors())
                self.engine.forget(self.engine_version)
                self.engine_version = self.step

    def _replace_start(self) -> None:
        """Put the live weights into the engine as its version 0."""
        self.engine.forget(0)
        self.engine.put(0, self.tensors())

    def _fall_back(self) -> None:
        """To the last good version's weights, which are the start's where there is no later one."""
        if self._versions:
            self.step = max(self._versions)
            self._restore(self.live, self._versions[self.step])

    def _load(self, version: int) -> Scorer:
        """A model to compare with: one object for the first version, another for all others in turn."""
        if self.live.adapter is not None:
            return Sibling(self.live, self._versions[version])
        kind = "first" if version == 0 else "reference"
        if kind not in self._models:
            self._models[kind] = PolicyModel.load(self.ground.model, self.ground.device, self.ground.dtype)
        model = self._models[kind]
        self._restore(model, self._versions[version])
        return model

    @staticmethod
    @torch.no_grad()
    def _restore(model: PolicyModel, weights: Mapping[str, Tensor]) -> None:
        for name, parameter in model.parameters().items():
            parameter.copy_(weights[name])

    def _snapshot(self) -> dict[str, Tensor]:
        return {name: p.detach().clone() for name, p in self.live.parameters().items()}

    def tensors(self) -> dict[str, Tensor]:
        """The live weights by their names in a model file, an adapter merged into them."""
        return {name: tensor.detach() for name, tensor in self.live.weights().items()}

    # ------------------------------------------------------------------------------------ the pieces

    def _draw(self, prompts: int) -> list[Answer]:
        """Answers to the next prompts, in their order."""
        sampling = self.policy.sampling
        chosen = [next(self._prompts) for _ in range(prompts)]
        exploration = self.policy.exploration
        share = exploration.share if exploration.users == "all" else 0.0
        explores = [self._explorer.random() < share for _ in chosen]
        found = {
            arm: iter(
                self.rollouts.answers(
                    [prompt for prompt, explored in zip(chosen, explores, strict=True) if explored is arm],
                    self.engine_version,
                    temperature=1.0 if arm else sampling.temperature,
                    top_p=1.0 if arm else sampling.top_p,
                    max_tokens=sampling.max_tokens,
                    group=self.settings.group,
                )
            )
            for arm in (False, True)
        }
        return [next(found[explored]) for explored in explores for _ in range(self.settings.group)]

    def _tau(self) -> float:
        """τ of the run: the setting, or half of what the start's completions are accepted at."""
        tau = self.policy.rewards.tau
        if tau != "auto":
            return tau
        if self.train.mode != "baseline" or not isinstance(self.rater, UserRater):
            return 0.0  # rewards of a judge do not know it, and raw rewards are 1 and 0
        with self.clock.spend("rollouts"):
            answers = self._draw(min(TAU_COMPLETIONS, self.settings.completions // 4))
        self.completions += len(answers)
        before = self.rater.seen.copy()
        self.runner.run(self.rater.rate(answers))
        seen = self.rater.seen - before
        return auto_tau(seen["accepted"], seen["opportunities"], self.policy.rewards.tau_limit)

    def _warm_start(self) -> None:
        train = self.ground.train
        settings = self.settings.warmstart
        sampling = self.policy.sampling
        if settings.source == "accepted":
            with self.clock.spend("rollouts"):
                prompts = [train[place % len(train)] for place in range(settings.completions)]
                answers = self.rollouts.answers(
                    prompts,
                    0,
                    temperature=sampling.temperature,
                    top_p=sampling.top_p,
                    max_tokens=sampling.max_tokens,
                )
            rated = self.runner.run(self.rater.rate(answers))
            samples = [one for one in rated if one.verdict is Verdict.ACCEPTED]
            if not samples:
                raise RunError(
                    f"the warm start found nothing to learn from: none of {len(rated)} answers was accepted"
                )
        else:
            samples = list(self.ground.taught)
        with self.clock.spend("warm start"):
            likelihood = warmstart.fine_tune(
                self.live,
                samples,
                lr=settings.lr,
                epochs=settings.epochs,
                batch=self.train.batch,
                microbatch=memory.PLENTY if self.train.microbatch == "auto" else self.train.microbatch,
                gradient_clip=self.train.gradient_clip,
                seed=self.settings.seed,
            )
        self.log.event("warm start", samples=len(samples), likelihood=likelihood)
        with self.clock.spend("publishing"):
            self._replace_start()
        self._stage("warm start", 0, samples=len(samples))

    # ------------------------------------------------------------------------------------ evaluation

    def _scores(self, prompts: list[FimPrompt], temperature: float, examples: int = 0) -> Scores:
        sampling = self.policy.sampling
        answers = self.rollouts.answers(
            prompts,
            self.engine_version,
            temperature=temperature,
            top_p=sampling.top_p,
            max_tokens=sampling.max_tokens,
            seed="held-out",
        )
        judges: dict[str, Judge] = {"train": self.judge, "report": self.report_judge}
        scores = self.runner.run(evaluate.score(answers, self.tastes, judges, examples=examples))
        for fault in scores.faults.values():
            self.log.event("warning", batch=self.step, text=fault)
        self.faults_of_judges |= scores.faults
        return scores

    def _stage(self, name: str, step: int, samples: int = 0) -> None:
        """Measure the engine's weights on all held-out prompts."""
        if name == "base":
            found = self._base = self._measured_before()
            accept = found.scores["sampled"].columns["accept"]
            given = self.settings.tau_report
            self.tau_report = 0.5 * sum(accept) / len(accept) if given is None else given
        elif name == "RL" and step == 0:
            found = self._last  # the weights have not moved since
        else:
            found = self._measured(name)
        self._last = found
        scores = found.scores
        made = Stage(
            name=name,
            step=step,
            completions=self.completions,
            samples=samples,
            metrics={how: one.estimates(self.tau_report) for how, one in scores.items()},
            gains={}
            if name == "base"
            else {how: one.gains(self._base.scores[how], self.tau_report) for how, one in scores.items()},
            losses=found.losses,
            examples=scores["greedy"].examples,
        )
        self.stages.append(made)
        every = self.settings.evaluate_every
        if every and (name == "base" or (name == "RL" and step % every)):
            self._add_point({how: one.first(self.settings.evaluate_prompts) for how, one in scores.items()})
        self.log.event("stage", stage=name, step=step, **made.summary())

    def _measured(self, name: str) -> Start:
        self.log.note(f"measuring {name} on {len(self.test)} held-out prompts")
        with self.clock.spend("evaluation"):
            scores = {
                "greedy": self._scores(self.test, 0.0, SHOWN),
                "sampled": self._scores(self.test, self.temperature, SHOWN),
            }
            return Start(scores, self._losses())

    def _measured_before(self) -> Start:
        """The base's measure: that of another run which began alike, where there was one."""
        if self.starts is None:
            return self._measured("base")
        key = starts.name(self.ground.model, self.test, self._facts())
        found = starts.read(self.starts, key, self.test)
        if found is None:
            found = self._measured("base")
            starts.keep(self.starts, key, found)
        return found

    def _facts(self) -> dict[str, Any]:
        """What a measurement of the base depends on beside the model and the prompts: what is sampled and by
        which numbers, and who judges it."""
        sampling, mine, train = self.policy.sampling, self.settings, self.train
        judges = ((mine.judge, self.judge), (mine.report_judge, self.report_judge))
        return {
            "sampling": [self.temperature, sampling.top_p, sampling.max_tokens, mine.seed],
            "engine": [self.engine.settings.model_dump(mode="json"), mine.quantise],
            "trainer": [
                self.ground.device.type,
                str(self.ground.dtype),
                train.compile,
                train.lora.model_dump(mode="json"),
                torch.get_num_threads(),
            ],
            "judges": [[settings.model_dump(mode="json"), judge.name] for settings, judge in judges],
            "tastes": repr(self.tastes),
            "forgetting": mine.forgetting_prompts,
            "libraries": libraries(),
        }

    def _losses(self) -> dict[str, forgetting.Loss]:
        """What the live weights forgot: the losses on plain code and on the authors' middles."""
        prompts = self.test[: self.settings.forgetting_prompts]
        if not prompts:
            return {}
        codec = self.rollouts.codec
        texts, files = forgetting.plain(prompts)
        return {
            "left_to_right": forgetting.left_to_right_loss(self.live, codec.encode, texts, groups=files),
            "middle": forgetting.middle_loss(
                self.live, codec.encode, prompts, self.rollouts.prompt_ids, stop=codec.eos_ids[0]
            ),
        }

    def _point(self) -> None:
        """A point of the learning curve, of the weights as they are."""
        prompts = self.test[: self.settings.evaluate_prompts]
        self.log.note(f"measuring step {self.step} on {len(prompts)} held-out prompts")
        before = self.engine_version
        with self.clock.spend("evaluation"):
            if before != self.step:
                self.engine.put(self.step, self.tensors())
                self.engine_version = self.step
            scores = {
                "greedy": self._scores(prompts, 0.0),
                "sampled": self._scores(prompts, self.temperature),
            }
            if before != self.step:
                self.engine.forget(self.step)
                self.engine_version = before
        self._add_point(scores)

    def _add_point(self, scores: Mapping[str, Scores]) -> None:
        metrics = {how: one.estimates(self.tau_report) for how, one in scores.items()}
        self.curve.append(Point(self.step, self.completions, metrics))
        flat = {
            f"{how}/{name}": one.mean
            for how, all_ in metrics.items()
            for name, one in all_.items()
            if not math.isnan(one.mean)  # a judge failed: JSON has no word for it
        }
        self.log.scalars(self.step, {f"held-out/{name}": value for name, value in flat.items()})
        self.log.event("point", step=self.step, completions=self.completions, **flat)

    def _report(self, steps: int, message: str, ended: str) -> Report:
        left_out = dict(self.rater.left_out)
        left_out |= {"stale": self.dropped_stale, "reward function failed": self.faults}
        left_out = {reason: count for reason, count in left_out.items() if count}
        return Report(
            stages=self.stages,
            curve=self.curve,
            tau=self.tau,
            tau_report=self.tau_report,
            steps=steps,
            completions=self.completions,
            stopped=message,
            ended=ended,
            left_out=left_out,
            judges={"train": self.judge.name, "report": self.report_judge.name},
            judge_faults=self.faults_of_judges,
            data=self.ground.account,
            seconds=self.clock.seconds,
        )


def _forever(prompts: Sequence[FimPrompt], seed: int) -> Iterator[FimPrompt]:
    """The prompts, in another order in each epoch."""
    epoch = 0
    while True:
        order = list(prompts)
        random.Random(f"{seed}/{epoch}").shuffle(order)
        yield from order
        epoch += 1
