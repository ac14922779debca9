"""LoRA: what is trained, what versions are made of, what goes on where; against peft and plain models."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from torch import Tensor

from onlinerl.config import Lora, Settings, load_settings
from onlinerl.engines.embedded import EmbeddedEngine
from onlinerl.errors import EngineError, ModelError, RunError, WeightsError
from onlinerl.learning import adapters, layers
from onlinerl.learning import run as running
from onlinerl.learning.batches import PolicyModel, Sibling, pack
from onlinerl.learning.learner import Learner
from onlinerl.learning.run import train
from onlinerl.learning.trainer import Trainer, checkpoints_of
from onlinerl.records import Generation, RunState, Version
from onlinerl.store import versions
from onlinerl.store.database import Database
from onlinerl.weights import directory
from tests.replicas import plain, reference, replica, tokens_of
from tests.synthetic import fill, load, tiny_model
from tests.test_batches import CPU, build, draw
from tests.test_speed import assert_same, counting, gradients
from tests.test_trainer import events, list_versions, release_lease, share_even, trained

# peft's own wrapper, which only these tests use, asks transformers in an old way.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")

FP32 = torch.float32
LORA = Lora(rank=4, alpha=8)
FAST = (
    "policies.tab.train.lora.rank=4",
    "policies.tab.train.lora.lr=1e-2",
    "policies.tab.train.threads=1",
    "policies.tab.train.guards.kl=5",
    "policies.tab.train.batch=16",
    "policies.tab.train.version_every=4",
    "policies.tab.train.checkpoint_every=2",
    "policies.tab.train.patience=0",
)


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def disturb(policy: PolicyModel, seed: int = 0) -> dict[str, Tensor]:
    """Give the adapter arbitrary numbers; returns them."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in policy.parameters().values():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return {name: parameter.detach().clone() for name, parameter in policy.parameters().items()}


def scores(policy: PolicyModel | Sibling) -> Tensor:
    return policy.score(pack(draw(9), list(range(9)), CPU, padded=False)).logprobs


# ------------------------------------------------------------------------------------ in a model


