"""The loss of critic-free, decoupled PPO (ALGORITHMS 5), as pure functions on tensors.

All token tensors are flat: shape [K] over the K answer tokens of a batch that may be trained on, in any
order, and `sequence` [K] says to which sample each belongs. Log-probabilities are natural, in fp32. Sums
are returned, not means: a batch is computed in microbatches, and the denominator is the token count of the
whole (mini)batch, which only the caller knows.

    L = (1/N) Σ_tokens [ w · ppo(ρ, A) + β · r · k3(π_θ ‖ π_ref) ] + λ · (floor − show(θ))

    w = min(π_prox / π_behav, C)       truncated importance sampling; π_prox: policy at the batch's start
    ρ = π_θ / π_prox                   decoupled PPO, AReaL 2505.24298
    r = π_θ / π_behav                  makes k3, which wants samples of π_θ, right for samples of π_behav
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from onlinerl import config


@dataclass(frozen=True, slots=True)
class LossSettings:
    """Constants of the loss."""

    clip_low: float
    clip_high: float
    dual_clip: float
    """Bound c for negative advantages; infinite: none."""
    importance_cap: float | None
    """C; None: no correction, w = 1."""
    veto: float
    kl: float
    """β."""
    show: bool
    """Whether the show rate's floor enters the loss."""

    @classmethod
    def of(cls, train: config.Train) -> LossSettings:
        """What `train` asks for. `raw` is the seed's formula: the clipped surrogate and nothing else."""
        raw = train.mode == "raw"
        return cls(
            clip_low=train.clip_low,
            clip_high=train.clip_high,
            dual_clip=float("inf") if raw or train.dual_clip is None else train.dual_clip,
            importance_cap=None if raw else train.importance_cap,
            veto=0.0 if raw else train.veto,
            kl=0.0 if raw else train.kl_coefficient,
            show=not raw,
        )


