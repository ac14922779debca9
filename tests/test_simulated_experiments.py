"""The simulations in small, with fixed seeds: A/A holds α, power is there, bad versions end early. And the
committed report says what its page says, and meets what was asked for."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from bench.experiments import ladder, studies, teams
from bench.experiments.__main__ import PAGE, PLOT, RESULT
from bench.experiments.population import COLUMNS, People, Version, days, taken, truth
from bench.experiments.report import draw, page, tables
from bench.experiments.sequential import firsts, msprt, published_mixture, running, share_of
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binomtest

from onlinerl import config
from onlinerl.experiments.analysis import Observations, contrast, radius, read

# ------------------------------------------------------------------------------- what they rest on


def test_running_totals_are_those_of_read() -> None:
    rng = np.random.default_rng(1)
    table = days(rng, People.draw(rng, 5_000), Version(), history=0.7)
    rows = rng.integers(0, 5_000, (3, 400))
    treated = rng.random((3, 400)) < 0.4
    columns = taken(table, rows, COLUMNS[:4])
    found = contrast(*running(treated, columns))
    low = found.estimate - np.sqrt(found.variance) * radius(found.size, alpha=0.05, tuned=1000)
    for one, units in ((0, 90), (1, 400), (2, 251)):
        arms = [
            Observations.of(
                **{
                    name: column[one, :units][treated[one, :units] == arm]
                    for name, column in zip(COLUMNS, columns, strict=False)
                }
            )
            for arm in (False, True)
        ]
        expected = read(arms[0], arms[1], alpha=0.05, tuned=1000)
        assert expected.cuped
        assert low[one, units - 1] == pytest.approx(expected.low, rel=1e-9)
        assert found.saved[one, units - 1] == pytest.approx(expected.saved, rel=1e-9)


def test_the_population_is_what_it_says() -> None:
    rng = np.random.default_rng(2)
    table = days(rng, People.draw(rng, 200_000), Version())
    asked = table["opportunities"]
    assert truth(table, "accepted") == pytest.approx(0.25, abs=0.005)
    assert asked.mean() == pytest.approx(42, abs=1)
    assert np.percentile(asked, [50, 99]) == pytest.approx([23, 300], rel=0.05)
    assert truth(table, "slow") == pytest.approx(0.05, abs=0.002)
    assert truth(table, "errors") == pytest.approx(0.005, abs=0.0005)


def test_first_crossings_by_hand() -> None:
    crossed = np.array([[False, True, False], [False, False, False], [True, True, True]])
    assert list(firsts(crossed)) == [2.0, np.inf, 1.0]


@given(st.integers(0, 500))
def test_a_proportions_interval_is_scipys(hits: int) -> None:
    found = share_of(hits, 500)
    exact = binomtest(hits, 500).proportion_ci(0.95, method="exact")
    assert (found["low"], found["high"]) == pytest.approx((exact.low, exact.high), abs=1e-9)


def test_msprt_with_the_same_mixture_is_the_same_test() -> None:
    # Λ ≥ 1/α where |Δ| exceeds the two-sided radius, when τ² = 2σ²η²
    rng = np.random.default_rng(3)
    size = np.arange(1, 2_001.0)
    difference = np.cumsum(rng.normal(0, np.sqrt(2 * 0.3), (200, 2_000)), axis=1) / size
    eta2 = (-2 * np.log(0.05) + np.log(1 - 2 * np.log(0.05))) / 1000
    rejects = msprt(
        difference, np.full_like(size, 0.3), size, mixture=np.full_like(size, 2 * 0.3 * eta2), alpha=0.05
    )
    beyond = np.abs(difference) > np.sqrt(2 * 0.3 / size) * radius(size, alpha=0.05, tuned=1000)
    assert (rejects == beyond).all()
    assert rejects.any()


def test_msprts_likelihood_ratio_by_hand() -> None:
    # σ² = 1, τ² = 0.5, n = 10, Δ = 1: √(2/7) · exp(100 · 0.5 / (4 · 7)) = 0.5345 · 5.964 = 3.19
    one = np.ones(1)
    for alpha, rejected in ((1 / 3.18, True), (1 / 3.20, False)):
        assert msprt(one, one, 10 * one, mixture=0.5 * one, alpha=alpha)[0] == rejected
    # calcTau(0.05, 1, 100) of mixtureSPRT
    assert published_mixture(0.05, 100) == pytest.approx(0.97, abs=0.005)


# ---------------------------------------------------------------------------------------- in small


def test_aa_holds_alpha_and_a_t_test_at_every_look_does_not() -> None:
    found = studies.null(np.random.default_rng(4), experiments=400, units=1_500)
    false = found["false promotions"]
    assert false["plain"]["share"] <= 0.05
    assert false["cuped"]["share"] <= 0.05
    assert false["cuped, missed at either end"]["low"] <= 0.05
    assert false["a t-test at every look"]["low"] > 0.15
    assert found["mismatch alarms"]["at 0.05"]["share"] <= 0.05
    assert found["mismatch alarms"]["at 0.001"]["low"] <= 0.001


def test_a_lift_of_ten_percent_is_found_and_history_saves_a_quarter() -> None:
    found = studies.power(np.random.default_rng(5), experiments=120, units=7_000)
    ways = found["ways"]
    assert ways["no history"]["80 % found"] < 7_000
    assert ways["no history"]["mean, at most all"] <= ways["mSPRT, the authors' mixture"]["mean, at most all"]
    assert ways["no history"]["mean, at most all"] > 0.8 * found["fixed horizon"]["units for 80 %"]
    day, plain = ways["history of a day"], ways["no history"]
    assert day["mean, at most all"] < 0.8 * plain["mean, at most all"]
    assert found["fixed horizon"]["found"]["share"] == pytest.approx(0.8, abs=0.12)


def test_guardrails_leave_the_same_version_alone() -> None:
    found = studies.guards(np.random.default_rng(6), experiments=150, units=1_500)
    assert found["A/A at 0.05"]["any"]["share"] <= 0.05
    assert found["A/A at 0.5"]["any"]["low"] <= 0.05
    assert all(share["low"] <= 0.05 for share in found["at the margin, at 0.05"].values())


def test_sessions_of_ten_people_hold_alpha_and_other_units_do_not() -> None:
    found = teams.sessions(np.random.default_rng(7), teams=200, length=25)["false promotions"]
    assert found["by session, analysed by session"]["share"] <= 0.05
    assert found["tastes differ, no better for this team"]["share"] <= 0.05
    for wrong in ("by session, analysed by request", "by person, analysed by session"):
        assert found[wrong]["low"] > 0.1


@pytest.mark.parametrize("fault", ["accepted 30 % less", "latency × 3", "errors 5 %"])
def test_a_planted_bad_version_is_taken_back_at_five_percent(fault: str) -> None:
    rng = np.random.default_rng(8)
    for _ in range(3):
        run = ladder.whole(rng, ladder.FAULTS[fault], (0.05, 0.25, 0.5), 5_000, 2, 96)
        assert (run["end"], run["share"]) == ("abort", 0.05)
        assert run["users"] <= 251 + 3 * 15  # of 5,000 at 5 %, three standard deviations


def test_a_better_version_climbs_the_stages_and_goes_live() -> None:
    stages = config.Experiments().stages
    run = ladder.whole(np.random.default_rng(9), Version(lift=0.25), stages, 5_000, 6, 8)
    assert (run["end"], run["share"]) == ("promote", 0.5)
    assert run["reason"].startswith("v1 is better than v0: better by ")


# ----------------------------------------------------------------------------- the committed report

REPORT: dict[str, Any] = json.loads(RESULT.read_text("utf-8"))


def test_the_page_has_the_tables_of_the_report() -> None:
    text = PAGE.read_text("utf-8")
    assert page(text, tables(REPORT)) == text, "run python -m bench.experiments, or restore its tables"
    assert PLOT.name in text


def test_a_page_without_a_place_for_a_table_is_refused() -> None:
    with pytest.raises(SystemExit, match="no place for the table null"):
        page("nothing", {"null": ""})


def test_the_plot_is_drawn(tmp_path: Any) -> None:
    draw(REPORT, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 20_000


def test_the_report_meets_what_was_asked_for() -> None:
    null = REPORT["null"]
    assert (null["experiments"], null["units"]) == (10_000, 5_000)
    for name in ("plain", "cuped", "plain, missed at either end", "cuped, missed at either end"):
        assert null["false promotions"][name]["high"] <= 0.05
    assert null["mismatch alarms"]["at 0.001"]["share"] <= 0.001
    assert null["mismatch alarms"]["at 0.05"]["high"] <= 0.05
    assert REPORT["spending"]["with spending"]["high"] <= 0.05
    for stage in ("A/A at 0.05", "A/A at 0.5"):
        assert REPORT["guards"][stage]["any"]["high"] <= 0.05
    assert all(share["high"] <= 0.05 for share in REPORT["guards"]["at the margin, at 0.05"].values())
    ways = REPORT["power"]["ways"]
    ours, theirs = ways["no history"], ways["mSPRT, the authors' mixture"]
    assert all(ours[key] <= theirs[key] for key in ("half found", "80 % found", "mean, at most all"))
    assert REPORT["power"]["saved"]["history of a day"] >= 0.25
    false = REPORT["sessions"]["false promotions"]
    assert false["by session, analysed by session"]["high"] <= 0.05
    planted = [
        row
        for row in REPORT["ladder"]["rows"]
        if row["users"] == 5_000
        and row["stages"][0] == 0.05
        and row["version"] in ("accepted 30 % less", "latency × 3", "errors 5 %")
    ]
    assert len(planted) == 3
    for row in planted:
        # A loss of accepts varies most: 2 of 200 got as far as the next stage, and were taken back there.
        assert set(row["ends"]) <= {"abort at 5%", "abort at 25%"}
        assert row["ends"]["abort at 5%"] >= 0.99 * row["experiments"]
