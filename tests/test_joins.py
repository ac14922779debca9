"""Which interaction feedback means: by prompt, by text that runs together, and never a wrong one."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from onlinerl.gateway import joins
from onlinerl.records import Event, Feedback, Interaction, Verdict
from onlinerl.text.templates import QWEN

LONG = "import os\n\n\ndef walk(folder):\n    for name in os.listdir(folder):\n        path = "
SUFFIX = "\n    return None\n"


def served(
    prefix: str, completion: str, *, id: str = "cmpl-a", user: str = "u1", at: float = 100.0, **fields: object
) -> Interaction:
    base = replace(Interaction.example(), id=id, user=user, at=at, prompt=QWEN.render(prefix, SUFFIX))
    return replace(base, completion=completion, **fields)  # type: ignore[arg-type]


def said(prefix: str, shown: str | None, *, user: str = "u1", suffix: str = SUFFIX) -> Feedback:
    return Feedback(
        source="continue",
        event=Event.ACCEPTED,
        at=200.0,
        project="default",
        user=user,
        prompt=QWEN.render(prefix, suffix),
        prefix=prefix,
        suffix=suffix,
        displayed_text=shown,
    )


def parse(one: Interaction) -> tuple[str, str] | None:
    return QWEN.parse(one.prompt)


def find(feedback: Feedback, *served_: Interaction) -> tuple[str, int] | None:
    """(id, characters displayed), with the candidates that the store would give."""
    same = [one for one in served_ if one.prompt == feedback.prompt]
    match = joins.find(feedback, same, lambda: served_, parse)
    return (match.interaction.id, match.displayed) if match else None


@pytest.mark.parametrize(
    ("completion", "shown", "expected"),
    [
        ("return x", "return x", 8),
        ("return x", "retu", 4),
        (" return x", "return x", 9),
        ("  return x", "return", 8),
        ("return x", "return y", None),
        ("return x", "eturn", None),
        ("return x", "return x + 1", None),
        ("return x", "", None),
        ("", "", 0),
        ("  \n", "", 3),
    ],
)
def test_what_counts_as_displayed(completion: str, shown: str, expected: int | None) -> None:
    assert joins.displayed(completion, shown) == expected


def test_by_the_very_prompt() -> None:
    assert find(said("a = ", "f(x)"), served("a = ", "f(x)\n")) == ("cmpl-a", 4)
    assert find(said("a = ", "g(x)"), served("a = ", "f(x)\n")) is None
    assert find(said("a = ", None), served("a = ", "f(x)\n")) is None


def test_of_equal_answers_the_one_without_a_verdict_then_the_newest() -> None:
    old = served("a = ", "f(x)", id="old", at=100)
    new = served("a = ", "f(x)", id="new", at=110)
    assert find(said("a = ", "f(x)"), new, old) == ("new", 4)
    judged = replace(new, verdict=Verdict.TIMEOUT)
    assert find(said("a = ", "f(x)"), judged, old) == ("old", 4)


def test_displayed_whole_goes_before_cut() -> None:
    longer = served("a = ", "f(x) + 1", id="longer", at=110)
    exact = served("a = ", "f(x)", id="exact", at=100)
    assert find(said("a = ", "f(x)"), longer, exact) == ("exact", 4)


def test_two_users_who_typed_the_same() -> None:
    mine, theirs = served("a = ", "f(x)", id="mine"), served("a = ", "f(x)", id="theirs", user="u2", at=120)
    assert find(said("a = ", "f(x)", user="u1"), theirs, mine) == ("mine", 4)
    assert find(said("a = ", "f(x)", user="u2"), theirs, mine) == ("theirs", 4)
    # feedback that names nobody of those: it could be either's
    assert find(said("a = ", "f(x)", user=""), theirs, mine) is None
    assert find(said("a = ", "f(x)", user="key-1"), theirs, mine) is None
    # but with one user only it can be nobody else's
    assert find(said("a = ", "f(x)", user="key-1"), theirs) == ("theirs", 4)


def test_another_users_answer_is_not_taken_where_mine_says_something_else() -> None:
    mine, theirs = served("a = ", "g(y)", id="mine"), served("a = ", "f(x)", id="theirs", user="u2")
    assert find(said("a = ", "f(x)", user="u1"), theirs, mine) is None


def test_an_unrelated_question_of_the_key_does_not_unsettle_an_equal_prompt() -> None:
    """Continue names users in requests but not in feedback, which then has the name of the key."""
    mine = served("a = ", "f(x)", id="mine", user="ann")
    unrelated = served("import os\nb = ", "g(y)", id="other", user="key-1")
    assert find(said("a = ", "f(x)", user="key-1"), mine, unrelated) == ("mine", 4)


def test_cache_hit_with_other_snippets_in_the_prompt() -> None:
    one = served("a = ", " f(x)")
    one = replace(one, prompt=f"<|repo_name|>r\n<|file_sep|>b.py\nx\n<|file_sep|>a.py\n{one.prompt}")
    assert find(said("a = ", "f(x)"), one) == ("cmpl-a", 5)


def test_typing_through_a_suggestion() -> None:
    one = served("a = ", "compute(value)")
    assert find(said("a = comp", "ute(value)"), one) == ("cmpl-a", 14)
    assert find(said("a = comp", "ute(v"), one) == ("cmpl-a", 9)
    assert find(said("a = comx", "ute(value)"), one) is None
    assert find(said("b = comp", "ute(value)"), one) is None
    assert find(said("a = comp", "ute(value)", suffix="\nother"), one) is None


def test_typing_through_with_a_stripped_space() -> None:
    one = served("return", " self.value + 1")
    assert find(said("return self.value", "+ 1"), one) == ("cmpl-a", 15)


def test_typing_past_a_stripped_space() -> None:
    answer = served(LONG[:-1], " return x + 1")
    assert find(said(LONG[:-1] + "ret", "urn x + 1"), answer) == ("cmpl-a", 13)


def test_typing_through_where_somebody_else_asked_for_the_typed_text() -> None:
    # u1 typed "comp" of an answer; u2 asked with "a = comp" and got what u1 still sees
    mine = served("a = ", "compute(value)", id="mine", user="u1")
    theirs = served("a = comp", "ute(value)", id="theirs", user="u2")
    assert find(said("a = comp", "ute(value)", user="u1"), mine, theirs) == ("mine", 14)
    assert find(said("a = comp", "ute(value)", user="u2"), mine, theirs) == ("theirs", 10)
    assert find(said("a = comp", "ute(value)", user=""), mine, theirs) is None


def test_prefixes_cut_on_the_left() -> None:
    one = served(LONG, "os.path.join(folder, name)")
    cut = LONG[10:]
    assert len(cut) >= joins.OVERLAP
    assert find(said(cut + "os.path", ".join(folder, name)"), one) == ("cmpl-a", 26)
    assert find(said("x" * 5 + LONG + "os.path", ".join(folder, name)"), one) == ("cmpl-a", 26)
    # too little in common to be sure
    assert find(said(LONG[-20:] + "os.path", ".join(folder, name)"), one) is None


def test_repeated_text_finds_the_right_place() -> None:
    one = served("x = ", "a, a, a, a")
    assert find(said("x = a, ", "a, a, a"), one) == ("cmpl-a", 10)
    assert find(said("x = a, a, ", "a"), one) == ("cmpl-a", 7)


def test_an_empty_completion_joins_a_silent_answer_only() -> None:
    silent = served("a = ", "", id="silent")
    assert find(said("a = ", ""), silent, served("a = ", "f(x)", id="loud")) == ("silent", 0)
    assert find(said("a = ", ""), served("a = ", "f(x)")) is None


def test_prompts_that_are_no_template_join_by_prompt_alone() -> None:
    one = replace(served("", "f(x)"), prompt="plain text")
    assert joins.by_text(said("plain text", "f(x)"), [one], parse) == []


def test_many_users_typing_the_same_file_are_never_mixed_up() -> None:
    """Random typing through, cache hits and cuts by five users on one line: joined right or not at all."""
    rng = random.Random(11)
    lines = ["total = sum(values)", "total = max(values)", "total = sum(v for v in values)"]
    right = unmatched = 0
    for _ in range(400):
        users = [f"u{n}" for n in range(5)]
        history = []
        for place in range(25):
            line = rng.choice(lines)
            cut = rng.randrange(len(line) - 4)
            one = served(
                LONG + line[:cut], line[cut:], id=f"c{place}", user=rng.choice(users), at=100.0 + place
            )
            history.append(one)
        meant = rng.choice(history)
        typed = rng.randrange(len(meant.completion)) if rng.random() < 0.5 else 0
        end = rng.randrange(typed + 1, len(meant.completion) + 1)
        parts = parse(meant)
        assert parts is not None
        prefix = parts[0] + meant.completion[:typed]
        feedback = said(prefix, meant.completion[typed:end], user=meant.user)
        found = find(feedback, *reversed(history))
        if found is None:
            unmatched += 1
            continue
        got = next(one for one in history if one.id == found[0])
        assert got.user == meant.user
        got_parts = parse(got)
        assert got_parts is not None
        # the same user's, and the same text on the screen up to the cut
        screen = prefix + meant.completion[typed:end]
        assert (got_parts[0] + got.completion)[: len(screen)] == screen
        right += 1
    assert unmatched == 0
    assert right == 400
