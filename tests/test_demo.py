"""The demo's statistics on known numbers, its plot, its home; the whole of it in the slow tier."""

from __future__ import annotations

import doctest
import json
import math
import statistics
from pathlib import Path

import pytest
from PIL import Image

from onlinerl.config import Settings, load_settings
from onlinerl.datasets.simulate import Outcome
from onlinerl.datasets.users import TASTES, Act
from onlinerl.demo import account, story
from onlinerl.demo.account import Estimate, Journal, difference, held_out_scores, reward_per_opportunity
from onlinerl.demo.story import Budget
from onlinerl.errors import SettingsError
from onlinerl.serve import home_lock
from onlinerl.store.interactions import VersionCounts


def counts(
    opportunities: int, accepted: int, rejected: int, timeout: int, *, silent: int = 0, version: int = 0
) -> VersionCounts:
    return VersionCounts(
        version=version,
        opportunities=opportunities,
        shown=opportunities - silent,
        silent=silent,
        accepted=accepted,
        rejected=rejected,
        timeout=timeout,
    )


def test_reward_per_opportunity_is_that_of_the_single_rewards() -> None:
    tau = 0.1
    rewards = [0.9] * 30 + [-0.1] * 50 + [0.0] * 20
    estimate = reward_per_opportunity(counts(100, 30, 40, 10, silent=15), tau)
    assert estimate.mean == pytest.approx(statistics.mean(rewards))
    assert estimate.variance == pytest.approx(statistics.variance(rewards) / 100)
    half = 1.959964 * math.sqrt(statistics.variance(rewards) / 100)
    assert (estimate.low, estimate.high) == pytest.approx((0.22 - half, 0.22 + half))


def test_the_known_interval_of_a_share() -> None:
    # τ = 0 and nothing unrated: a plain proportion, 50 of 100, 0.5 ± 1.96·√(0.25/99)
    estimate = reward_per_opportunity(counts(100, 50, 50, 0), 0.0)
    assert estimate.mean == 0.5
    assert estimate.low == pytest.approx(0.40151, abs=1e-4)
    assert estimate.high == pytest.approx(0.59849, abs=1e-4)


def test_difference_adds_variances_and_keeps_the_sign() -> None:
    before = reward_per_opportunity(counts(250, 50, 180, 20), 0.1)
    after = reward_per_opportunity(counts(250, 100, 140, 10), 0.1)
    gain = difference(after, before)
    assert gain.mean == pytest.approx(0.2)
    # each is a 0/1 share less τ: p(1−p)/(n−1)
    error = math.sqrt(0.2 * 0.8 / 249 + 0.4 * 0.6 / 249)
    assert gain.low == pytest.approx(0.2 - 1.959964 * error)
    assert gain.low > 0
    assert difference(before, after).mean == pytest.approx(-0.2)
    same = difference(before, before)
    assert same.mean == 0
    assert same.low < 0 < same.high


def test_intervals_cover_as_often_as_they_say() -> None:
    # An A/A pair of shares at 0.3, 200 each: about 5 % of the intervals may miss 0.
    import random

    rng = random.Random(11)
    misses = 0
    for _ in range(800):
        a, b = (sum(rng.random() < 0.3 for _ in range(200)) for _ in range(2))
        one = reward_per_opportunity(counts(200, a, 200 - a, 0), 0.15)
        other = reward_per_opportunity(counts(200, b, 200 - b, 0), 0.15)
        gain = difference(one, other)
        misses += not gain.low <= 0 <= gain.high
    assert 0.025 < misses / 800 < 0.08


def test_nothing_to_count_is_not_a_number() -> None:
    assert math.isnan(reward_per_opportunity(counts(1, 1, 0, 0), 0.1).mean)


def test_held_out_scores() -> None:
    scores = held_out_scores(
        [("return x", "return x "), ("", "pass"), ("abcdefgxyz", "abcdefgklm")], TASTES["line"]
    )
    assert scores.prompts == 3
    assert scores.exact == pytest.approx(1 / 3)
    assert scores.similarity == pytest.approx((1 + 0 + 0.7) / 3)
    assert scores.fits == pytest.approx(2 / 3)
    assert scores.characters == pytest.approx(6)


