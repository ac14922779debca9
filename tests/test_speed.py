"""What makes the trainer fast on a GPU changes no number: recomputation, compiled layers, flash attention,
rows of any size.

There is no GPU here, so attention's kernel is a double with the kernel's signature, and layers are compiled
by torch's tracer without the code generator behind it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from onlinerl import config
from onlinerl.errors import ModelError
from onlinerl.learning import attention, batches, layers
from onlinerl.learning.attention import lay_out
from onlinerl.learning.batches import PolicyModel, pack
from onlinerl.learning.guards import Bands
from onlinerl.learning.learner import Learner
from onlinerl.learning.memory import PLENTY, ROW, Footprint, Plan, plan
from onlinerl.records import Sample, Scored
from tests.test_batches import CPU, SHAPE, WORDS, draw

Grads = dict[str, Tensor]


def build(folder: Path, kind: str = "qwen2") -> Path:
    torch.manual_seed(0)
    model: Any = (
        Qwen2ForCausalLM(Qwen2Config(**SHAPE)) if kind == "qwen2" else LlamaForCausalLM(LlamaConfig(**SHAPE))
    )
    for parameter in model.parameters():
        parameter.data.mul_(4 if parameter.dim() > 1 else 1)
    model.save_pretrained(folder)
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return build(tmp_path)


def gradients(policy: PolicyModel, seed: int = 0, count: int = 9) -> tuple[Tensor, Grads]:
    """Log-probabilities of a row of samples, and the gradient of a mix of them."""
    return gradients_of(policy, draw(count, seed), seed)


def gradients_of(policy: PolicyModel, samples: list[Sample], seed: int = 0) -> tuple[Tensor, Grads]:
    """The same for these samples."""
    scores = policy.score(pack(samples, range(len(samples)), CPU, padded=policy.padded))
    policy.model.zero_grad()
    generator = torch.Generator().manual_seed(seed)
    weights = torch.randn(scores.logprobs.numel(), generator=generator)
    torch.autograd.backward((scores.logprobs * weights).sum())
    grads = {name: p.grad.clone() for name, p in policy.parameters().items() if p.grad is not None}
    return scores.logprobs.detach(), grads


def like(size: int, answer: int, seed: int) -> Sample:
    """A sample of `size` tokens, `answer` of them judged."""
    generator = torch.Generator().manual_seed(seed)
    row = torch.randint(4, WORDS, (size,), generator=generator).tolist()
    made = draw(1, seed)[0]
    prompt, completion = tuple(row[:-answer]), tuple(row[-answer:])
    return replace(
        made,
        prompt_ids=prompt,
        completion_ids=completion,
        behavior_logprobs=(-1.0,) * answer,
        loss_mask=(True,) * answer,
    )


def assert_same(one: tuple[Tensor, Grads], other: tuple[Tensor, Grads]) -> None:
    assert torch.allclose(one[0], other[0], atol=1e-5)
    assert one[1].keys() == other[1].keys()
    for name, grad in one[1].items():
        assert torch.allclose(grad, other[1][name], atol=1e-4, rtol=1e-4), name


# ----------------------------------------------------------------------------------------- attention


def causal(bounds: Tensor) -> Tensor:
    """[N, N]: who sees whom in a packed row."""
    sample = torch.bucketize(torch.arange(int(bounds[-1])), bounds, right=True)
    return (sample[:, None] == sample) & torch.ones(len(sample), len(sample)).tril().bool()


def shares(query: Tensor, key: Tensor, seen: Tensor, scale: float) -> Tensor:
    """Attention's weights, [H, N, N], in fp32."""
    scores = torch.einsum("qhd,khd->hqk", query.float(), key.float()) * scale
    return scores.masked_fill(~seen, float("-inf")).softmax(-1)


@torch.library.custom_op("onlinerl_tests::varlen", mutates_args={})
def forward_kernel(query: Tensor, key: Tensor, value: Tensor, bounds: Tensor, longest: int) -> Tensor:
    assert longest == int(bounds.diff().max())
    groups = query.shape[1] // key.shape[1]
    wide = [tensor.repeat_interleave(groups, 1) for tensor in (key, value)]
    weights = shares(query, wide[0], causal(bounds), query.shape[-1] ** -0.5)
    return torch.einsum("hqk,khd->qhd", weights, wide[1].float()).to(query.dtype).contiguous()


