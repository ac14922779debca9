"""The benchmark of the trainer runs, and its arithmetic is right. What it measures is not judged here."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
from bench import cleaning, decode, large, precision
from bench.trainer import main

from tests.test_batches import CPU, build, draw


def test_flops_of_a_step_by_hand() -> None:
    shape = {
        "hidden_size": 4, "intermediate_size": 6, "num_attention_heads": 2, "num_key_value_heads": 1,
        "num_hidden_layers": 3, "vocab_size": 10,
    }  # fmt: skip
    # 4×4 queries, 4×2 keys, 4×2 values, 4×4 output, 4×6 gate, 4×6 up, 6×4 down: 120 weights a layer
    case = large.Context("x", size=7, answer=2, samples=2)
    samples = case.draw(10)
    assert [(len(s.prompt_ids), len(s.completion_ids)) for s in samples] == [(5, 2)] * 2
    read, judged, squares = 2 * 6, 2 * 2, 2 * 6 * 6  # the last answer token of a sample is not read
    attention = 6 * 3 * 4 * squares
    assert large.useful(shape, samples, 0) == 6 * 360 * read + 6 * 4 * 10 * judged + attention
    # both matrices of rank 2 for each map: 2 × (8 + 6 + 6 + 8 + 10 + 10 + 10) a layer
    adapter = 6 * (3 * 2 * 58) * read
    assert large.useful(shape, samples, 2) == 4 * 360 * read + 4 * 4 * 10 * judged + attention + adapter


def test_the_shape_is_that_of_a_model_of_one_and_a_half_billion() -> None:
    count = large._count(large.SHAPES["qwen2.5-coder-1.5b-random"])
    assert count == {"layers' linear maps (N)": 1_310_195_712, "head (H·V)": 233_373_696}


@pytest.mark.filterwarnings("ignore")  # TRL's and what it brings
def test_the_large_comparison_runs_on_a_tiny_model(tmp_path: Path) -> None:
    sides = "ours,trl" if importlib.util.find_spec("trl") else "ours"
    out = tmp_path / "large.json"
    main(
        ["--model", "tiny-random", "--contexts", "40", "--tokens", "80", "--answer", "4", "--repeats", "1",
         "--training", "lora,full", "--inline", "--sides", sides, "--out", str(out)]
    )  # fmt: skip
    report = json.loads(out.read_text())
    assert report["wrong"] == []
    rows = {
        (r["side"], r["training"], r["context"], r.get("gradient_checkpointing")): r for r in report["rows"]
    }
    mine = {key for key in rows if key[0] == "ours"}
    assert mine == {("ours", training, context, None) for training, context in
                    (("LoRA", "40"), ("full", "40"), ("full", "20-40"))}  # fmt: skip
    assert all(row["tokens_per_second"] > 0 for row in rows.values())
    if sides == "ours,trl":
        assert len(report["summary"]) == 3
        assert all("ratio" in row for row in report["summary"])
        ours, theirs = rows["ours", "full", "40", None], rows["trl", "full", "40", False]
        # the same loss and the same gradient on both sides, or the comparison compares nothing
        for name in ("first_loss", "first_gradient_norm"):
            assert ours[name] == pytest.approx(theirs[name], rel=1e-3)


def test_precision_is_compared_on_the_same_gradient(tmp_path: Path) -> None:
    folder = build("qwen2", tmp_path)
    drawn = [(sample, 0.1 * (place % 7)) for place, sample in enumerate(draw(12)) if any(sample.loss_mask)]
    ways = precision.compare(folder, drawn, 6, CPU, ["bfloat16", "float16"])
    assert ways.keys() == {"float32", "bfloat16", "float16", "float16 unscaled"}
    assert {len(rows) for rows in ways.values()} == {2}
    for name in ("bfloat16", "float16"):
        for row in ways[name]:
            assert 0 < row["relative_error"] < 0.1
            assert row["ratio"] == pytest.approx(1.0, abs=0.1)
    error = {name: sum(row["relative_error"] for row in ways[name]) for name in ("bfloat16", "float16")}
    assert error["float16"] < error["bfloat16"], "ten bits of fraction against seven"
    assert ways["float16"][0]["scale"] > 1.0


def test_the_benchmark_of_decode_steps_runs_and_finds_nothing_wrong(tmp_path: Path) -> None:
    out = tmp_path / "decode.json"
    code = decode.main(
        ["--models", "tiny-random", "--rows", "2,4", "--new", "12", "--size", "24", "--offline", "3x4",
         "--device", "cpu", "--seconds", "100", "--out", str(out)]
    )  # fmt: skip
    report = json.loads(out.read_text())
    assert (code, report["wrong"], report["left_out"]) == (0, [], [])
    assert [row["rows"] for row in report["rows"]] == [4, 2, 4]
    assert all(row["shapes"] for row in report["rows"])
    assert report["profile"]["any shape"]["aten_ops"] > 50


def test_the_benchmark_of_decode_steps_notices_other_answers() -> None:
    course = decode.Course([[1, 2], [3, 4]], [[-1.0, -1.0], [-1.0, -1.0]])
    other = decode.Course([[1, 2], [3, 5]], [[-1.0, -1.1], [-1.0, -9.0]])
    found = decode.compare(course, other)
    assert (found["equal"], round(found["most"], 6)) == (0.5, 0.1)
    wrong: list[str] = []
    decode.check(wrong, "loose", found, most=0, mean=0.05)
    assert wrong == []
    decode.check(wrong, "exact", found, most=0.2, mean=0.05)
    assert len(wrong) == 1


def test_the_benchmark_of_cleaning_runs_and_both_sides_decide_alike(tmp_path: Path) -> None:
    out = tmp_path / "cleaning.json"
    assert cleaning.main(["--requests", "500", "--out", str(out)]) == 0
    results = json.loads(out.read_text())["results"]
    assert results["one user, 5 places"]["left_out"]["near_duplicate"] > 50
    assert all(case["wrong"] == 0 and case["ratio"] > 0 for case in results.values())
