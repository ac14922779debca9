"""Sampling: the distribution, its log-probabilities, top-p, greedy, alternatives, one uniform a token."""

from __future__ import annotations

import math
import random

import pytest
import torch

from onlinerl.replica.sampling import behaviour_logprobs, draw

LOGITS = torch.tensor([[2.0, 1.0, 0.0, -1.0, -5.0]])


def test_temperature_divides_the_logits() -> None:
    got = behaviour_logprobs(LOGITS, [0.5], [1.0])
    assert torch.allclose(got, torch.log_softmax(LOGITS * 2, -1), atol=1e-6)


def test_greedy_reports_the_untempered_softmax_and_ignores_top_p() -> None:
    [drawn] = draw(LOGITS, [0.0], [0.1], [0.999], [0])
    assert drawn.token == 0
    assert drawn.logprob == pytest.approx(torch.log_softmax(LOGITS, -1)[0, 0].item(), abs=1e-6)


@pytest.mark.parametrize(("top_p", "kept"), [(0.5, 1), (0.65, 2), (0.9, 3), (0.9999, 5), (1e-9, 1)])
def test_top_p_keeps_the_smallest_sufficient_set_and_renormalises(top_p: float, kept: int) -> None:
    got = behaviour_logprobs(LOGITS, [1.0], [top_p])[0]
    assert torch.isfinite(got).sum() == kept
    assert got[:kept].exp().sum().item() == pytest.approx(1, abs=1e-6)
    plain = torch.softmax(LOGITS, -1)[0]
    assert got[0].exp().item() == pytest.approx((plain[0] / plain[:kept].sum()).item(), abs=1e-6)


def test_top_p_applies_to_its_own_row_only() -> None:
    got = behaviour_logprobs(LOGITS.repeat(3, 1), [1.0, 1.0, 0.0], [1.0, 0.5, 0.5])
    assert torch.isfinite(got).sum(-1).tolist() == [5, 1, 5]


def test_uniforms_invert_the_cumulative_distribution() -> None:
    edges = torch.softmax(LOGITS, -1)[0].double().cumsum(0).tolist()
    below = [0.0, edges[0] + 1e-6, edges[1] + 1e-6, edges[2] + 1e-6, 1 - 2**-53]
    drawn = draw(LOGITS.repeat(5, 1), [1.0] * 5, [1.0] * 5, below, [0] * 5)
    assert [one.token for one in drawn] == [0, 1, 2, 3, 4]


def test_tokens_outside_the_nucleus_are_never_drawn_even_at_the_edge() -> None:
    drawn = draw(LOGITS.flip(-1).repeat(2, 1), [1.0] * 2, [0.65] * 2, [0.0, 1 - 2**-53], [9, 9])
    assert [one.token for one in drawn] == [3, 4]
    assert [len(one.top) for one in drawn] == [2, 2]


def test_frequencies_follow_the_probabilities() -> None:
    count, chance = 20_000, random.Random(7)
    uniforms = [chance.random() for _ in range(count)]
    drawn = draw(LOGITS.repeat(count, 1), [0.8] * count, [0.95] * count, uniforms, [0] * count)
    expected = behaviour_logprobs(LOGITS, [0.8], [0.95])[0].exp().tolist()
    for token, p in enumerate(expected):
        share = sum(one.token == token for one in drawn) / count
        assert abs(share - p) <= 4 * math.sqrt(p * (1 - p) / count) + 1e-9


def test_a_row_does_not_depend_on_the_other_rows() -> None:
    torch.manual_seed(1)
    many = torch.randn(8, 1000)
    args = [0.3, 1.0, 0.0, 0.8, 1.0, 0.3, 0.0, 1.0], [1.0, 0.9, 1.0, 0.5, 1.0, 0.9, 0.9, 0.1]
    uniforms = [i / 8 for i in range(8)]
    together = draw(many, *args, uniforms, [i % 3 for i in range(8)])
    for i, one in enumerate(together):
        assert [one] == draw(many[i : i + 1], [args[0][i]], [args[1][i]], [uniforms[i]], [i % 3])


def test_alternatives_are_the_most_probable_first_and_include_their_own_logprobs() -> None:
    [drawn] = draw(LOGITS, [1.0], [1.0], [0.99], [3])
    plain = torch.log_softmax(LOGITS, -1)[0].tolist()
    assert [token for token, _ in drawn.top] == [0, 1, 2]
    assert [logprob for _, logprob in drawn.top] == pytest.approx(plain[:3], abs=1e-6)


@pytest.mark.parametrize("temperature", [1e-6, 1e-40, 5e-324])
def test_the_coldest_temperatures_draw_the_most_probable_token(temperature: float) -> None:
    (drawn,) = draw(torch.tensor([[30.0, -80.0, 31.0]]), [temperature], [0.9], [0.999], [0])
    assert (drawn.token, drawn.logprob) == (2, 0.0)


def test_broken_logits_give_no_finite_logprob() -> None:
    drawn = draw(torch.full((1, 5), float("nan")), [1.0], [1.0], [0.5], [0])
    assert not math.isfinite(drawn[0].logprob)
