"""The last worker of a run: turns scored samples into versions.

What makes a kill at any instant harmless is the order of writing:

1. claims carry the number of their batch (`receive`);
2. a checkpoint says after which batch the weights stood so; on resume the claims beyond it are given back;
3. a version is made only of weights that a checkpoint holds, and names their batch as its `step`. If the
   run dies between the two, the resumed run finds a checkpoint that owes a version, and makes it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from onlinerl import config
from onlinerl.errors import Conflict, GuardTripped, ModelError, RunError
from onlinerl.experiments.assignment import EXPLORE
from onlinerl.flow.channel import Channel
from onlinerl.flow.worker import Worker
from onlinerl.learning import adapters, cleaning
from onlinerl.learning.advantages import Baseline
from onlinerl.learning.batches import PolicyModel, Scorer, Sibling
from onlinerl.learning.checkpoints import Checkpoint, Checkpoints
from onlinerl.learning.control import Control
from onlinerl.learning.devices import device_of, dtype_of
from onlinerl.learning.guards import Bands, dominance
from onlinerl.learning.learner import INSPECTED, Learner
from onlinerl.learning.log import RunLog
from onlinerl.learning.receive import Census, clean, lineage, newest
from onlinerl.learning.rewards import RewardTable
from onlinerl.learning.rounding import changed, unchanged
from onlinerl.learning.update import update
from onlinerl.records import Batch, RunState, Sample, Scored, Verdict, Version, VersionState
from onlinerl.store import interactions, runs, versions
from onlinerl.weights import directory

HELD = 64
"""Held-back samples on which a version's reward is estimated: the newest."""
TRUSTWORTHY = 0.1
"""ESS / n under which the held-back estimate counts neither as a rise nor as none."""
_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class Trainer(Worker[Scored, None]):
    """Trains until its input ends, someone asks it to stop, a band breaks, or the reward stops rising."""

    def __init__(
        self,
        control: Control,
        settings: config.Settings,
        policy: str,
        table: RewardTable,
        log: RunLog,
        *,
        threads: int,
    ) -> None:
        self.control = control
        self.run_record = control.run
        self.root = settings.weights_url
        self.policy = policy
        self.settings = settings.policies[policy]
        self.train = self.settings.train
        self.table = table
        self.log = log
        self.threads = threads
        self.checkpoints = checkpoints_of(settings, control.run.id)
        self._all = settings
        self.batch = 0
        """Batches trained on."""
        self.version = control.run.parent
        """The newest version of the run, or its parent."""
        self.version_batch = 0
        """The batch after which it was made."""
        self.baseline = Baseline(self.train.baseline_decay)
        self.bands = Bands(self.train.guards, self.train.silence)
        self._census = Census(policy, self.settings.trust)
        self.samples = 0
        self.first_at: float | None = None
        self.last_at: float | None = None
        self.best: float | None = None
        self.misses = 0
        self.message = ""
        self.learner: Learner
        self.base: int | None = None
        """Under LoRA the version whose weights are frozen; every version of the run is it and an adapter."""
        self._recent: list[Sample] = []
        self._owed = False

    # ---------------------------------------------------------------------------------------- set-up

    def prepare(self, checkpoint: Checkpoint | None) -> None:
        """Load the weights and become what `checkpoint` says (None: begin at the run's parent).

        Raises ModelError, WeightsError, RunError.
        """
        torch.set_num_threads(self.threads)
        self.learner = Learner(
            self._begin(self.version),
            self.train,
            reference=self.run_record.parent,
            load=self._other,
        )
        self._names = self._stored_names()
        if checkpoint is not None:
            self._restore(checkpoint)
        elif self.version_batch:
            self.learner.moved = True  # the checkpoint is lost: go on from the run's last version
            self.batch = self.version_batch
        else:
            self._inherit()

    def _model(self, version: int, lora: config.Lora | None = None) -> PolicyModel:
        device = device_of(self.train)
        folder = directory.folder(self.root, self.policy, version)
        made = PolicyModel.load(
            folder, device, dtype_of(self.train, device), lora, self.train.seed, compile=self.train.compile
        )
        for text in made.fallbacks:
            self.log.event("warning", batch=self.batch, text=f"{self.policy}@{version}: {text}")
        return made

    def _begin(self, version: int) -> PolicyModel:
        """The model to train, being what `version` is.

        Under LoRA a version that is an adapter on an earlier one goes on as that, so that however many runs
        there were a version is one adapter on one base: the policy's first version, or the last one that was
        trained in full. Where that cannot be, the version itself becomes the base of a new adapter.
        """
        lora = self.train.lora
        if not lora.rank:
            return self._model(version)
        found = self._adapter(version)
        if found is not None:
            self.base, saved = found
            policy = self._model(self.base, lora)
            assert policy.adapter is not None
            if policy.adapter.fits(saved):
                policy.adapter.load(saved.tensors)
                return policy
        if self._manifest(version).adapter_base is not None:
            name = f"{self.policy}@{version}"
            self.log.event(
                "warning",
                batch=self.batch,
                text=f"the adapter of {name} has another rank, alpha or other targets than train.lora, or "
                f"what it was put on is gone: a new one begins on {name}",
            )
        self.base = version
        return self._model(version, lora)

    def _adapter(self, version: int) -> tuple[int, adapters.Saved] | None:
        """The version that a version's adapter is relative to, and the adapter; None: it has none, or what it
        is relative to is gone."""
        place = directory.folder(self.root, self.policy, version)
        base = self._manifest(version).adapter_base
        if base is None or not (directory.folder(self.root, self.policy, base) / directory.MANIFEST).exists():
            return None
        return base, adapters.read(place / directory.ADAPTER)

    def _manifest(self, version: int) -> directory.Manifest:
        return directory.read_manifest(str(directory.folder(self.root, self.policy, version)))

    def _other(self, version: int) -> Scorer:
        """A version to compare with: on the weights in memory where they are its base, else loaded."""
        policy = self.learner.policy
        if policy.adapter is not None:
            if version == self.base:
                return Sibling(policy, None)
            found = self._adapter(version)
            if found is not None and found[0] == self.base and policy.adapter.fits(found[1]):
                return Sibling(policy, found[1].tensors)
        return self._model(version)

    def resume_at(self, version: Version) -> None:
        """Before `prepare`: begin at a version that the run made, for want of a checkpoint."""
        self.version, self.version_batch = version.id, version.step

    def _inherit(self) -> None:
        """Take the previous run's optimiser, fp32 weights and baseline over, if its last version is the one
        that this run starts from."""
        with self.control.database.read() as c:
            parent = versions.get(c, self.policy, self.run_record.parent)
            if parent.run is None or newest(c, self.policy, parent.run, parent.id).id != parent.id:
                return
        try:
            previous = checkpoints_of(self._all, parent.run).read(parent.step)
            if previous.state["version"] != parent.id:
                return
            weights = previous.weights()
            own = self.learner.parameters
            # bf16 holds a step of 2e-6 only now and then: the fp32 weights carry what it lost. They are
            # taken only where they are the live version, to the bit, once rounded.
            if any(
                not torch.equal(
                    weights[name].to(self._names.get(name, torch.float32)).float(), p.detach().cpu()
                )
                for name, p in own.items()
            ):
                return
            self.learner.restore_optimizer(previous.optimizer())
            self._load(weights)
            self.baseline.restore(previous.state["baseline"])
            self.bands.multiplier = previous.state["bands"]["multiplier"]
        except (RunError, KeyError):
            return  # collected, or of another shape: the run begins without
        self.log.event("inherited", run=parent.run, version=parent.id)

    def _restore(self, checkpoint: Checkpoint) -> None:
        state = checkpoint.state
        if state.get("adapter") != self._adapted():
            raise RunError(
                f"the checkpoint {checkpoint.folder} was made with other settings of train.lora: "
                f"{state.get('adapter')} then, {self._adapted()} now. The next run begins without it"
            )
        try:
            self._load(checkpoint.weights())
            self.learner.restore_optimizer(checkpoint.optimizer())
            self.baseline.restore(state["baseline"])
            self.bands.restore(state["bands"])
            self.batch = checkpoint.batch
            self.version, self.version_batch = state["version"], state["version_batch"]
            self.samples = state["samples"]
            self.first_at, self.last_at = state["first_at"], state["last_at"]
            self.best, self.misses = state["best"], state["misses"]
            self.learner.rebase(state["reference"], moved=state["moved"])
            self.learner.trusted = state["trusted"]
            self._owed = state["owed"]
            self.message = state["message"]
        except KeyError as error:
            raise RunError(
                f"the checkpoint {checkpoint.folder} does not fit this model, or not these "
                f"train.lora.targets: no {error}. The next run begins without it"
            ) from None
        if self._owed:
            with self.control.database.read() as c:
                last = newest(c, self.policy, self.run_record.id, self.run_record.parent)
            if last.run == self.run_record.id and last.step == self.batch:
                self._owed, self.version, self.version_batch = False, last.id, last.step

    def _load(self, weights: Mapping[str, Tensor]) -> None:
        own = self.learner.parameters
        for name in own.keys() ^ weights.keys():
            raise KeyError(name)
        with torch.no_grad():
            for name, parameter in own.items():
                parameter.copy_(weights[name])

    def _adapted(self) -> dict[str, Any] | None:
        """What an adapter's numbers mean nothing without."""
        lora = self.train.lora
        return {"base": self.base, "rank": lora.rank, "alpha": lora.alpha} if lora.rank else None

    def _stored_names(self) -> dict[str, torch.dtype]:
        """Tensors of a version of this model and their number formats: those of the parent."""
        manifest = self._manifest(self.run_record.parent)
        have = self.learner.policy.state()
        for name, entry in manifest.tensors.items():
            if name not in have or tuple(have[name].shape) != entry.shape or entry.dtype not in _DTYPES:
                raise ModelError(
                    f"tensor {name} ({entry.dtype}) of the model is not one that the trainer can write back: "
                    "this model's format cannot be trained"
                )
        return {name: _DTYPES[entry.dtype] for name, entry in manifest.tensors.items()}

    # ----------------------------------------------------------------------------------------- working

    def run(self, input: Channel[Scored] | None, output: Channel[None] | None) -> None:
        """See the class. `message` says afterwards why it ended."""
        assert input is not None
        torch.set_num_threads(self.threads)  # OpenMP's count belongs to the thread
        if self._owed:
            self._version()
        while not self.message and not self.control.stopping:
            batch = self._next(input)
            if batch is None:
                break
            dominated = self._dominated(batch)
            if dominated and not self.batch:
                raise GuardTripped(dominated)
            if dominated:
                # What was learned before stands; what is left of one user goes back, and waits for others.
                self.message = dominated
                break
            self._step(batch)
            due = self.batch % self.train.version_every == 0
            if due or self.batch % self.train.checkpoint_every == 0:
                self._checkpoint(owed=due)
            if due:
                self._version()
        self.control.check()
        if self.batch > self.version_batch and self._welcome():
            self._checkpoint(owed=True)
            self._version()

    def _next(self, input: Channel[Scored]) -> Batch | None:
        """The next batch: full, or the last one of a run that does not follow. None: no more."""
        number = self.batch + 1
        samples: list[Scored] = []
        while len(samples) < self.train.batch:
            self._pause()
            if self.control.stopping:
                return None
            more = input.take(self.train.batch - len(samples), timeout=0.2)
            samples += more
            if not more and input.closed:
                break
        if not samples or self.control.stopping:
            return None
        strays = {scored.sample.batch for scored in samples} - {number}
        if strays:
            raise AssertionError(f"batch {number} got samples claimed for {sorted(strays)}")
        return Batch(number, tuple(samples))

    def _dominated(self, batch: Batch) -> str:
        """Why one user has too much of a batch; "" where nobody has, or may have all of it."""
        trust = self.settings.trust
        if trust.owner:
            return ""
        with self.control.database.read() as c:
            crowd = self._census.active(c, time.time()) >= trust.crowd
        return "" if crowd else dominance([one.sample.user for one in batch.samples], trust.dominance)

    def _step(self, batch: Batch) -> None:
        self.bands.rewards(batch.samples)
        faulty = [(one.sample.id, one.sample.index) for one in batch.samples if one.fault]
        if faulty:
            with self.control.write() as c:
                interactions.drop(c, faulty, reason="reward", run=self.run_record.id, now=time.time())
        usable = [scored for scored in batch.samples if not scored.fault and _usable(scored.sample)]
        with self.control.database.read() as c:
            chain = lineage(c, versions.get(c, self.policy, self.version))
            counts = interactions.counts(c, policy=self.policy)
            live = versions.live(c, self.policy)
            dropped = interactions.dropped(c, policy=self.policy, run=self.run_record.id)
        if live.run == self.run_record.id and live.id != self.learner.reference:
            self.learner.rebase(live.id, moved=self.batch != live.step)
        began = time.perf_counter()
        numbers: dict[str, float] = {}
        if usable:
            numbers = update(
                self.learner,
                usable,
                batch.number,
                baseline=self.baseline,
                table=self.table,
                bands=self.bands,
                staleness=[sum(id > scored.sample.version for id in chain) for scored in usable],
                silent_expected=counts.silent > 0,
            )
            numbers["seconds"] = time.perf_counter() - began
            numbers |= _shares([scored.sample for scored in usable])
        numbers["samples"] = float(len(usable))
        numbers["unusable"] = float(len(batch.samples) - len(faulty) - len(usable))
        numbers |= {f"dropped/{reason}": float(count) for reason, count in dropped.items()}
        self._keep(batch.number, numbers, usable)
        self.batch = batch.number
        self.control.step = self.batch
        self.samples += len(usable)
        for scored in usable:
            at = scored.sample.at
            self.first_at = at if self.first_at is None else min(self.first_at, at)
            self.last_at = at if self.last_at is None else max(self.last_at, at)
        self._recent = [scored.sample for scored in usable[:INSPECTED]] or self._recent
        ids = [f"{scored.sample.id}/{scored.sample.index}" for scored in batch.samples]
        self.log.step(self.batch, numbers, ids)
        if numbers.get("ess", 1.0) < self.train.guards.ess:
            self.log.event(
                "warning", batch=self.batch, text=f"effective sample size {numbers['ess']:.2f} per token"
            )

    def _keep(self, batch: int, numbers: Mapping[str, float], trained: list[Scored]) -> None:
        """Tell the store what the batch measured and what each sample was worth. Raises RunBusy."""
        now = time.time()
        with self.control.write() as c:
            runs.heartbeat(c, self.run_record, step=batch, now=now)
            runs.add_step(c, run=self.run_record.id, batch=batch, at=now, numbers=numbers)
            rewards = [(one.sample.id, one.sample.index, one.reward, one.parts) for one in trained]
            interactions.keep_rewards(c, rewards)

    def _pause(self) -> None:
        if not self.control.paused:
            return
        self._move(RunState.PAUSED)
        self.log.event("pause", batch=self.batch)
        while self.control.paused:
            self.control.sleep(0.1)
        if not self.control.stopping:
            self._move(RunState.RUNNING)
            self.log.event("unpause", batch=self.batch)

    def _move(self, to: RunState) -> None:
        with self.control.write() as c:
            runs.move(c, self.run_record, to)

    def _checkpoint(self, *, owed: bool) -> None:
        self.control.check()
        self._owed = owed
        self.checkpoints.save(
            self.batch,
            self._weights(),
            self.learner.optimizer_state(),
            self._state(),
            pinned=self.version_batch,
        )

    def _weights(self) -> dict[str, Tensor]:
        return {name: parameter.detach() for name, parameter in self.learner.parameters.items()}

    def _state(self) -> dict[str, Any]:
        return {
            "run": self.run_record.id,
            "version": self.version,
            "version_batch": self.version_batch,
            "baseline": self.baseline.state(),
            "bands": self.bands.state(),
            "samples": self.samples,
            "first_at": self.first_at,
            "last_at": self.last_at,
            "best": self.best,
            "misses": self.misses,
            "reference": self.learner.reference,
            "moved": self.learner.moved,
            "trusted": self.learner.trusted,
            "owed": self._owed,
            "adapter": self._adapted(),
            "message": self.message,
        }

    # ---------------------------------------------------------------------------------------- versions

    def _welcome(self) -> bool:
        """Whether a version of this run may still be made: not after a rollback behind one of its own, nor
        after something else went live."""
        with self.control.database.read() as c:
            live = versions.live(c, self.policy)
            own = [version for version in versions.list_(c, self.policy) if version.run == self.run_record.id]
        if live.id != self.run_record.parent and live.run != self.run_record.id:
            return False
        taken_back = (VersionState.RETIRED, VersionState.REJECTED)
        return not any(version.state in taken_back and version.id > live.id for version in own)

    def _version(self) -> None:
        """Make and register a version of the weights that the last checkpoint holds."""
        metrics = self._judge()
        weights = self._served()
        metrics["changed"] = self._changed(weights)
        with self.control.write() as c:
            id = versions.next_id(c, self.policy)
        made = directory.write_version(
            self.root,
            self.policy,
            id,
            fill=partial(self._fill, weights),
            parent=self.version,
            run=self.run_record.id,
            data=directory.DataRange(self.first_at, self.last_at, self.samples, self.batch),
            settings={"tau": self.table.tau, **self.settings.model_dump(mode="json")},
            metrics=metrics,
            adapter_base=self.base,
        )
        made = replace(made, step=self.batch)
        try:
            with self.control.write() as c:
                versions.register(c, made)
        except Conflict as error:
            # One of the run's versions was rejected meanwhile: nothing more may come of it.
            self.control.stop(str(error))
            return
        parent, self.version, self.version_batch, self._owed = self.version, id, self.batch, False
        self.log.event("version", batch=self.batch, version=id, **metrics)
        if not metrics["changed"]:
            names = (f"{self.policy}@{id}", f"{self.policy}@{parent}")
            rate = "train.lora.lr" if self.train.lora.rank else "train.lr"
            self.log.event("warning", batch=self.batch, text=unchanged(*names, self._names.values(), rate))
        self.log.scalars(self.batch, {f"version/{name}": value for name, value in metrics.items()})
        # With the version's name in it the checkpoint is what the next run inherits from.
        self.checkpoints.amend(self.batch, self._state())

    def _judge(self) -> dict[str, float]:
        """Numbers of the weights as they are, before they become a version. Raises GuardTripped."""
        metrics: dict[str, float] = {}
        if self._recent:
            metrics |= self.learner.inspect(self._recent, self.bands)
        if self.train.patience and self.train.holdout:
            held = [sample for sample in self._held() if _usable(sample)]
            scored = [one for one in map(self.table.score, held) if not one.fault]
            if scored:
                value, ess = self.learner.reward(scored)
                metrics |= {"held_reward": value, "held_ess": ess, "held_samples": float(len(scored))}
                self._watch(value, ess)
        return metrics

    def _held(self) -> list[Sample]:
        """The newest samples of the held-back share. What is not worth learning from measures nothing either:
        it is dropped, and older ones take its place."""
        while True:
            with self.control.database.read() as c:
                newest_ones = interactions.held(c, policy=self.policy, limit=HELD)
            recent = cleaning.Recent(self.settings.cleaning)
            kept = clean(self.control, self.policy, self.settings, newest_ones[::-1], recent)
            if len(kept) == len(newest_ones):
                return kept

    def _watch(self, value: float, ess: float) -> None:
        if ess < TRUSTWORTHY:
            return
        if self.best is None or value > self.best:
            self.best, self.misses = value, 0
            return
        self.misses += 1
        if self.misses >= self.train.patience:
            self.message = (
                f"the held-back reward did not rise in {self.misses} versions (best {self.best:.3f}, "
                f"now {value:.3f})"
            )

    def _served(self) -> dict[str, Tensor]:
        """The weights as they are now, as a version has them: merged, in the parent's number formats."""
        policy = self.learner.policy
        have = policy.state()
        return {
            name: policy.merge(name, have[name]).detach().to("cpu", dtype).contiguous()
            for name, dtype in self._names.items()
        }

    def _changed(self, weights: Mapping[str, Tensor]) -> float:
        """Share of served weights that are not what they were in the version before."""
        place = directory.folder(self.root, self.policy, self.version)
        entries = self._manifest(self.version).tensors
        return changed(weights, {name: place / entries[name].file for name in weights})

    def _fill(self, weights: dict[str, Tensor], folder: Path) -> None:
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        adapter = self.learner.policy.adapter
        if adapter is not None:
            adapter.save(folder / directory.ADAPTER, base=f"{self.policy}@{self.base}")

    def forget(self) -> None:
        """After the end: keep the checkpoint that the next run may inherit, and nothing else; of older runs
        of this policy keep only that of the live version."""
        self.checkpoints.prune(self.version_batch, keep=0)
        with self.control.database.read() as c:
            live = versions.live(c, self.policy)
            older = [run for run in runs.list_(c, self.policy) if run.id < self.run_record.id]
        for run in older:
            checkpoints_of(self._all, run.id).prune(live.step if live.run == run.id else None, keep=0)


def _usable(sample: Sample) -> bool:
    """Has a token that was judged, and numbers that are numbers."""
    return any(sample.loss_mask) and all(map(math.isfinite, sample.behavior_logprobs))


def _shares(samples: list[Sample]) -> dict[str, float]:
    """What a batch is made of, in shares: accepted of the shown (if any), explored of all."""
    shown = [sample for sample in samples if not sample.silent]
    shares = {"explored": sum(sample.arm == EXPLORE for sample in samples) / len(samples)}
    if shown:
        shares["accepted"] = sum(sample.verdict is Verdict.ACCEPTED for sample in shown) / len(shown)
    return shares


def run_folder(settings: config.Settings, run: int) -> Path:
    """Where a run keeps its log and checkpoints."""
    return settings.home / "runs" / str(run)


def checkpoints_of(settings: config.Settings, run: int) -> Checkpoints:
    """A run's checkpoints."""
    return Checkpoints(run_folder(settings, run) / "checkpoints")


__all__ = ["Trainer", "checkpoints_of", "run_folder"]