@torch.library.custom_op("onlinerl_tests::varlen_backward", mutates_args={})
def backward_kernel(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, bounds: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    groups, scale = query.shape[1] // key.shape[1], query.shape[-1] ** -0.5
    wide = [tensor.repeat_interleave(groups, 1).float() for tensor in (key, value)]
    weights = shares(query, wide[0], causal(bounds), scale)
    inner = torch.einsum("qhd,khd->hqk", grad.float(), wide[1])
    inner = weights * (inner - (inner * weights).sum(-1, keepdim=True)) * scale

    def narrow(tensor: Tensor) -> Tensor:
        grouped = tensor.view(len(tensor), -1, groups, tensor.shape[-1])
        return grouped.sum(2).to(key.dtype).contiguous()

    return (
        torch.einsum("hqk,khd->qhd", inner, wide[0]).to(query.dtype).contiguous(),
        narrow(torch.einsum("hqk,qhd->khd", inner, query.float())),
        narrow(torch.einsum("hqk,qhd->khd", weights, grad.float())),
    )


@forward_kernel.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, bounds: Tensor, longest: int) -> Tensor:
    return torch.empty_like(query)


@backward_kernel.register_fake
def _(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, bounds: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


def _keep(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(*inputs[:4])


def _back(ctx: Any, grad: Tensor) -> Any:
    return (*backward_kernel(grad, *ctx.saved_tensors), None, None)


forward_kernel.register_autograd(_back, setup_context=_keep)


def kernel(
    query: Tensor, key: Tensor, value: Tensor, first: Tensor, second: Tensor, a: int, b: int, scale: float
) -> Tensor:
    """With the signature of torch's `varlen_attn`."""
    made: Tensor = forward_kernel(query, key, value, first, a)
    return made


def not_causal(query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Tensor:
    groups = query.shape[1] // key.shape[1]
    wide = [tensor.repeat_interleave(groups, 1) for tensor in (key, value)]
    scores = torch.einsum("qhd,khd->hqk", query, wide[0])
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), wide[1])


def wrong_backward(*arguments: Any, **named: Any) -> Tensor:
    out = kernel(*arguments, **named)
    return out + (out - out.detach())  # the value is right, the gradient is twice what it should be


def absent(*_: Any, **__: Any) -> Tensor:
    raise NotImplementedError("no kernel for this device")


def flashed(folder: Path, monkeypatch: pytest.MonkeyPatch, way: Callable[..., Tensor]) -> PolicyModel:
    monkeypatch.setattr(attention, "varlen", way)
    policy = PolicyModel.load(folder, CPU, torch.float32)
    policy.hasten(policy.trial(), flash=True, compiled=False)
    return policy


@pytest.mark.parametrize("kind", ["qwen2", "llama"])
def test_flash_attention_is_packed_attention(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    folder = build(tmp_path, kind)
    plain = gradients(PolicyModel.load(folder, CPU, torch.float32))
    policy = flashed(folder, monkeypatch, kernel)
    assert policy.flash
    assert not policy.fallbacks
    assert_same(gradients(policy), plain)


def test_samples_of_like_length_are_attended_to_as_lines(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = flashed(folder, monkeypatch, kernel)
    assert policy.lined
    plain = PolicyModel.load(folder, CPU, torch.float32)
    samples = [like(size, 4, size) for size in (40, 37, 40, 35)]
    monkeypatch.setattr(attention, "varlen", absent)
    assert_same(gradients_of(policy, samples), gradients_of(plain, samples))
    with pytest.raises(NotImplementedError):
        gradients_of(policy, [*samples, like(9, 4, 0)])


def test_lines_are_for_a_gpu_of_few_lengths_and_waste_little() -> None:
    meta = torch.device("meta")
    assert lay_out([1000, 1020], meta).lines.shape == (2, 1024)
    assert lay_out([1000, 1020], CPU).lines.shape == (2, 1020)
    assert lay_out([1000, 1020], meta).even
    assert not lay_out([1000, 1020, 500], meta).even
    assert not lay_out([1020], meta).even, "one line is a shape of its own to a compiler"


def test_lines_that_are_wrong_are_left_out(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "varlen", kernel)
    policy = PolicyModel.load(folder, CPU, torch.float32)
    exact = policy.trial()
    whole = F.scaled_dot_product_attention

    def blind(*arguments: Any, is_causal: bool, **named: Any) -> Tensor:
        return whole(*arguments, **named)

    monkeypatch.setattr(F, "scaled_dot_product_attention", blind)
    monkeypatch.setattr(policy, "trial", lambda real=policy.trial: real() if policy.flash else exact)
    policy.hasten(exact, flash=True, compiled=False)
    assert (policy.flash, policy.lined) == (True, False)
    (reason,) = policy.fallbacks
    assert reason.startswith("attention by lines left an error")


@pytest.mark.parametrize(
    ("way", "told"),
    [
        (not_causal, "left an error"),
        (wrong_backward, "left an error"),
        (absent, "no kernel for this device"),
    ],
)
def test_a_kernel_that_is_wrong_or_missing_is_left_out(
    folder: Path, monkeypatch: pytest.MonkeyPatch, way: Callable[..., Tensor], told: str
) -> None:
    policy = flashed(folder, monkeypatch, way)
    assert not policy.flash
    (reason,) = policy.fallbacks
    assert reason.startswith("flash attention ")
    assert told in reason
    assert_same(gradients(policy), gradients(PolicyModel.load(folder, CPU, torch.float32)))


# ------------------------------------------------------------------------------------------ compiling


def counting(programs: list[Any]) -> Callable[..., Any]:
    from torch._dynamo.backends.debugging import aot_eager

    def backend(graph: Any, inputs: Any, **options: Any) -> Any:
        programs.append(graph)
        return aot_eager(graph, inputs, **options)

    return backend


def kept(programs: list[Any]) -> int:
    """How many of the programs are in use: a first try in which a number turns out to be a constant is begun
    anew, and emptied."""
    return sum(len(graph.graph.nodes) > 0 for graph in programs)


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # torch's tracer looks at it
@pytest.mark.filterwarnings("ignore:<class 'torch.autograd.function")  # and makes one of these
def test_compiled_layers_compute_the_same_with_one_program_for_all(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    programs: list[Any] = []
    monkeypatch.setattr(layers, "BACKEND", counting(programs))
    monkeypatch.setattr(attention, "varlen", kernel)
    plain = PolicyModel.load(folder, CPU, torch.float32)
    policy = PolicyModel.load(folder, CPU, torch.float32)
    policy.hasten(policy.trial(), flash=True, compiled=True)
    assert policy.flash
    assert policy.layers.compiled, policy.fallbacks
    assert not policy.fallbacks
    assert len(policy.layers.modules) == 3
    assert policy.lined
    assert policy._loss is not None
    assert kept(programs) == 6, "with gradients and without: two ways of attention, each for all layers; loss"
    expected = {
        (seed, count): gradients(plain, seed, count) for seed, count in ((0, 9), (1, 1), (2, 2), (3, 14))
    }
    for again in (False, True):
        policy.recompute(again)
        for (seed, count), wanted in expected.items():
            assert_same(gradients(policy, seed, count), wanted)
    equal = [like(33, 4, seed) for seed in range(5)]
    assert_same(gradients_of(policy, equal), gradients_of(plain, equal))
    assert kept(programs) == 6, "rows of any length and number of samples share them"
    policy._warm(200)
    assert kept(programs) == 6, "what is compiled ahead is what training runs"


@pytest.mark.filterwarnings("ignore:The .grad attribute")
def test_frozen_embeddings_need_no_program_of_their_own(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    programs: list[Any] = []
    monkeypatch.setattr(layers, "BACKEND", counting(programs))
    lora = config.Lora(rank=2)
    plain = PolicyModel.load(folder, CPU, torch.float32, lora)
    policy = PolicyModel.load(folder, CPU, torch.float32, lora)
    policy.layers.run(compiled=True, recompute=False)
    assert_same(gradients(policy), gradients(plain))
    assert kept(programs) == 1


def test_a_compiler_that_fails_is_left_out(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(graph: Any, inputs: Any) -> Any:
        raise OSError("no compiler here")

    monkeypatch.setattr(layers, "BACKEND", broken)
    policy = PolicyModel.load(folder, CPU, torch.float32, compile=True)
    assert not policy.layers.compiled
    assert "no compiler here" in policy.fallbacks[0]
    assert_same(gradients(policy), gradients(PolicyModel.load(folder, CPU, torch.float32)))


def test_small_models_and_cpus_are_not_compiled_by_themselves(folder: Path) -> None:
    policy = PolicyModel.load(folder, CPU, torch.float32, compile="auto")
    assert (policy.layers.compiled, policy.flash, policy.fallbacks) == (False, False, [])


# --------------------------------------------------------------------------------------------- memory


def test_recomputed_activations_give_the_same_gradient(folder: Path) -> None:
    policy = PolicyModel.load(folder, CPU, torch.float32)
    plain = gradients(policy)
    calls: list[int] = []
    first = policy.layers.modules[0]
    hook = first.register_forward_pre_hook(lambda *_: calls.append(1))
    policy.recompute(True)
    again = gradients(policy)
    hook.remove()
    assert len(calls) == 1, "the layer is called once; its inside runs again"
    for name, grad in plain[1].items():
        assert torch.equal(grad, again[1][name]), name
    kept = saved(policy)
    policy.recompute(False)
    assert kept < saved(policy) / 3


def saved(policy: PolicyModel) -> int:
    """Bytes that the layers' operations keep for backward."""
    total = 0

    def count(tensor: Tensor) -> Tensor:
        nonlocal total
        total += tensor.numel() * tensor.element_size()
        return tensor

    samples = draw(9)
    with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
        policy.score(pack(samples, range(9), CPU, padded=policy.padded))
    return total


def test_a_model_without_a_list_of_layers_cannot_recompute(folder: Path) -> None:
    policy = PolicyModel.load(folder, CPU, torch.float32)
    policy.layers.modules = []
    with pytest.raises(ModelError, match=r"train\.recompute"):
        policy.recompute(True)


def test_plan_keeps_activations_while_they_fit() -> None:
    million = Footprint(kept=1e6, recomputed=1e5)

    def ask(room: float, **other: Any) -> Plan:
        asked: dict[str, Any] = {
            "longest": 1000,
            "tokens": 60_000,
            "microbatch": "auto",
            "recompute": "auto",
        } | other
        return plan(room, million, **asked)

    assert ask(1e12) == Plan(ROW, False), "beyond a point longer rows bring nothing"
    assert ask(20e9) == Plan(20_000, False)
    assert ask(2e9) == Plan(20_000, True), "2,000 tokens a row would leave the GPU idle"
    assert ask(2e9, tokens=1500) == Plan(2000, False), "but not where that is the whole batch"
    assert ask(6e9, longest=8192) == Plan(ROW, True)
    assert ask(20e9, recompute=True) == Plan(ROW, True)
    assert ask(20e9, recompute=False, longest=50_000) == Plan(50_000, False), "as asked, whatever comes of it"
    assert ask(20e9, microbatch=16_384) == Plan(16_384, False)
    assert ask(10e9, microbatch=16_384) == Plan(16_384, True)
    assert ask(-1.0) == Plan(1000, True), "no room at all: the longest sample is tried"


# -------------------------------------------------------------------------------------------- learner


def trained(folder: Path, **settings: Any) -> tuple[dict[str, float], Grads]:
    """The numbers and the weights after two steps."""
    train = config.Train(
        lr=1e-2, guards=config.Guards(kl=1e9, entropy=0, gradient=1e9, clip_fraction=1, length_low=0,
        length_high=100), silence=config.Silence(floor=0), **settings,
    )  # fmt: skip
    policy = PolicyModel.load(folder, CPU, torch.float32)
    learner = Learner(policy, train, reference=0, load=lambda _: PolicyModel.load(folder, CPU, torch.float32))
    bands = Bands(train.guards, train.silence)
    numbers: dict[str, float] = {}
    for number in (1, 2):
        batch = [Scored(sample, 0.0) for sample in draw(12, seed=number)]
        values = [1.0 if place % 2 else -0.5 for place in range(12)]
        numbers = learner.step(batch, values, bands, number)
    return numbers, {name: p.detach().clone() for name, p in policy.parameters().items()}


def test_rows_of_any_size_and_recomputation_train_the_same_weights(folder: Path) -> None:
    numbers, weights = trained(folder)
    for settings in ({"microbatch": 1}, {"microbatch": 60}, {"microbatch": PLENTY, "recompute": True}):
        others, moved = trained(folder, **settings)
        assert others == pytest.approx(numbers, rel=1e-3, abs=1e-5), settings
        for name, weight in weights.items():
            # Adam divides by the gradient's size, so what rounds differently near 0 may differ by a step.
            assert (weight - moved[name]).norm() < 1e-3 * weight.norm(), (settings, name)


def test_on_a_gpu_the_first_batch_and_longer_ones_are_planned(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = PolicyModel.load(folder, CPU, torch.float32)
    learner = Learner(policy, config.Train(), reference=0, load=lambda _: policy)
    monkeypatch.setattr(policy, "device", SimpleNamespace(type="cuda"))  # looked at, and nothing is moved
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: 0)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: 1000)
    asked: list[float] = []

    def free(_: object) -> tuple[int, int]:
        asked.append(1.0)
        return 10**8, 10**9

    monkeypatch.setattr(torch.cuda, "mem_get_info", free)
    monkeypatch.setattr(policy, "_footprint", Footprint(kept=1e6, recomputed=1e4))
    long = sorted(draw(12, seed=1), key=batches.length)
    short = long[:4]
    sizes = [max(batches.length(sample) for sample in some) for some in (short, long)]
    assert sizes[0] < sizes[1], "or there is nothing to see"
    learner._fit(short)
    weights = sum(p.numel() for p in policy.parameters().values())
    judged = sum(sum(sample.loss_mask) for sample in short)
    room = 0.8 * (10**8 + 1000 - 3 * 4 * weights - 32 * WORDS * judged)
    tokens = sum(batches.length(sample) for sample in short)
    assert (room < 1e6 * tokens) is learner.plan.recompute
    assert learner.plan.row == max(sizes[0], min(ROW, int(room / (1e4 if learner.plan.recompute else 1e6))))
    assert policy.layers.recompute is learner.plan.recompute
    learner._fit(short)
    assert len(asked) == 1
    learner._fit(long)
    assert len(asked) == 2
    learner._fit(short)
    assert len(asked) == 2, "what was planned for longer samples does for these"


def test_a_kl_that_is_only_watched_is_not_measured_in_each_batch(folder: Path) -> None:
    asked: list[int] = []

    def steps(kl: float) -> tuple[list[dict[str, float]], Grads]:
        asked.clear()
        train = config.Train(
            lr=1e-2, minibatches=1, kl_coefficient=kl, silence=config.Silence(floor=0),
            guards=config.Guards(kl=1e9, entropy=0, gradient=1e9, clip_fraction=1, length_low=0,
            length_high=100),
        )  # fmt: skip
        policy = PolicyModel.load(folder, CPU, torch.float32)
        other = PolicyModel.load(folder, CPU, torch.float32)
        score = other.score
        other.score = lambda batch: (asked.append(1), score(batch))[1]  # type: ignore[method-assign, func-returns-value]
        learner = Learner(policy, train, reference=0, load=lambda _: other)
        bands = Bands(train.guards, train.silence)
        values = [1.0 if place % 2 else -0.5 for place in range(12)]
        numbers = [
            learner.step([Scored(sample, 0.0) for sample in draw(12, seed=number)], values, bands, number)
            for number in range(1, 10)
        ]
        learner.inspect(draw(12), bands)
        return numbers, {name: p.detach().clone() for name, p in policy.parameters().items()}

    numbers, _ = steps(1e-12)
    assert all("kl" in one for one in numbers)
    assert len(asked) == 9, "all but the first batch, and the version"
    fewer, _ = steps(0.0)
    assert [place for place, one in enumerate(fewer, 1) if "kl" in one] == [1, 8]
    assert len(asked) == 2, "the eighth batch, and the version"
    assert fewer[7]["kl"] > 0


def test_the_default_on_a_cpu_is_a_row_of_4096_without_tricks(folder: Path) -> None:
    policy = PolicyModel.load(folder, CPU, torch.float32, compile=config.Train().compile)
    learner = Learner(policy, config.Train(), reference=0, load=lambda _: policy)
    assert learner.plan == Plan(4096, False)
    assert "forward" not in policy.layers.modules[0].__dict__