def token_logprobs(logits: Tensor, targets: Tensor, temperature: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probabilities of the sampled tokens, and the entropy of each distribution.

    logits [K, V] of any float type, targets [K], temperature [K] (that of the token's sample: it is
    applied to π_θ and π_prox as it was to π_behav). Returns ([K], [K]) in fp32 (fp64 stays fp64); the
    entropy is for looking at and carries no gradient.
    """
    wide = logits if logits.dtype == torch.float64 else logits.float()
    logp = torch.log_softmax(wide / temperature[:, None].to(wide.dtype), dim=-1)
    chosen = logp.gather(-1, targets[:, None]).squeeze(-1)
    with torch.no_grad():
        entropy = -(logp.exp() * logp).sum(-1)
    return chosen, entropy


def importance_weight(prox: Tensor, behaviour: Tensor, cap: float | None) -> Tensor:
    """w = min(exp(prox − behaviour), C) per token, [K]; ones without a cap. Carries no gradient.

    TIS: truncated from above only, so the variance is bounded and small weights stay what they are.
    """
    if cap is None:
        return torch.ones_like(prox)
    return torch.exp((prox - behaviour).detach().clamp(max=20.0)).clamp(max=cap)


def vetoed(prox: Tensor, behaviour: Tensor, sequence: Tensor, samples: int, threshold: float) -> Tensor:
    """Which tokens belong to a sequence with any π_prox/π_behav below `threshold`: bool [K].

    Such a sequence is one that the policy would (almost) never produce any more; its tokens leave the sum
    and the denominator.
    """
    bad = torch.exp(prox - behaviour) < threshold
    by_sample = torch.zeros(samples, dtype=torch.int32, device=prox.device)
    # A sum, since choosing by a mask makes the CPU wait for the GPU.
    return by_sample.index_add(0, sequence, bad.int())[sequence] > 0


def surrogate(
    policy: Tensor, prox: Tensor, advantage: Tensor, *, clip_low: float, clip_high: float, dual_clip: float
) -> tuple[Tensor, Tensor]:
    """PPO's loss per token and whether its clip binds (its gradient is then 0): ([K], bool [K]).

    max(−A·ρ, −A·clip(ρ, 1−ε_low, 1+ε_high)), PPO 1707.06347 with DAPO's asymmetric clip (2503.14476); for
    A < 0 at most −A·c, dual clip 1912.09729.
    """
    ratio = torch.exp((policy - prox).clamp(-20.0, 20.0))
    plain = -advantage * ratio
    clipped = -advantage * ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    loss = torch.maximum(plain, clipped)
    binds = clipped > plain
    if dual_clip != float("inf"):
        bound = -advantage * dual_clip
        over = (advantage < 0) & (loss > bound)
        loss = torch.where(over, bound, loss)
        binds = binds | over
    return loss, binds


def k3(policy: Tensor, reference: Tensor) -> Tensor:
    """Schulman's k3: estimates KL(π_θ ‖ π_ref) per token, [K]: e^d − d − 1 with d = ref − policy; never < 0.

    (joschu.net/blog/kl-approx.html.) d is limited to ±20 so that one absurd token stays a number.
    """
    difference = (reference - policy).clamp(-20.0, 20.0)
    return torch.exp(difference) - difference - 1.0


KL_WEIGHT_CAP = 10.0
"""Largest r in `divergence`."""


def divergence(policy: Tensor, reference: Tensor, behaviour: Tensor) -> Tensor:
    """r · k3 with r = min(π_θ/π_behav, 10): estimates KL(π_θ ‖ π_ref) from tokens of π_behav, [K].

    Differentiable through r too: then the gradient is the KL's own, r·(log π_θ − log π_ref)·∇log π_θ
    (DeepSeek-V3.2, 2512.02556). Without r, a token that was rightly learned to be rare counts with
    π_ref/π_θ, without bound. On-policy r is 1.
    """
    ratio = torch.exp((policy - behaviour).clamp(max=20.0)).clamp(max=KL_WEIGHT_CAP)
    return ratio * k3(policy, reference)


@dataclass(frozen=True, slots=True)
class Sums:
    """What one microbatch adds to its batch. `loss` carries the gradient, the others do not."""

    loss: Tensor
    """Sum over kept tokens of w · ppo + β · r · k3, scalar."""
    tokens: Tensor
    """Kept tokens, scalar."""
    clipped: Tensor
    """Kept tokens whose clip binds."""
    weight: Tensor
    """Σ w."""
    weight_squared: Tensor
    """Σ w², for the effective sample size."""
    kl_reference: Tensor
    """Σ r · k3(π_θ ‖ π_ref)."""
    kl_behaviour: Tensor
    """Σ k3(π_prox ‖ π_behav): the mismatch between trainer and engine, plus staleness."""
    entropy: Tensor


def policy_loss(
    policy: Tensor,
    prox: Tensor,
    behaviour: Tensor,
    reference: Tensor,
    advantage: Tensor,
    entropy: Tensor,
    keep: Tensor,
    settings: LossSettings,
) -> Sums:
    """Sums over the tokens with `keep`; all arguments [K], only `policy` needs a gradient."""
    weight = importance_weight(prox, behaviour, settings.importance_cap)
    loss, binds = surrogate(
        policy,
        prox,
        advantage,
        clip_low=settings.clip_low,
        clip_high=settings.clip_high,
        dual_clip=settings.dual_clip,
    )
    kl = divergence(policy, reference, behaviour)
    total = torch.where(keep, weight * loss + settings.kl * kl, torch.zeros_like(loss)).sum()
    with torch.no_grad():
        kept = keep.to(policy.dtype)
        return Sums(
            loss=total,
            tokens=kept.sum(),
            clipped=(binds & keep).sum().to(policy.dtype),
            weight=(weight * kept).sum(),
            weight_squared=(weight.square() * kept).sum(),
            kl_reference=(kl.detach() * kept).sum(),
            kl_behaviour=(k3(prox, behaviour) * kept).sum(),
            entropy=(entropy.detach() * kept).sum(),
        )


def effective_sample_size(weight: float, weight_squared: float, tokens: float) -> float:
    """ESS / n = (Σw)² / (n Σw²), between 0 and 1; 1 when on-policy."""
    if tokens <= 0 or weight_squared <= 0:
        return 0.0
    return weight * weight / (tokens * weight_squared)


def show_rate(first_logits: Tensor, stop_ids: Tensor, temperature: Tensor) -> Tensor:
    """1 − p(end-of-text first) for each prompt, [n].

    first_logits [n, V] at the last prompt token, stop_ids [e] the end-of-text ids, temperature [n].
    """
    logp = torch.log_softmax(first_logits.float() / temperature[:, None], dim=-1)
    return 1.0 - logp[:, stop_ids].exp().sum(-1)


def show_term(show: Tensor, count: int, floor: float, multiplier: float) -> Tensor:
    """λ·(floor − mean show(θ)): the part of a microbatch with `show` [m] out of `count` prompts, scalar.

    The constant λ·floor is split evenly, so that the microbatches add up to the term.
    """
    return multiplier * (floor * show.numel() - show.sum()) / count


def next_multiplier(multiplier: float, show: float, floor: float, step: float) -> float:
    """Dual ascent: λ grows with how far the show rate is under its floor and shrinks above it, never < 0.

    The distance is relative to the floor, so that one `step` suits any floor.
    """
    if floor <= 0:
        return 0.0
    return max(0.0, multiplier + step * (floor - show) / floor)


def self_normalised_reward(log_ratio: Tensor, reward: Tensor, cap: float = 10.0) -> tuple[float, float]:
    """Estimate of the current policy's mean reward from others' answers, and its ESS / n.

    Σ w r / Σ w with w = min(π_θ(y)/π_behav(y), cap), a sequence's ratio: clipped, self-normalised
    importance weighting (Swaminathan & Joachims 2015). log_ratio [n] is the sum over a sequence's tokens.
    """
    if log_ratio.numel() == 0:
        return 0.0, 0.0
    weight = torch.exp(log_ratio.double().clamp(max=20.0)).clamp(max=cap)
    total = weight.sum()
    if total <= 0:
        return 0.0, 0.0
    value = (weight * reward.double()).sum() / total
    ess = total.square() / (weight.numel() * weight.square().sum())
    return float(value), float(ess)