@pytest.fixture(params=["qwen2", "llama"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return build(request.param, tmp_path / "model")


def test_a_new_adapter_changes_nothing_and_alone_is_trained(folder: Path) -> None:
    policy = PolicyModel.load(folder, CPU, FP32, LORA, seed=3)
    assert not policy.padded, "the packed layout works through peft's layers"
    base = PolicyModel.load(folder, CPU, FP32)
    assert torch.equal(scores(policy), scores(base))
    own = policy.parameters()
    assert len(own) == 2 * 7 * 3, "two matrices for each of seven linear layers in three blocks"
    assert {name.split(".")[-2] for name in own} == {"lora_A", "lora_B"}
    assert {p.dtype for p in own.values()} == {FP32}
    torch.autograd.backward(scores(policy).sum())
    trained = {id(p) for p in own.values()}
    assert {id(p) for p in policy.model.parameters() if p.grad is not None} == trained
    again = PolicyModel.load(folder, CPU, FP32, LORA, seed=3).parameters()
    other = PolicyModel.load(folder, CPU, FP32, LORA, seed=4).parameters()
    assert all(torch.equal(again[name], p) for name, p in own.items())
    assert any(not torch.equal(other[name], p) for name, p in own.items())


def test_merged_weights_are_the_model_and_leave_it_alone(folder: Path) -> None:
    policy = PolicyModel.load(folder, CPU, FP32, LORA)
    kept = disturb(policy)
    before = scores(policy)
    merged = policy.weights()
    assert torch.equal(scores(policy), before)
    assert all(torch.equal(p, kept[name]) for name, p in policy.parameters().items())
    base = PolicyModel.load(folder, CPU, FP32)
    theirs = base.model.state_dict()
    assert merged.keys() == theirs.keys() == base.weights().keys(), "the names of the model's files"
    changed = {name for name in merged if not torch.equal(merged[name], theirs[name])}
    assert changed == {name for name in theirs if name.endswith("_proj.weight")}
    base.model.load_state_dict(merged)
    assert torch.allclose(scores(base), before, atol=1e-5)
    assert (before - scores(PolicyModel.load(folder, CPU, FP32))).abs().max() > 0.1, "the test shows nothing"


def test_siblings_are_other_versions_on_the_same_weights(folder: Path) -> None:
    policy = PolicyModel.load(folder, CPU, FP32, LORA)
    other = disturb(policy, seed=1)
    as_other = scores(policy)
    disturb(policy, seed=2)
    own = scores(policy)
    assert torch.equal(scores(Sibling(policy, other)), as_other)
    assert torch.equal(scores(Sibling(policy, None)), scores(PolicyModel.load(folder, CPU, FP32)))
    assert torch.equal(scores(policy), own)
    assert not scores(Sibling(policy, None)).requires_grad
    torch.autograd.backward(scores(policy).sum())
    assert all(p.grad is not None for p in policy.parameters().values()), "it is trained as before"


@pytest.mark.slow  # the tracer takes half a minute for peft's layers
@pytest.mark.filterwarnings("ignore:The .grad attribute")  # torch's tracer looks at it
def test_compiled_and_recomputed_layers_see_whichever_adapter_is_held(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = build("qwen2", tmp_path)
    programs: list[Any] = []
    monkeypatch.setattr(layers, "BACKEND", counting(programs))
    fast = PolicyModel.load(folder, CPU, FP32, LORA, compile=True)
    assert fast.layers.compiled, fast.fallbacks
    fast.recompute(True)
    plain = PolicyModel.load(folder, CPU, FP32, LORA)
    other = disturb(plain, seed=1)
    counts: list[int] = []
    for seed in (2, 3):  # the second time with the programs of the first
        for policy in (fast, plain):
            disturb(policy, seed)
        assert_same(gradients(fast), gradients(plain))
        for held in (other, None):
            expected = scores(Sibling(plain, held))
            assert torch.allclose(scores(Sibling(fast, held)), expected, atol=1e-5)
        counts.append(len(programs))
    assert counts[0] == counts[1]


def test_frozen_matrices_are_kept_small_where_nothing_is_lost(tmp_path: Path) -> None:
    folder = tiny_model(tmp_path / "model")  # bfloat16
    policy = PolicyModel.load(folder, CPU, torch.bfloat16, LORA)
    disturb(policy)
    state = policy.state()
    matrices = {name for name in state if name.endswith("_proj.weight")}
    assert {name for name, tensor in state.items() if tensor.dtype == torch.bfloat16} == matrices
    wide = PolicyModel.load(folder, CPU, FP32, LORA)
    disturb(wide)
    expected = wide.weights()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in policy.weights().items())
    samples = [
        replace(s, prompt_ids=(5, 6, 7), completion_ids=tuple(t % 64 for t in s.completion_ids))
        for s in draw(9)
    ]
    made = pack(samples, list(range(9)), CPU, padded=False)
    assert torch.allclose(policy.score(made).logprobs, wide.score(made).logprobs, atol=0.3)
    exact = build("qwen2", tmp_path / "exact")  # float32: rounding would lose something
    kept = PolicyModel.load(exact, CPU, torch.bfloat16, LORA).state()
    assert {tensor.dtype for tensor in kept.values()} == {FP32}


def test_targets(folder: Path) -> None:
    policy = PolicyModel.load(folder, CPU, FP32, Lora(rank=2, targets=("q_proj", "v_proj")))
    assert {name.split(".")[-3] for name in policy.parameters()} == {"q_proj", "v_proj"}
    for wrong, said in (
        ("lm_head", "no linear layer below its head"),
        ("embed_tokens", "no linear layer below its head"),
        ("self_attn", "no linear layer below its head"),
        ("query", "has no module 'query'"),
    ):
        with pytest.raises(ModelError, match=said):
            PolicyModel.load(folder, CPU, FP32, Lora(rank=2, targets=("q_proj", wrong)))


def test_what_fits(folder: Path, tmp_path: Path) -> None:
    policy = PolicyModel.load(folder, CPU, FP32, LORA)
    assert policy.adapter is not None
    kept = disturb(policy)
    policy.adapter.save(tmp_path / "adapter", "tab@0")
    saved = adapters.read(tmp_path / "adapter")
    assert saved.tensors.keys() == kept.keys()
    assert all(torch.equal(saved.tensors[name], kept[name]) for name in kept)
    for lora, fits in (
        (LORA, True),
        (LORA.model_copy(update={"lr": 1.0}), True),
        (LORA.model_copy(update={"alpha": 9}), False),
        (LORA.model_copy(update={"rank": 5}), False),
        (LORA.model_copy(update={"targets": ("q_proj",)}), False),
    ):
        adapter = PolicyModel.load(folder, CPU, FP32, lora).adapter
        assert adapter is not None
        assert adapter.fits(saved) is fits
    (tmp_path / "adapter" / adapters.WEIGHTS).write_bytes(b"x")
    with pytest.raises(WeightsError, match="cannot be read"):
        adapters.read(tmp_path / "adapter")


# ------------------------------------------------------------------------------------ in a version


def write_with_adapter(root: str, source: Path, id: int, base: int | None, *files: str) -> Version:
    def put(folder: Path) -> None:
        shutil.copy(source / "model.safetensors", folder)
        for name in files:
            (folder / "adapter").mkdir(exist_ok=True)
            shutil.copy(source / ("model.safetensors" if "safe" in name else "config.json"), folder / name)

    return directory.write_version(
        root, "tab", id, fill=put, parent=0, run=1, data=directory.DataRange(), settings={}, metrics={},
        adapter_base=base,
    )  # fmt: skip


BOTH = ("adapter/adapter_config.json", "adapter/adapter_model.safetensors")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"), FP32)


@pytest.fixture
def root(model: Path, tmp_path: Path) -> str:
    directory.import_base(str(tmp_path / "weights"), "tab", model)
    return str(tmp_path / "weights")


def test_a_manifest_covers_the_adapter(root: str, model: Path) -> None:
    version = write_with_adapter(root, model, 1, 0, *BOTH)
    manifest = directory.read_manifest(version.url)
    assert manifest.adapter_base == 0
    assert set(BOTH) <= manifest.files.keys()
    assert all(entry.file == "model.safetensors" for entry in manifest.tensors.values())
    directory.verify(version.url, version.digest)
    stranger = Path(version.url) / "adapter" / "more.bin"
    stranger.write_bytes(b"")
    with pytest.raises(WeightsError, match="does not belong to the version"):
        directory.verify(version.url)
    stranger.unlink()
    (Path(version.url) / BOTH[0]).write_bytes(b"x" * manifest.files[BOTH[0]].size)
    with pytest.raises(WeightsError, match=r"adapter_config\.json was changed"):
        directory.verify(version.url)
    (Path(version.url) / BOTH[0]).unlink()
    with pytest.raises(WeightsError, match=r"adapter_config\.json is missing"):
        directory.verify(version.url)


@pytest.mark.parametrize(
    ("base", "files"),
    [(None, BOTH), (0, ()), (0, BOTH[:1]), (0, (*BOTH, "adapter/more.json")), (0, (*BOTH, "other.json"))],
)
def test_half_an_adapter_makes_no_version(
    root: str, model: Path, base: int | None, files: tuple[str, ...]
) -> None:
    with pytest.raises(WeightsError, match=r"the adapter of .* should have|safetensors files only"):
        write_with_adapter(root, model, 1, base, *files)
    assert [place.name for place in (Path(root) / "tab").iterdir()] == ["000000"]


def test_gc_keeps_what_an_adapter_is_relative_to(root: str, model: Path) -> None:
    write_with_adapter(root, model, 1, None)
    write_with_adapter(root, model, 2, 1, *BOTH)
    assert directory.gc(root, "tab", {0, 2}, registered={1}) == []
    (removed,) = directory.gc(root, "tab", {0, 1}, registered={2})
    assert removed.folder.endswith("000002")
    assert removed.bytes > 2 * (model / "model.safetensors").stat().st_size
    (removed,) = directory.gc(root, "tab", {0}, registered={1})
    assert removed.folder.endswith("000001")


# ---------------------------------------------------------------------------------------- in runs


def settings_for(model: Path, home: Path, *overrides: str) -> Settings:
    return load_settings(overrides=[f"policies.tab.model={model}", *FAST, *overrides], home=home)


@pytest.fixture
def settings(model: Path, tmp_path: Path) -> Settings:
    return settings_for(model, tmp_path / "home")


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the version folders that whole models were loaded from."""
    seen: list[str] = []
    plain = PolicyModel.load.__func__  # type: ignore[attr-defined]

    def spy(cls: type[PolicyModel], folder: Path, *rest: Any, **named: Any) -> PolicyModel:
        seen.append(folder.name)
        made: PolicyModel = plain(cls, folder, *rest, **named)
        return made

    monkeypatch.setattr(PolicyModel, "load", classmethod(spy))
    return seen


def promote(settings: Settings, version: int | None) -> None:
    """Make a version live; None: roll back."""
    database = Database.open(settings.database_url)
    try:
        with database.write() as c:
            if version is None:
                versions.rollback(c, "tab", actor="test")
            else:
                versions.promote(c, "tab", version, actor="test")
    finally:
        database.close()


def adapter_of(version: Version) -> dict[str, Tensor]:
    return dict(adapters.read(Path(version.url) / "adapter").tensors)


def weights_of(version: Version) -> dict[str, Tensor]:
    return load_file(Path(version.url) / "model.safetensors")


def check(settings: Settings, version: Version, base: int = 0) -> None:
    """The version is its base with its adapter on, as peft itself puts it there."""
    directory.verify(version.url, version.digest)
    assert directory.read_manifest(version.url).adapter_base == base
    model = load(directory.folder(settings.weights_url, "tab", base))
    adapted = PeftModel.from_pretrained(model, Path(version.url) / "adapter")
    ids = torch.arange(4, 24)[None]
    with torch.no_grad():
        theirs, ours = adapted(input_ids=ids).logits, load(Path(version.url))(input_ids=ids).logits
        with adapted.disable_adapter():
            moved = (adapted(input_ids=ids).logits - theirs).abs().max()
    assert torch.allclose(theirs, ours, atol=1e-5)
    assert moved > 0.01, "the adapter does nothing: the test shows nothing"


def test_a_run_learns_a_taste_with_an_adapter_and_loads_no_second_model(
    model: Path, tmp_path: Path, loads: list[str]
) -> None:
    settings = settings_for(
        model, tmp_path / "home", "policies.tab.train.lora.rank=16", "policies.tab.train.lora.lr=3e-2",
        "policies.tab.train.staleness=9",
    )  # fmt: skip
    fill(settings, 500)
    ended = train(settings, "tab")
    assert ended.state is RunState.FINISHED
    assert loads == ["000000"], (
        "the KL's reference and the show rate's are the same model without the adapter"
    )
    assert any(step["kl"] > 0 for step in events(settings, kind="step"))
    made = list_versions(settings)
    check(settings, made[1])
    check(settings, made[-1])
    # four standard errors of a difference of two shares of 1,000 draws are 0.09
    assert share_even(made[-1].url) > share_even(made[0].url) + 0.12
    checkpoint = checkpoints_of(settings, 1).latest()
    assert checkpoint is not None
    kept = checkpoint.weights()
    assert kept.keys() == adapter_of(made[-1]).keys()
    assert all(torch.equal(tensor, kept[name]) for name, tensor in adapter_of(made[-1]).items())
    assert {name.rpartition("/")[0] for name in checkpoint.optimizer()} == kept.keys()


def test_weights_are_rounded_to_the_parents_format_and_the_adapter_is_not(tmp_path: Path) -> None:
    settings = settings_for(tiny_model(tmp_path / "bf16"), tmp_path / "home")
    fill(settings, 64)
    train(settings, "tab")
    base, last = list_versions(settings)
    assert {entry.dtype for entry in directory.read_manifest(last.url).tensors.values()} == {"BF16"}
    adapter, before, after = adapter_of(last), weights_of(base), weights_of(last)
    assert {tensor.dtype for tensor in adapter.values()} == {FP32}
    for name, tensor in before.items():
        stem = f"base_model.model.{name.removesuffix('.weight')}"
        if f"{stem}.lora_A.weight" in adapter:
            change = adapter[f"{stem}.lora_B.weight"] @ adapter[f"{stem}.lora_A.weight"] * (32 / 4)
            tensor = (tensor.float() + change).to(torch.bfloat16)
        assert torch.equal(after[name], tensor), name


def test_an_adapter_that_rounding_swallows_is_told(tmp_path: Path) -> None:
    """The adapter moved, and the served weights are those of the base, to the bit."""
    settings = settings_for(
        tiny_model(tmp_path / "bf16"), tmp_path / "home", "policies.tab.train.lora.lr=1e-12"
    )
    fill(settings, 40)
    train(settings, "tab", max_steps=2)
    base, last = list_versions(settings)
    assert any(bool(tensor.any()) for name, tensor in adapter_of(last).items() if "lora_B" in name)
    before, after = weights_of(base), weights_of(last)
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    assert last.metrics["changed"] == 0.0
    (warning,) = [line for line in events(settings, kind="warning") if "very weights" in line["text"]]
    assert "raise train.lora.lr" in warning["text"]


def test_its_own_learning_rate(settings: Settings, model: Path, tmp_path: Path) -> None:
    fill(settings, 32)
    slow = settings_for(model, tmp_path / "slow", "policies.tab.train.lora.lr=1e-5")
    fill(slow, 32)
    plain = settings_for(
        model, tmp_path / "plain", "policies.tab.train.lora.lr=null", "policies.tab.train.lr=1e-2"
    )
    fill(plain, 32)
    last = {}
    for name, one in (("own", settings), ("slow", slow), ("plain", plain)):
        train(one, "tab")
        last[name] = adapter_of(list_versions(one)[-1])
    b = next(name for name in last["own"] if "lora_B" in name)
    assert torch.equal(last["own"][b], last["plain"][b]), "null is train.lr"
    assert last["slow"][b].abs().max() < last["own"][b].abs().max() / 100


class Killed(BaseException):
    pass


def killed_at(settings: Settings, batch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Train until the process dies at the start of a batch."""
    plain = Learner.step

    def step(self: Learner, samples: Any, advantage: Any, bands: Any, number: int) -> dict[str, float]:
        if number == batch:
            raise Killed
        return plain(self, samples, advantage, bands, number)

    with monkeypatch.context() as patch:
        patch.setattr(Learner, "step", step)
        patch.setattr(running, "_end", lambda *_: None)  # a kill tells the store nothing
        with pytest.raises(Killed):
            train(settings, "tab")
    release_lease(settings)


@pytest.mark.parametrize("lost", [False, True], ids=["checkpoint", "version"])
def test_a_killed_run_goes_on_from_its_parent_and_its_adapter(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lost: bool
) -> None:
    """Not from its last version, which has the adapter in it, and the adapter on top of that."""
    whole, killed = (settings_for(model, tmp_path / name) for name in ("whole", "killed"))
    for one in (whole, killed):
        fill(one, 140)
    train(whole, "tab")
    killed_at(killed, 6, monkeypatch)
    assert len(list_versions(killed)) == 2
    if lost:
        shutil.rmtree(killed.home / "runs" / "1" / "checkpoints")
    train(killed, "tab")
    assert events(killed, kind="resume")[0]["batch"] == 4
    assert len(trained(killed)) == len(set(trained(killed)))
    for version in list_versions(killed)[1:]:
        check(killed, version)
    if not lost:  # else the optimiser began anew
        expected = adapter_of(list_versions(whole)[-1])
        for name, tensor in adapter_of(list_versions(killed)[-1]).items():
            assert torch.allclose(tensor, expected[name], atol=1e-5), name


@pytest.mark.parametrize(
    ("setting", "told"),
    [
        ("alpha=64", r"other settings of train\.lora.*'alpha': 32.*'alpha': 64"),
        ("rank=2", r"other settings of train\.lora.*'rank': 4.*'rank': 2"),
        ("rank=0", r"other settings of train\.lora.*'rank': 4.*None now"),
        ("targets=[q_proj]", r"or not these train\.lora\.targets"),
    ],
)
def test_a_killed_run_does_not_go_on_with_another_adapter(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, setting: str, told: str
) -> None:
    fill(settings, 100)
    killed_at(settings, 4, monkeypatch)
    other = settings_for(
        Path(settings.policies["tab"].model), settings.home, f"policies.tab.train.lora.{setting}"
    )
    with pytest.raises(RunError, match=told):
        train(other, "tab")
    assert train(other, "tab").id == 2


def test_without_a_checkpoint_another_adapter_is_told_too(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(settings, 140)
    killed_at(settings, 6, monkeypatch)
    shutil.rmtree(settings.home / "runs" / "1" / "checkpoints")
    other = settings_for(
        Path(settings.policies["tab"].model), settings.home, "policies.tab.train.lora.rank=2"
    )
    ended = train(other, "tab")
    assert ended.id == 1
    told = "train.lora.rank: 4, now 2"
    assert [one for one in events(settings, kind="warning") if one["text"].endswith(told)]
    assert [line for line in running.outcome(other, ended) if line.endswith(told)]


def test_the_next_run_goes_on_with_the_adapter_of_the_live_version(
    settings: Settings, loads: list[str]
) -> None:
    fill(settings, 64)
    train(settings, "tab")
    first = list_versions(settings)[-1]
    promote(settings, first.id)
    fill(settings, 64, seed=1)
    second = train(settings, "tab")
    assert second.parent == first.id
    assert events(settings, second.id, "inherited"), "the optimiser goes on too"
    last = list_versions(settings)[-1]
    check(settings, last)
    assert loads == ["000000"] * 2, "however many runs: one adapter on the first version"
    assert weights_of(last).keys() == weights_of(first).keys()
    kl = events(settings, second.id, "step")[0]["kl"]
    assert kl < events(settings, 1, "step")[-1]["kl"], "measured to the live version, not to the base"


def test_after_a_rollback_the_older_adapter_goes_on(settings: Settings, model: Path) -> None:
    for seed in range(2):
        fill(settings, 32, seed=seed)
        train(settings, "tab")
        promote(settings, list_versions(settings)[-1].id)
    promote(settings, None)
    still = settings_for(model, settings.home, "policies.tab.train.lora.lr=1e-30")
    fill(still, 16, seed=3)
    run = train(still, "tab")
    _, one, two, three = list_versions(still)
    assert (run.parent, three.parent) == (one.id, one.id)
    before, after = adapter_of(one), adapter_of(three)
    assert all(torch.allclose(after[name], before[name], atol=1e-12) for name in before)
    newer = adapter_of(two)
    assert any(not torch.allclose(after[name], newer[name], atol=1e-4) for name in newer)


@pytest.mark.parametrize(
    ("first", "second"),
    [("rank=0", "rank=4"), ("rank=4", "rank=2"), ("rank=4", "targets=[q_proj]")],
    ids=["trained in full", "another rank", "other targets"],
)
def test_where_an_adapter_cannot_go_on_the_live_version_becomes_the_base(
    model: Path, tmp_path: Path, first: str, second: str, loads: list[str]
) -> None:
    before, after = (
        settings_for(model, tmp_path / "home", f"policies.tab.train.lora.{one}") for one in (first, second)
    )
    fill(before, 32)
    train(before, "tab")
    promote(before, 1)
    fill(after, 64, seed=1)
    run = train(after, "tab")
    last = list_versions(after)[-1]
    check(after, last, base=1)
    assert loads[-1] == "000001"
    assert bool(events(after, run.id, "warning")) is (first != "rank=0"), "an adapter that ends is told"
    assert not events(after, run.id, "inherited")


def test_weights_trained_in_full_follow_an_adapter(settings: Settings, model: Path) -> None:
    fill(settings, 32)
    train(settings, "tab")
    promote(settings, 1)
    full = settings_for(model, settings.home, "policies.tab.train.lora.rank=0")
    fill(full, 32, seed=1)
    run = train(full, "tab")
    last = list_versions(full)[-1]
    assert directory.read_manifest(last.url).adapter_base is None
    assert not (Path(last.url) / "adapter").exists()
    assert not events(full, run.id, "inherited")


def test_the_reference_gives_the_numbers_of_a_model_of_its_own(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The parent has an adapter already: the reference is the base with that one on."""
    fill(settings, 32)
    train(settings, "tab")
    promote(settings, 1)
    fill(settings, 32, seed=1)
    differences: list[float] = []
    plain = Trainer._other

    def other(self: Trainer, version: int) -> Any:
        light, full = plain(self, version), self._model(version)
        assert isinstance(light, Sibling)

        class Both:
            def score(self, batch: Any) -> Any:
                one, two = light.score(batch), full.score(batch)
                for mine, theirs in ((one.logprobs, two.logprobs), (one.show, two.show)):
                    differences.append((mine - theirs).abs().max().item())
                return one

        return Both()

    monkeypatch.setattr(Trainer, "_other", other)
    monkeypatch.setattr(Learner, "_measure_trust", lambda *_: None)  # else the engine's numbers serve
    train(settings, "tab")
    assert differences
    assert max(differences) < 1e-5


async def test_the_engine_serves_what_the_adapter_made(settings: Settings) -> None:
    fill(settings, 64)
    train(settings, "tab")
    base, last = list_versions(settings)
    with replica() as one:
        engine = EmbeddedEngine("tab-0", one.socket)
        await engine.load(base)
        await engine.load(last)
        request = Generation(
            id="cmpl-1", policy="tab", version=1, prompt_ids=(5, 6, 7, 8), max_tokens=24, seed=1
        )
        tokens = tokens_of([item async for item in engine.generate(request)])
        got = torch.tensor([token.logprob for token in tokens])
        adapted = PeftModel.from_pretrained(load(Path(base.url)), Path(last.url) / "adapter").eval()
        expected = reference(lambda ids: adapted(input_ids=ids), request, [token.id for token in tokens])
        assert (got - expected).abs().max().item() < 1e-4
        (Path(last.url) / BOTH[1]).write_bytes(b"x")
        await engine.unload(1)
        with pytest.raises(EngineError, match=r"adapter_model\.safetensors has 1 bytes"):
            await engine.load(replace(plain(Path(last.url), 1), digest=last.digest))
        await engine.close()
