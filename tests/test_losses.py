"""The loss against hand-worked numbers, and its gradient against finite differences."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from onlinerl.config import Train
from onlinerl.learning import losses
from onlinerl.learning.losses import LossSettings


def t(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def logs(*values: float) -> Tensor:
    return torch.tensor([math.log(v) for v in values], dtype=torch.float64)


DEFAULT = LossSettings.of(Train())
CLIPS = {"clip_low": 0.2, "clip_high": 0.28, "dual_clip": 3.0}


def test_settings_are_those_of_the_specification() -> None:
    assert LossSettings(0.2, 0.28, 3.0, 2.0, 1e-4, 0.02, True) == DEFAULT


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "binds"),
    [
        (1.0, 1.0, -1.0, False),
        (1.1, 2.0, -2.2, False),
        (1.5, 1.0, -1.28, True),  # clipped above at 1 + 0.28
        (0.5, 1.0, -0.5, False),  # a good answer became rarer: full gradient
        (0.5, -1.0, 0.8, True),  # clipped below at 1 − 0.2
        (1.5, -1.0, 1.5, False),  # a bad answer became likelier: full gradient …
        (5.0, -1.0, 3.0, True),  # … up to the dual clip
        (5.0, 1.0, -1.28, True),  # which is for negative advantages alone
        (5.0, 0.0, 0.0, False),
    ],
)
def test_surrogate(ratio: float, advantage: float, loss: float, binds: bool) -> None:
    got, bound = losses.surrogate(logs(ratio), t(0.0), t(advantage), **CLIPS)
    assert got.item() == pytest.approx(loss)
    assert bool(bound) is binds


def test_a_bound_that_is_none_does_not_bind() -> None:
    settings = LossSettings.of(Train(importance_cap=None, dual_clip=None))
    assert settings.importance_cap is None
    far = torch.tensor([5.0])
    assert losses.importance_weight(far, torch.zeros(1), settings.importance_cap).item() == 1.0
    loss, _ = losses.surrogate(
        far, torch.zeros(1), torch.tensor([-1.0]),
        clip_low=settings.clip_low, clip_high=settings.clip_high, dual_clip=settings.dual_clip,
    )  # fmt: skip
    assert loss.item() == pytest.approx(math.exp(5.0))  # with the default bound it would be 3


def test_importance_weight_is_truncated_from_above_only() -> None:
    got = losses.importance_weight(logs(0.5, 0.3, 0.9), logs(0.5, 0.6, 0.1), 2.0)
    assert got.tolist() == pytest.approx([1.0, 0.5, 2.0])
    assert losses.importance_weight(logs(0.9), logs(0.1), None).tolist() == [1.0]


def test_veto_takes_the_whole_sequence() -> None:
    prox = logs(0.5, 1e-6, 0.5, 0.5)
    behaviour = logs(0.5, 0.5, 0.5, 0.5)
    sequence = torch.tensor([0, 0, 1, 1])
    assert losses.vetoed(prox, behaviour, sequence, 2, 1e-4).tolist() == [True, True, False, False]
    assert not losses.vetoed(prox, behaviour, sequence, 2, 1e-6 / 0.5 / 2).any()


def test_k3() -> None:
    # p = 0.5, ref = 0.25: d = ln ½, k3 = ½ + ln 2 − 1
    assert losses.k3(logs(0.5), logs(0.25)).item() == pytest.approx(0.5 + math.log(2) - 1)
    assert losses.k3(logs(0.3), logs(0.3)).item() == 0.0


def test_k3_estimates_the_divergence() -> None:
    policy = torch.softmax(torch.tensor([1.0, 0.2, -0.5], dtype=torch.float64), 0)
    reference = torch.softmax(torch.tensor([0.3, 0.3, 0.1], dtype=torch.float64), 0)
    exact = (policy * (policy / reference).log()).sum()
    assert (policy * losses.k3(policy.log(), reference.log())).sum().item() == pytest.approx(exact.item())


def test_divergence_is_right_for_others_tokens_too() -> None:
    """Exact expectation over a behaviour policy that is neither, and the gradient of the exact KL."""
    logits = torch.tensor([1.0, 0.2, -0.5], dtype=torch.float64, requires_grad=True)
    policy = torch.log_softmax(logits, 0)
    reference = torch.log_softmax(torch.tensor([0.3, 0.3, 0.1], dtype=torch.float64), 0)
    behaviour = torch.log_softmax(torch.tensor([0.1, 0.5, 0.2], dtype=torch.float64), 0)
    exact = (policy.exp() * (policy - reference)).sum()
    estimate = (behaviour.exp() * losses.divergence(policy, reference, behaviour)).sum()
    assert estimate.item() == pytest.approx(exact.item())
    (mine,) = torch.autograd.grad(estimate, logits, retain_graph=True)
    (right,) = torch.autograd.grad(exact, logits)
    assert mine.tolist() == pytest.approx(right.tolist())
    # a token that became 1000 times rarer than it was in the reference
    assert (
        losses.divergence(logs(1e-4), logs(0.1), logs(0.1)).item()
        < 1.0
        < losses.k3(logs(1e-4), logs(0.1)).item()
    )


def test_whole_loss_by_hand() -> None:
    """Three tokens kept, one left out."""
    policy, prox = logs(0.6, 0.3, 0.2, 0.9), logs(0.5, 0.3, 0.5, 0.1)
    behaviour, reference = logs(0.4, 0.3, 0.1, 0.1), logs(0.5, 0.3, 0.4, 0.2)
    advantage = t(1.0, -0.5, 2.0, 3.0)
    keep = torch.tensor([True, True, True, False])
    sums = losses.policy_loss(policy, prox, behaviour, reference, advantage, t(1, 2, 3, 4), keep, DEFAULT)
    # token 1: w = 1.25, ρ = 1.2 → −1.2·1.25 = −1.5;       r = 1.5, d = ln(5/6), k3 = 5/6 + ln 1.2 − 1
    # token 2: w = 1,    ρ = 1   → 0.5;                     k3 = 0
    # token 3: w = min(5, 2) = 2, ρ = 0.4 → −0.8·2 = −1.6;  r = 2, d = ln 2, k3 = 2 − ln 2 − 1
    kl = 1.5 * (5 / 6 + math.log(1.2) - 1) + 2 * (1 - math.log(2))
    assert sums.loss.item() == pytest.approx(-1.5 + 0.5 - 1.6 + 0.02 * kl)
    assert sums.tokens.item() == 3
    assert sums.kl_reference.item() == pytest.approx(kl)
    assert sums.weight.item() == pytest.approx(4.25)
    assert sums.weight_squared.item() == pytest.approx(1.25**2 + 1 + 4)
    assert sums.entropy.item() == 6
    assert sums.clipped.item() == 0
    ess = losses.effective_sample_size(4.25, 1.25**2 + 5, 3)
    assert ess == pytest.approx(4.25**2 / (3 * (1.25**2 + 5)))


def test_left_out_tokens_send_no_gradient() -> None:
    policy = logs(0.6, 0.3).requires_grad_()
    keep = torch.tensor([True, False])
    sums = losses.policy_loss(
        policy, logs(0.6, 0.3), logs(0.6, 0.3), logs(0.6, 0.3), t(1.0, 1.0), t(0, 0), keep, DEFAULT
    )
    torch.autograd.backward(sums.loss)
    assert policy.grad is not None
    assert policy.grad.tolist() == pytest.approx([-1.0, 0.0])


def test_raw_mode_is_the_seeds_formula() -> None:
    """−min(ρ·r, clip(ρ)·r), token mean; no correction, no KL, no dual clip, no veto."""
    settings = LossSettings.of(Train(mode="raw"))
    policy, prox, behaviour = logs(0.6, 0.3, 0.5), logs(0.4, 0.5, 0.1), logs(0.01, 0.9, 0.2)
    reward = t(1.0, 1.0, -1.0)
    keep = torch.tensor([True, True, True])
    sums = losses.policy_loss(
        policy, prox, behaviour, logs(0.1, 0.1, 0.1), reward, t(0, 0, 0), keep, settings
    )
    ratio = (policy - prox).exp()
    seed = -torch.minimum(ratio * reward, ratio.clamp(0.8, 1.28) * reward).sum()
    assert sums.loss.item() == pytest.approx(seed.item())
    assert settings.veto == 0.0


def test_temperature_is_applied() -> None:
    logits = torch.tensor([[1.0, 2.0, 0.5], [1.0, 2.0, 0.5]])
    logp, entropy = losses.token_logprobs(logits, torch.tensor([1, 1]), torch.tensor([1.0, 0.5]))
    plain = math.exp(2) / (math.exp(1) + math.exp(2) + math.exp(0.5))
    sharp = math.exp(4) / (math.exp(2) + math.exp(4) + math.exp(1))
    assert logp.tolist() == pytest.approx([math.log(plain), math.log(sharp)], rel=1e-5)
    assert entropy[1] < entropy[0]


def test_half_precision_logits_are_widened_first() -> None:
    logits = torch.tensor([[20.0, 19.9, 3.0]], dtype=torch.bfloat16)
    logp, _ = losses.token_logprobs(logits, torch.tensor([0]), torch.tensor([1.0]))
    assert logp.dtype == torch.float32
    assert logp.item() == pytest.approx(torch.log_softmax(logits.double(), -1)[0, 0].item(), abs=1e-6)


def test_show_rate_and_its_term() -> None:
    logits = torch.log(torch.tensor([[0.1, 0.2, 0.7], [0.5, 0.25, 0.25]]))
    show = losses.show_rate(logits, torch.tensor([0, 1]), torch.tensor([1.0, 1.0]))
    assert show.tolist() == pytest.approx([0.7, 0.25])
    whole = losses.show_term(show, 2, 0.6, 3.0)
    assert whole.item() == pytest.approx(3.0 * (0.6 - 0.475))
    halves = losses.show_term(show[:1], 2, 0.6, 3.0) + losses.show_term(show[1:], 2, 0.6, 3.0)
    assert halves.item() == pytest.approx(whole.item())


def test_show_term_pushes_silence_down() -> None:
    logits = torch.zeros(1, 4, requires_grad=True)
    term = losses.show_term(losses.show_rate(logits, torch.tensor([0]), torch.ones(1)), 1, 0.9, 1.0)
    torch.autograd.backward(term)
    assert logits.grad is not None
    assert logits.grad[0, 0] > 0, "descending lowers the end-of-text logit"


def test_multiplier_grows_under_the_floor_and_never_below_zero() -> None:
    assert losses.next_multiplier(0.0, 0.3, 0.6, 0.5) == pytest.approx(0.25)
    assert losses.next_multiplier(0.25, 0.9, 0.6, 0.5) == 0.0
    assert losses.next_multiplier(1.0, 0.9, 0.6, 0.5) == pytest.approx(0.75)


def test_self_normalised_reward() -> None:
    value, ess = losses.self_normalised_reward(logs(1.0, 2.0, 100.0), t(0.0, 1.0, 1.0))
    # weights 1, 2, min(100, 10)
    assert value == pytest.approx(12 / 13)
    assert ess == pytest.approx(13**2 / (3 * 105))
    assert losses.self_normalised_reward(t(), t()) == (0.0, 0.0)


def test_gradient_against_finite_differences() -> None:
    """Every piece of the loss through a two-layer model in float64."""
    torch.manual_seed(0)
    words, width, count = 7, 5, 12
    model = nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, words)).double()
    inputs = torch.randn(count, 4, dtype=torch.float64)
    targets = torch.randint(0, words, (count,))
    temperature = torch.rand(count, dtype=torch.float64) + 0.5
    with torch.no_grad():
        base, _ = losses.token_logprobs(model(inputs), targets, temperature)
    # far enough apart that every branch (free, clipped low and high, dual) is taken, near no kink
    prox = base + torch.linspace(-1.6, 0.9, count, dtype=torch.float64)
    behaviour = prox + torch.randn(count, dtype=torch.float64) * 0.4
    reference = base + torch.randn(count, dtype=torch.float64) * 0.3
    advantage = torch.tensor([1.0, -1.0], dtype=torch.float64).repeat(count // 2) * 1.3
    keep = torch.ones(count, dtype=torch.bool)
    keep[3] = False

    def loss() -> Tensor:
        logits = model(inputs)
        policy, entropy = losses.token_logprobs(logits, targets, temperature)
        sums = losses.policy_loss(policy, prox, behaviour, reference, advantage, entropy, keep, DEFAULT)
        first = torch.log_softmax(logits[:3], -1)
        show = 1 - first[:, :2].exp().sum(-1)
        return sums.loss / keep.sum() + losses.show_term(show, 3, 0.9, 0.7)

    torch.autograd.backward(loss())
    step = 1e-6
    checked = 0
    for parameter in model.parameters():
        assert parameter.grad is not None
        flat, grad = parameter.data.view(-1), parameter.grad.view(-1)
        for place in range(flat.numel()):
            old = flat[place].item()
            flat[place] = old + step
            up = loss().item()
            flat[place] = old - step
            down = loss().item()
            flat[place] = old
            assert (up - down) / (2 * step) == pytest.approx(grad[place].item(), rel=1e-5, abs=1e-8)
            checked += 1
    assert checked == 4 * 5 + 5 + 5 * 7 + 7
