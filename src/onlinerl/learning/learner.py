"""The arithmetic of a batch: from scored samples to new weights and the numbers that describe the step."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from onlinerl import config
from onlinerl.learning import losses, memory
from onlinerl.learning.batches import Pack, PolicyModel, Scorer, Scores, length, microbatches, pack
from onlinerl.learning.guards import Bands
from onlinerl.learning.losses import LossSettings
from onlinerl.records import Sample, Scored

TRUSTED = 0.05
"""Mean |log π_trainer − log π_engine| per token up to which the engine's numbers are the trainer's own, so
that an answer sampled from the reference need not be scored under it again. fp32 on both sides
differs by 1e-5, bf16 by 0.02; an int8 engine fails, and then the reference is asked."""
WATCH = 8
"""Where the KL is no part of the loss and costs a forward pass of the reference, it is measured in every so
many batches. What it costs is a third of a step; it moves slowly, and no version becomes one unmeasured
(`Learner.inspect`)."""

INSPECTED = 16
"""Samples on which weights are judged before they become a version (`Learner.inspect`)."""
JUDGED = ("kl", "entropy", "clip_fraction", "length", "veto_fraction")
"""Numbers of a step that the guards look at."""
SUMS = ("tokens", "clipped", "weight", "weight_squared", "kl_reference", "kl_behaviour", "entropy")
"""Fields of `losses.Sums` that enter the metrics."""


@dataclass(slots=True)
class Part:
    """One microbatch of a batch, with what stays the same while the batch is trained on. All [K] tensors
    are in the order of the pack's judged tokens."""

    pack: Pack
    behaviour: Tensor
    advantage: Tensor
    prox: Tensor | None = None
    """π_prox: set by the first forward pass, before any step of the batch changes the weights."""
    reference: Tensor | None = None
    show: Tensor | None = None
    """[n], as of the last forward pass."""


@dataclass(slots=True)
class Totals:
    """Sums over a batch, for its metrics."""

    values: dict[str, float] = field(default_factory=dict)

    def add(self, name: str, value: float | Tensor) -> None:
        """Add to a sum."""
        self.values[name] = self.values.get(name, 0.0) + float(value)

    def get(self, name: str) -> float:
        """A sum."""
        return self.values.get(name, 0.0)


