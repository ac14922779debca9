"""Verdict to reward: the table, τ, timeouts by source, retention, a client's own score."""

from __future__ import annotations

from dataclasses import replace

import pytest

from onlinerl.config import Rewards
from onlinerl.flow.channel import Channel
from onlinerl.learning.rewards import ComputeReward, RewardTable, auto_tau
from onlinerl.records import Sample, Scored, Verdict


def sample(verdict: Verdict, source: str = "native") -> Sample:
    return Sample(
        id="a", index=0, policy="tab", version=0, project="p", user="u", at=0.0, prompt_ids=(1, 2),
        completion_ids=(3, 4), behavior_logprobs=(-1.0, -1.0), loss_mask=(True, True), temperature=1.0,
        top_p=1.0, language="python", multiline=False, verdict=verdict, verdict_source=source,
        completion="return x",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("verdict", "source", "reward"),
    [
        (Verdict.ACCEPTED, "native", 0.8),
        (Verdict.REJECTED, "native", -0.2),
        (Verdict.SILENT, "server", 0.0),
        (Verdict.TIMEOUT, "native", -0.1),
        (Verdict.TIMEOUT, "tabby", -0.1),
        (Verdict.TIMEOUT, "continue", -0.2),
        (Verdict.TIMEOUT, "fork", -0.2),
    ],
)
def test_table(verdict: Verdict, source: str, reward: float) -> None:
    scored = RewardTable(tau=0.2, timeout_weight=0.5).score(sample(verdict, source))
    assert scored.reward == pytest.approx(reward)
    assert sum(scored.parts.values()) == scored.reward


def test_retention_pays_by_the_share_that_stayed() -> None:
    table = RewardTable.of(Rewards(retention_bonus=0.5), tau=0.2)
    kept = replace(sample(Verdict.ACCEPTED), retained_characters=4)
    assert table.parts(kept) == {"accepted": 0.8, "retained": 0.25}
    grown = replace(kept, retained_characters=80)
    assert table.score(grown).reward == pytest.approx(1.3)
    assert table.parts(replace(sample(Verdict.REJECTED), retained_characters=4)) == {"rejected": -0.2}


def test_own_score_takes_the_verdicts_place() -> None:
    assert RewardTable(tau=0.2).score(replace(sample(Verdict.REJECTED), score=0.7)).reward == 0.7


@pytest.mark.parametrize(
    ("accepted", "opportunities", "tau"), [(0, 0, 0.0), (18, 100, 0.09), (90, 100, 0.25), (0, 50, 0.0)]
)
def test_auto_tau(accepted: int, opportunities: int, tau: float) -> None:
    assert auto_tau(accepted, opportunities, 0.25) == pytest.approx(tau)


def test_auto_tau_does_not_ratchet_with_silence() -> None:
    """Half of the traffic falls silent and the other half is accepted as before: τ must fall, not stay."""
    assert auto_tau(10, 100, 0.25) < auto_tau(20, 100, 0.25)


def test_worker_keeps_the_order() -> None:
    samples: Channel[Sample] = Channel.create("samples", item=Sample)
    scored: Channel[Scored] = Channel.create("scored", item=Scored)
    group = ComputeReward(RewardTable(tau=0.25)).start(input=samples, output=scored)
    for verdict in (Verdict.ACCEPTED, Verdict.SILENT, Verdict.REJECTED):
        samples.put(sample(verdict))
    samples.close()
    assert [one.reward for one in scored] == [0.75, 0.0, -0.25]
    assert group.wait(5)