def outcomes() -> list[Outcome]:
    acts = [Act.REJECT, Act.TIMEOUT, Act.REJECT, Act.ACCEPT] * 20 + [Act.ACCEPT, Act.LATE_ACCEPT] * 40
    made = [Outcome(1000.0 + i, "u", i // 80, act) for i, act in enumerate(acts)]
    return [*made, Outcome(990.0, "u", 0, Act.NOTHING), Outcome(991.0, "u", 0, None)]


def test_accept_rates_roll_over_the_rated() -> None:
    times, rates = account.accept_rates(list(reversed(outcomes())), window=40)
    assert times == sorted(times)
    assert times[0] == 1009.0
    assert rates[70] == pytest.approx(0.25, abs=0.03)
    assert rates[-1] == 1.0
    assert account.accept_rates([]) == ([], [])


@pytest.mark.parametrize("empty", [False, True])
def test_the_plot_is_a_picture_with_the_changes_marked(tmp_path: Path, empty: bool) -> None:
    plain, marked = tmp_path / "plain.png", tmp_path / "marked.png"
    seen = [] if empty else outcomes()
    account.draw(Journal(started=1000.0, outcomes=seen), plain)
    account.draw(
        Journal(started=1000.0, outcomes=seen, live=[(1000.0, 0), (1060.0, 1), (1090.0, 2), (1100.0, 1)]),
        marked,
    )
    assert plain.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    with Image.open(marked) as picture:
        picture.load()
        assert picture.size[0] >= 1000
        colors = {pixel for _, pixel in picture.convert("RGB").getcolors(1 << 20) or []}
    assert (214, 39, 40) in colors  # the way back is red
    assert plain.read_bytes() != marked.read_bytes()


def test_tables_hold_every_version() -> None:
    rows = [counts(250, 50, 180, 20), counts(10, 5, 5, 0, version=1)]
    rewards = {row.version: reward_per_opportunity(row, 0.1) for row in rows}
    table = account.version_table(rows, rewards, 0.1)
    assert table.row_count == 2
    assert list(table.columns[4].cells) == [str(rewards[0]), "(too few)"]
    assert list(table.columns[3].cells) == ["50 (20%)", "5 (50%)"]
    exam = held_out_scores([("a", "a")], TASTES["line"])
    assert account.exam_table({0: exam, 3: exam}).row_count == 2
    assert str(Estimate(0.2, 0.1, 0.3, 0.01)) == "+0.200 [+0.100, +0.300]"


def test_home_is_made_fresh_but_only_of_its_own(tmp_path: Path) -> None:
    home = tmp_path / "demo"
    story.prepare_home(home)
    (home / "weights" / "tab").mkdir(parents=True)
    (home / "weights" / "tab" / "file").write_text("x")
    (home / "onlinerl.db").write_text("x")
    outside = tmp_path / "mine"
    outside.mkdir()
    (outside / "letter").write_text("dear")
    (home / "runs").symlink_to(outside)
    (home / "notes.txt").write_text("mine")
    story.prepare_home(home)
    assert {entry.name for entry in home.iterdir()} == {story.MARKER, "notes.txt", "serve.lock"}
    assert (outside / "letter").read_text() == "dear"


def test_home_of_somebody_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "onlinerl.db").write_text("precious")
    with pytest.raises(SettingsError, match="nothing was touched"):
        story.prepare_home(tmp_path)
    assert {entry.name for entry in tmp_path.iterdir()} == {"onlinerl.db"}


def test_home_in_use_is_left_alone(tmp_path: Path) -> None:
    home = tmp_path / "demo"
    story.prepare_home(home)
    (home / "onlinerl.db").write_text("in use")
    with home_lock(home), pytest.raises(SettingsError, match="another"):
        story.prepare_home(home)
    assert (home / "onlinerl.db").read_text() == "in use"


def test_what_the_person_set_wins() -> None:
    plain = story.demo_settings(Settings())
    assert plain.home == story.HOME
    assert plain.policies["tab"].publish == "immediately"
    assert plain.server.port == 0
    chosen = story.demo_settings(load_settings(None, ["policies.tab.train.lr=3e-5"], home=Path("elsewhere")))
    assert chosen.home == Path("elsewhere")
    assert chosen.policies["tab"].train.lr == 3e-5
    assert chosen.policies["tab"].train.batch == plain.policies["tab"].train.batch
    with pytest.raises(SettingsError, match="one policy"):
        story.demo_settings(load_settings(None, ["policies.other.publish=candidate"]))


def test_examples_in_the_docstrings() -> None:
    result = doctest.testmod(account)
    assert result.attempted
    assert not result.failed


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_whole_demo_with_a_small_budget(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    home = tmp_path / "demo"
    settings = load_settings(None, ["policies.tab.train.version_every=2"], home=home)
    story.run(settings, budget=Budget(baseline=60, steps=4, final=40, rolled_back=12, held_out=8))
    record = json.loads((home / "demo.json").read_text())
    assert len(record["versions"]) >= 3
    assert record["versions"][0]["version"] == 0
    assert sum(row["opportunities"] for row in record["versions"]) <= record["traffic"]["requests"]
    assert record["difference"]["low"] < record["difference"]["mean"] < record["difference"]["high"]
    assert set(record["switch_seconds"]) == {"rollback", "promote"}
    assert max(record["switch_seconds"].values()) < 5
    assert record["held_out"]["0"]["prompts"] == 8
    with Image.open(home / "demo.png") as picture:
        picture.load()
    printed = capsys.readouterr().out
    assert "one short line" in printed
    assert "reward per opportunity" in printed
