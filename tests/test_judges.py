"""Local judges: what is right scores high, what games them scores low, and the parts say why."""

from __future__ import annotations

import doctest
import itertools
import random
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from onlinerl import config
from onlinerl.datasets import fim
from onlinerl.datasets.fim import FimPrompt
from onlinerl.datasets.users import similarity
from onlinerl.learning.judges import (
    HIGHEST,
    Judge,
    Judgement,
    ReferenceJudge,
    SimilarityJudge,
    base,
    make_judge,
    reference,
    syntax,
)
from onlinerl.learning.judges.reference import WEIGHTS
from onlinerl.learning.judges.syntax import parses

PROMPT = FimPrompt(
    prefix="class Box:\n    def __init__(self, size):\n        self.size = size\n        ",
    suffix="\n\n    def empty(self):\n        return not self.items\n",
    middle="self.items = []",
    path="box.py",
    language="python",
)
JUDGE = ReferenceJudge()


@pytest.fixture(scope="module")
def prompts() -> tuple[FimPrompt, ...]:
    """Real ones, from the standard library."""
    return fim.collect(limit=60, seed=3).prompts


def score(completion: str, prompt: FimPrompt = PROMPT) -> float:
    found = JUDGE.score(prompt, completion).score
    assert found is not None
    return found


def test_what_the_author_wrote_scores_ten() -> None:
    judged = JUDGE.score(PROMPT, PROMPT.middle)
    assert judged.score == pytest.approx(10)
    assert judged.parts == pytest.approx({name: 10 * weight for name, weight in WEIGHTS.items()})
    assert sum(WEIGHTS.values()) == pytest.approx(1)


def test_better_completions_score_higher() -> None:
    order = ["self.items = []", "self.items = {}", "self.item = ()", "size = 3", "while"]
    found = [score(one) for one in order]
    assert found == sorted(found, reverse=True)
    assert found[1] > 7
    assert found[-1] < 1.5


def test_parts_add_up_to_the_score_and_stay_in_the_scale(prompts: tuple[FimPrompt, ...]) -> None:
    rng = random.Random(0)
    for prompt in prompts:
        for completion in (
            prompt.middle,
            rng.choice(prompts).middle,
            prompt.middle[: rng.randint(0, 30)],
            "((",
        ):
            judged = JUDGE.score(prompt, completion)
            assert judged.score is not None
            assert 0 <= judged.score <= HIGHEST
            assert sum(judged.parts.values()) == pytest.approx(judged.score)
            assert min(judged.parts.values()) >= 0


def test_the_formula_by_hand() -> None:
    # three of fifteen characters match and stand at the start; "sel" parses, and nothing comes twice
    s, f = 6 / 18, 3 / 15
    c = (0.4 * s + 0.2 * f) / 0.6
    judged = JUDGE.score(PROMPT, "sel")
    assert judged.parts == pytest.approx(
        {"similarity": 4 * s, "first_line": 2 * f, "parse": 2.5 * c, "repetition": 1.5 * c}
    )


def test_silence() -> None:
    assert score("") == score("  \n ") == 0
    nothing = replace(PROMPT, middle="")
    assert score("", nothing) == 10
    assert score("self.items = []", nothing) == 0
    similar = SimilarityJudge()
    assert similar.score(PROMPT, "").score == 0
    assert similar.score(nothing, "").score == 10


def test_broken_syntax_costs_its_part_of_what_was_earned() -> None:
    good, bad = JUDGE.score(PROMPT, "self.items = ()"), JUDGE.score(PROMPT, "self.items = (]")
    assert good.parts["parse"] > 0
    assert bad.parts["parse"] == 0
    assert bad.score is not None
    assert bad.score < 0.8 * score("self.items = ()")