class Learner:
    """Holds the weights in training, their optimiser, and (only when needed) the models to compare with.

    `load` makes a version's model: the reference of the KL (the last promoted version, at first the run's
    parent) and the first version are loaded when they are first asked for; many batches need neither.
    """

    def __init__(
        self,
        policy: PolicyModel,
        train: config.Train,
        *,
        reference: int,
        load: Callable[[int], Scorer],
    ) -> None:
        self.policy = policy
        self.train = train
        self.settings = LossSettings.of(train)
        self.reference = reference
        """Version that the KL is measured to."""
        self._load = load
        self._referee: Scorer | None = None
        self._holdout: Scorer | None = None
        self.moved = False
        """False while the weights are still the reference's."""
        self.trusted: bool | None = None
        """Whether the engine's log-probabilities are as good as the trainer's; None: not measured yet."""
        self.plan = memory.Plan(
            memory.PLENTY if train.microbatch == "auto" else train.microbatch, train.recompute is True
        )
        """How batches go through the model; on a GPU set by the first batch, and again by longer ones."""
        self._planned = 0
        self.parameters = policy.parameters()
        self.lr = train.lr if policy.adapter is None else train.lora.lr or train.lr
        self.optimizer = torch.optim.AdamW(
            list(self.parameters.values()),
            lr=self.lr,
            betas=(
                0.9,
                0.95,
            ),  # rewards change what is right within a few dozen steps; 0.999 remembers longer
            weight_decay=train.weight_decay,
            fused=True,
        )

    def rebase(self, version: int, *, moved: bool) -> None:
        """Measure the KL to another version from now on."""
        self.reference, self.moved = version, moved
        self._referee = None

    # ------------------------------------------------------------------------------------ one batch

    def step(
        self, batch: Sequence[Scored], advantage: Sequence[float], bands: Bands, number: int
    ) -> dict[str, float]:
        """Train on a batch: 1–4 optimiser steps. Returns its metrics.

        Raises GuardTripped as soon as something leaves its band; the weights may then have moved and must
        not be used any more (a NaN never reaches them).
        """
        samples = [scored.sample for scored in batch]
        self._fit(samples)
        # Adam's step does not shrink with the evidence: three verdicts would move the weights as far as a
        # full batch does. The last batch of a run earns its share of a step.
        share = min(1.0, len(batch) / self.train.batch)
        minibatches = self._plan(samples, advantage, number)
        totals = Totals()
        measured = self._prepare(minibatches, samples, number)
        for parts in minibatches:
            for group in self.optimizer.param_groups:
                group["lr"] = self.lr * share * self._risen()
            if not self._minibatch(parts, bands, totals):
                # A first forward pass found sequences to leave out, so the denominator was wrong.
                self._minibatch(parts, bands, totals)
        if not self.moved:
            self._measure_trust([part for parts in minibatches for part in parts], samples)
            self.moved = True
        show = torch.cat([p.show for parts in minibatches for p in parts if p.show is not None]).mean().item()
        numbers = self._metrics(totals, batch, show)
        if not measured:
            del numbers["kl"]
        bands.batch({name: numbers[name] for name in JUDGED if name in numbers}, len(batch))
        if self.settings.show:
            numbers |= self._silence(show, samples, bands)
        return numbers

    def inspect(self, samples: Sequence[Sample], bands: Bands) -> dict[str, float]:
        """Judge the weights as they are now, before they become a version; raises GuardTripped."""
        if not all(bool(torch.isfinite(p).all()) for p in self.parameters.values()):
            bands.batch({"weights": float("nan")}, len(samples))
        totals = Totals()
        for part in self._parts(samples, range(len(samples)), [0.0] * len(samples)):
            scores = self._score(self.policy, part)
            totals.add("tokens", scores.logprobs.numel())
            totals.add("entropy", scores.entropy.sum())
            if not self.moved:
                reference = scores.logprobs
            else:
                reference = part.behaviour if self._told(part, samples) else self._referred(part)
            totals.add("kl", losses.divergence(scores.logprobs, reference, part.behaviour).sum())
        tokens = max(1.0, totals.get("tokens"))
        numbers = {"kl": totals.get("kl") / tokens, "entropy": totals.get("entropy") / tokens}
        bands.batch(numbers, len(samples))
        return numbers

    def reward(self, held: Sequence[Scored]) -> tuple[float, float]:
        """The current policy's mean reward on held-back feedback, and the estimate's ESS / n."""
        samples = [scored.sample for scored in held]
        ratio = torch.zeros(len(held), dtype=torch.float64)
        for part in self._parts(samples, range(len(samples)), [0.0] * len(samples)):
            scores = self._score(self.policy, part)
            difference = (scores.logprobs - part.behaviour).double().cpu()
            places = torch.tensor(part.pack.samples)[part.pack.sequence.cpu()]
            ratio.index_add_(0, places, difference)
        return losses.self_normalised_reward(ratio, torch.tensor([scored.reward for scored in held]))

    # ---------------------------------------------------------------------------------------- pieces

    def _risen(self) -> float:
        """Share of the learning rate that the next optimiser step has, by the steps that it made so far.

        The count lies in the optimiser's state, so a run that resumes or inherits one does not begin anew.
        """
        state: Mapping[str, Any] = next(iter(self.optimizer.state.values()), {})
        return min(1.0, (float(state.get("step", 0.0)) + 1.0) / (self.train.warmup + 1))

    def _fit(self, samples: Sequence[Sample]) -> None:
        """Plan what a row holds, and whether activations are kept, by the memory that is free."""
        policy = self.policy
        if policy.device.type == "cuda":
            lengths = [length(sample) for sample in samples]
            if max(lengths) > self._planned:
                self._planned = max(lengths)
                judged = sum(sum(sample.loss_mask) for sample in samples)
                self.plan = memory.plan(
                    memory.SHARE
                    * (memory.free(policy.device) - self._to_come() - policy.logit_bytes(judged)),
                    policy.footprint(),
                    longest=max(lengths),
                    tokens=sum(lengths),
                    microbatch=self.train.microbatch,
                    recompute=self.train.recompute,
                )
        policy.recompute(self.plan.recompute)

    def _to_come(self) -> int:
        """Bytes of gradients and of Adam's two moments that are not there yet."""
        return sum(
            p.numel() * p.element_size() * ((p.grad is None) + 2 * (p not in self.optimizer.state))
            for p in self.parameters.values()
        )

    def _plan(self, samples: Sequence[Sample], advantage: Sequence[float], number: int) -> list[list[Part]]:
        order = list(range(len(samples)))
        random.Random(f"{self.train.seed}/{number}").shuffle(order)
        count = min(self.train.minibatches, len(order))
        bounds = [len(order) * place // count for place in range(count + 1)]
        return [
            list(self._parts(samples, order[start:stop], advantage))
            for start, stop in itertools.pairwise(bounds)
        ]

    def _parts(
        self, samples: Sequence[Sample], places: Iterable[int], advantage: Sequence[float]
    ) -> Iterable[Part]:
        chosen = list(places)
        for group in microbatches([length(samples[place]) for place in chosen], self.plan.row):
            made = pack(
                samples, [chosen[one] for one in group], self.policy.device, padded=self.policy.padded
            )
            behaviour = [
                samples[place].behavior_logprobs[token]
                for place, tokens in zip(made.samples, made.tokens, strict=True)
                for token in tokens
            ]
            weights = torch.tensor([advantage[place] for place in made.samples]).to(self.policy.device)
            yield Part(
                pack=made,
                behaviour=torch.tensor(behaviour, dtype=torch.float32).to(self.policy.device),
                advantage=weights[made.sequence],
            )

    @staticmethod
    @torch.no_grad()
    def _score(model: Scorer, part: Part) -> Scores:
        scores = model.score(part.pack)
        part.show = scores.show
        return scores

    def _prepare(self, minibatches: Sequence[Sequence[Part]], samples: Sequence[Sample], number: int) -> bool:
        """π_prox and the reference for all but the first minibatch, which gets them from its own training
        pass: before its step the weights are those of the batch's start.

        False: the reference is not asked for this batch, and the KL is measured to nothing.
        """
        for parts in minibatches[1:]:
            for part in parts:
                part.prox = self._score(self.policy, part).logprobs
        whole = [part for parts in minibatches for part in parts]
        if not self.moved:
            for part in whole:
                part.reference = part.prox
            return True
        told = [self._told(part, samples) for part in whole]
        if self.settings.kl == 0 and number % WATCH and not all(told):
            return False
        for part, known in zip(whole, told, strict=True):
            part.reference = part.behaviour if known else self._referred(part)
        return True

    def _measure_trust(self, parts: Sequence[Part], samples: Sequence[Sample]) -> None:
        """While the weights are the reference's, π_prox is π_ref: hold it against what the engine said."""
        differences = []
        for part in parts:
            if part.prox is not None:
                own = torch.tensor(self._from_reference(part, samples), device=self.policy.device)
                differences.append((part.prox - part.behaviour)[own[part.pack.sequence]].abs())
        if differences and sum(d.numel() for d in differences):
            self.trusted = bool(torch.cat(differences).mean().item() < TRUSTED)

    def _from_reference(self, part: Part, samples: Sequence[Sample]) -> list[bool]:
        """Which samples were sampled from the reference, unchanged by top-p."""
        return [
            samples[place].version == self.reference and samples[place].top_p == 1.0
            for place in part.pack.samples
        ]

    def _told(self, part: Part, samples: Sequence[Sample]) -> bool:
        """Whether log π_ref of the judged tokens is what the engine said of them."""
        return bool(self.trusted) and all(
            own
            for own, judged in zip(self._from_reference(part, samples), part.pack.tokens, strict=True)
            if judged
        )

    def _referred(self, part: Part) -> Tensor:
        """log π_ref of the judged tokens, [K], by a forward pass of the reference."""
        if self._referee is None:
            self._referee = self._load(self.reference)
        with torch.no_grad():
            return self._referee.score(part.pack).logprobs

    def _minibatch(self, parts: Sequence[Part], bands: Bands, totals: Totals) -> bool:
        """One optimiser step. False: nothing was done, since the first look at π_prox changed which
        sequences count; call again."""
        settings = self.settings
        known = all(part.prox is not None for part in parts)
        keeps = [self._keep(part) for part in parts]
        tokens = int(sum(keep.sum() for keep in keeps))  # the GPU is waited for once, not for each part
        prompts = sum(len(part.pack.samples) for part in parts)
        self.optimizer.zero_grad(set_to_none=True)
        sums: list[losses.Sums] = []
        values: list[Tensor] = []
        for part, keep in zip(parts, keeps, strict=True):
            scores = self.policy.score(part.pack)
            part.show = scores.show.detach()
            if part.prox is None:
                part.prox = scores.logprobs.detach()
            if part.reference is None:  # the weights are the reference's, or nobody asks for the KL
                part.reference = part.prox
            one = losses.policy_loss(
                scores.logprobs,
                part.prox,
                part.behaviour,
                part.reference,
                part.advantage,
                scores.entropy,
                keep,
                settings,
            )
            sums.append(one)
            loss = one.loss / max(1, tokens)
            if settings.show and bands.multiplier:
                # The floor moves the value, not the gradient; `show` reports how far it is.
                loss = loss + losses.show_term(scores.show, prompts, 0.0, bands.multiplier)
            values.append(loss.detach())
            torch.autograd.backward(loss)
        if not known:
            changed = [(self._keep(p) != k).any() for p, k in zip(parts, keeps, strict=True)]
            if bool(torch.stack(changed).any()):
                return False
        value = sum(torch.stack(values).tolist())
        norm = torch.nn.utils.clip_grad_norm_(list(self.parameters.values()), self.train.gradient_clip).item()
        bands.gradient(norm, value)
        self.optimizer.step()
        totals.add("steps", 1)
        totals.add("loss", value)
        totals.add("norm", norm)
        totals.add("vetoed", sum((~keep).sum() for keep in keeps))
        for row in torch.stack([torch.stack([getattr(one, name) for name in SUMS]) for one in sums]).tolist():
            for name, number in zip(SUMS, row, strict=True):
                totals.add(name, number)
        return True

    def _keep(self, part: Part) -> Tensor:
        """Judged tokens whose sequence is not vetoed; all of them while π_prox is unknown."""
        if part.prox is None or self.settings.veto <= 0:
            return torch.ones_like(part.behaviour, dtype=torch.bool)
        return ~losses.vetoed(
            part.prox, part.behaviour, part.pack.sequence, len(part.pack.samples), self.settings.veto
        )

    def _silence(self, show: float, samples: Sequence[Sample], bands: Bands) -> dict[str, float]:
        """The show rate against its floor, which is a share of the first version's on the same prompts.

        The first version is asked only when it can matter: no show rate of it exceeds 1, so a policy that
        shows at least `floor` of the time is above the floor whatever the first version did.
        """
        share = bands.silence.floor
        if share <= 0 or (show >= share and bands.multiplier == 0.0):
            bands.violations = 0
            return {"multiplier": bands.multiplier}
        if self._holdout is None:
            self._holdout = self._load(0)
        prompts = [replace(s, loss_mask=(False,) * len(s.loss_mask)) for s in samples]
        shows = [
            self._score(self._holdout, part).show
            for part in self._parts(prompts, range(len(prompts)), [0.0] * len(prompts))
        ]
        floor = share * torch.cat(shows).mean().item()
        bands.show(show, floor)
        return {"multiplier": bands.multiplier, "show_floor": floor, "violations": float(bands.violations)}

    def _metrics(self, totals: Totals, batch: Sequence[Scored], show: float) -> dict[str, float]:
        tokens = max(1.0, totals.get("tokens"))
        steps = max(1.0, totals.get("steps"))
        rewards = [scored.reward for scored in batch]
        shown = [scored.sample for scored in batch if not scored.sample.silent]
        numbers = {
            "loss": totals.get("loss") / steps,
            "gradient_norm": totals.get("norm") / steps,
            "kl": totals.get("kl_reference") / tokens,
            "kl_behaviour": totals.get("kl_behaviour") / tokens,
            "entropy": totals.get("entropy") / tokens,
            "clip_fraction": totals.get("clipped") / tokens,
            "ess": losses.effective_sample_size(totals.get("weight"), totals.get("weight_squared"), tokens),
            "tokens": totals.get("tokens"),
            "vetoed": totals.get("vetoed"),
            "veto_fraction": totals.get("vetoed") / max(1.0, totals.get("tokens") + totals.get("vetoed")),
            "masked": float(sum(len(s.sample.loss_mask) - sum(s.sample.loss_mask) for s in batch)),
            "reward": sum(rewards) / len(rewards),
            "show": show,
            "silent": 1.0 - len(shown) / len(batch),
        }
        if shown:
            numbers["length"] = sum(len(sample.completion_ids) for sample in shown) / len(shown)
        for name in sorted({part for scored in batch for part in scored.parts}):
            numbers[f"reward/{name}"] = sum(scored.parts.get(name, 0.0) for scored in batch) / len(batch)
        return numbers

    # ----------------------------------------------------------------------------------------- state

    def optimizer_state(self) -> dict[str, Tensor]:
        """Moments by `{parameter}/{moment}`; empty before the first step."""
        tensors: dict[str, Tensor] = {}
        for name, parameter in self.parameters.items():
            for key, value in self.optimizer.state.get(parameter, {}).items():
                tensors[f"{name}/{key}"] = value
        return tensors

    def restore_optimizer(self, tensors: Mapping[str, Tensor]) -> None:
        """Take moments over; those of parameters that do not exist or have another shape are an error
        of the caller (KeyError)."""
        for key, tensor in tensors.items():
            name, _, moment = key.rpartition("/")
            parameter = self.parameters[name]
            device = parameter.device
            self.optimizer.state[parameter][moment] = tensor.to(device)
