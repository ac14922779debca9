"""The learning itself, small: on held-out files the embedded model must become better, beyond chance."""

from __future__ import annotations

from pathlib import Path

import pytest

from onlinerl.config import load_settings
from onlinerl.validate.run import run

SETTINGS = (
    "policies.tab.engine.threads=1",
    "policies.tab.sampling.max_tokens=20",
    # The demo's: the taste is far from what the base writes, and its bands are for finer steps.
    "policies.tab.train.threads=1",
    "policies.tab.train.lr=1e-4",
    "policies.tab.train.minibatches=1",
    "policies.tab.train.version_every=3",
    "policies.tab.train.guards.kl=2.0",
    "policies.tab.train.guards.length_low=0.1",
    "validation.tastes=[line]",
    "validation.characters=320",
    "validation.completions=512",
    "validation.train_prompts=400",
    "validation.test_prompts=120",
    "validation.seed=7",
)


@pytest.mark.slow  # real weights: some minutes on one core
@pytest.mark.timeout(1800)
def test_learning_beats_the_base_by_three_standard_errors(tmp_path: Path) -> None:
    tree = run(load_settings(overrides=SETTINGS, home=tmp_path), quiet=True)
    assert tree["stopped_by"] is None
    base, learned = (stage["metrics"]["sampled"]["reward"] for stage in tree["stages"])
    gain = tree["stages"][-1]["gains"]["sampled"]["reward"]
    print(
        f"reward per opportunity: {base['mean']:+.3f} → {learned['mean']:+.3f}, gain {gain['mean']:+.3f} "
        f"± {gain['error']:.3f}; seconds a step {tree['seconds_per_step']}, in all {tree['seconds']}"
    )
    assert gain["mean"] > 3 * gain["error"]
    # silence is no way to please this taste: what is shown must have become better
    shown = [stage["metrics"]["sampled"]["accept_shown"]["mean"] for stage in tree["stages"]]
    assert shown[1] > shown[0]