HACKS: Mapping[str, Callable[[FimPrompt], str]] = {
    "valid and meaningless": lambda p: "pass",
    "a comment": lambda p: "# TODO",
    "a flood": lambda p: "x = 1\n" * 800,
    "one word again and again": lambda p: "self." * 100,
    "the text before": lambda p: p.prefix,
    "the line before": lambda p: p.prefix.rstrip().rpartition("\n")[2].strip(),
    "the text behind": lambda p: p.suffix,
    "everything around": lambda p: p.prefix + p.suffix,
    "any identifier of the file": lambda p: " ".join(sorted(set(p.prefix.split()))),
    "spaces": lambda p: " " * 500,
    "NUL": lambda p: "\0" * 10,
}


@pytest.mark.parametrize("name", HACKS)
def test_hacks_score_low(name: str, prompts: tuple[FimPrompt, ...]) -> None:
    found = [score(HACKS[name](prompt), prompt) for prompt in prompts]
    honest = [score(prompt.middle[: len(prompt.middle) // 2], prompt) for prompt in prompts]
    assert sum(found) / len(found) < 1.5
    assert sum(honest) / len(honest) > 4


def test_going_on_into_the_text_behind_costs_more_the_longer_it_is(prompts: tuple[FimPrompt, ...]) -> None:
    """The base model over-generates (its card): writing what is there already must not pay."""
    means = []
    for size in (0, 40, 160, 640):
        found = [score(prompt.middle + prompt.suffix[:size], prompt) for prompt in prompts]
        means.append(sum(found) / len(found))
    assert means == sorted(means, reverse=True)
    assert means[-1] < 0.6 * means[0]


def test_repetition_is_seen_unless_the_author_repeats_too() -> None:
    assert JUDGE.score(PROMPT, "self.items = []\n        self.items = []").parts["repetition"] == 0
    assert JUDGE.score(PROMPT, "self.size = size").parts["repetition"] == 0  # the line above
    behind = replace(PROMPT, suffix="\n        self.items = []\n", middle="self.count = 0")
    assert JUDGE.score(behind, "self.items = []").parts["repetition"] == 0  # the line below
    stubborn = replace(PROMPT, middle="self.size = size")
    assert JUDGE.score(stubborn, "self.size = size").score == pytest.approx(10)


# ------------------------------------------------------------------------------------------ syntax


def test_a_wrong_indentation_is_seen_although_tree_sitter_lets_it_pass() -> None:
    wrong = "self.items = []\n      return 1"
    assert parses(PROMPT, wrong) is False
    assert syntax._errors("python", PROMPT.prefix + wrong + PROMPT.suffix) == 0


@pytest.mark.parametrize(
    ("prefix", "suffix", "middle"),
    [
        ("        x = 1\n        ", "\n    def g(self):\n        return 1\n", "y = 2"),  # two blocks deep
        ("docs of it.\n    '''\n    x = 1\n    ", "\n    return x\n", "y = 2"),  # begins in a docstring
        ("f(a,\n  b)\nx = [\n    ", ",\n    2,\n]\ndef g():\n    '''Never ends\n", "1"),  # ends in one
        ("    if a:\n        x = 1\n    ", "\n    while True:\n", "y = 2"),  # ends with an opened block
        ("      b, c)\nx = ", "\ny = (1,\n", "2"),  # begins and ends in brackets
    ],
)
def test_windows_are_framed(prefix: str, suffix: str, middle: str) -> None:
    prompt = FimPrompt(prefix, suffix, middle, language="python")
    assert syntax._frame(prompt) is not None
    assert parses(prompt, middle) is True
    assert parses(prompt, middle + " = = 3") is False
    assert parses(prompt, "0") is True


def test_the_verdict_on_a_window_is_that_of_the_whole_file(prompts: tuple[FimPrompt, ...]) -> None:
    same = asked = 0
    for prompt in prompts:
        text = (fim.standard_library() / prompt.path).read_text("utf-8")
        before, found, after = text.partition(prompt.prefix + prompt.middle + prompt.suffix)
        if not found or syntax._syntax_error(text) is not None:
            continue
        for completion in (prompt.middle[: len(prompt.middle) // 2], prompt.middle + "(", "x\n  y = 1"):
            whole = before + prompt.prefix + completion + prompt.suffix + after
            asked += 1
            same += parses(prompt, completion) is (syntax._syntax_error(whole) is None)
    assert asked > 120
    assert same / asked > 0.95


def test_without_a_frame_only_the_completion_s_own_errors_count() -> None:
    prompt = FimPrompt("def f(:\n    x = ", "\n    y = ]\n", "1 = 2 +", language="python")
    assert syntax._frame(prompt) is None  # the author's own line does not parse
    assert parses(prompt, prompt.middle) is True
    assert parses(prompt, "1 +) (] [") is False


def test_without_a_grammar_the_part_is_left_out_and_the_others_grow() -> None:
    for language in ("cobol", "", "os", "rust"):
        other = replace(PROMPT, language=language)
        if parses(other, "x") is not None:  # somebody has that grammar
            continue
        judged = JUDGE.score(other, PROMPT.middle)
        assert judged.score == pytest.approx(10)
        assert judged.parts == pytest.approx(
            {name: 10 * WEIGHTS[name] / 0.75 for name in ("similarity", "first_line", "repetition")}
        )


def test_odd_text_is_judged_and_not_raised() -> None:
    deep = "(" * 5000
    for completion in ("\0", "\ud800", deep, "'\\d'", "é\u2028\u2029", "\r\n", "\x0c"):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert 0 <= score(completion) <= 10
    assert parses(PROMPT, "x = '\\d'") is True
    assert parses(PROMPT, deep) is False


@hypothesis_settings(max_examples=40, deadline=None)
@given(st.text(max_size=200), st.text(max_size=80))
def test_any_text_gets_a_score_in_the_scale_twice_the_same(completion: str, middle: str) -> None:
    prompt = replace(PROMPT, middle=middle)
    assert 0 <= score(completion, prompt) <= 10
    assert JUDGE.score(prompt, completion) == JUDGE.score(prompt, completion)


# -------------------------------------------------------------------------------------- similarity


async def test_similarity_is_the_card_s_scale(prompts: tuple[FimPrompt, ...]) -> None:
    pairs = [(one, other.middle) for one, other in itertools.pairwise(prompts)]
    judged = await SimilarityJudge().judge(pairs)
    assert [one.score for one in judged] == [10 * similarity(text, prompt.middle) for prompt, text in pairs]
    assert all(one.parts == {"similarity": one.score} for one in judged)


def test_a_long_completion_is_compared_in_bounded_time_and_never_better() -> None:
    middle = "self.items = [one for one in other if one]"
    early = middle + "x = 1\n" * 500
    assert base.closeness(early, middle) == pytest.approx(similarity(early, middle))
    late = "y" * 1990 + middle + "z" * 100
    assert base.closeness(late, middle) <= similarity(late, middle) < 0.05
    assert base.closeness(middle + "x" * 10**6, middle) < 1e-3
    long = "\n".join(f"value_{number} = {number}" for number in range(400))
    assert base.closeness(long, long) == 1  # an author who wrote much is matched in full


# --------------------------------------------------------------------------------------- make_judge


@pytest.mark.parametrize(("kind", "made"), [("reference", ReferenceJudge), ("similarity", SimilarityJudge)])
async def test_settings_make_judges(kind: str, made: type, tmp_path: Path) -> None:
    judge: Judge = make_judge(config.Judge.model_validate({"kind": kind}), tmp_path / "cache")
    assert isinstance(judge, made)
    assert judge.name == kind
    judged = await judge.judge([(PROMPT, PROMPT.middle), (PROMPT, "")])
    assert [one.score for one in judged] == [pytest.approx(10), 0]
    assert await judge.judge([]) == []
    assert list(tmp_path.iterdir()) == []


def test_every_setting_of_a_judge_is_read() -> None:
    folder = Path(reference.__file__).parent
    text = "\n".join(file.read_text() for file in folder.glob("*.py"))
    for name, item in config.Judge.model_fields.items():
        assert f"settings.{name}" in text, name
        assert item.description, name


def test_examples_in_the_docstrings() -> None:
    for module in (base, reference, syntax):
        assert doctest.testmod(module).failed == 0
    assert Judgement.example().score == sum(Judgement.example().parts.values())
