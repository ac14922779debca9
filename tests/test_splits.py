"""Other people's data: their columns, what is left out and why, and no file on both sides."""

from __future__ import annotations

import doctest
import json
import random
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onlinerl.datasets import copies, fim, splits
from onlinerl.datasets.fim import FimPrompt
from onlinerl.datasets.splits import in_first_half, library, load
from onlinerl.errors import SettingsError
from tests import servers


def write(path: Path, rows: Sequence[Mapping[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def row(number: int, **fields: Any) -> dict[str, Any]:
    """A row that shares no text with others."""
    return {
        "prefix": f"def f_{number}(x):\n    ",
        "suffix": f"\n\nprint(f_{number}(1))\n",
        "middle": f"return x + {number}",
        **fields,
    }


def source_file(name: str, lines: int = 60) -> str:
    """Python that shares no line with that of another name."""
    return "".join(f"{name}_{number} = compute_{name}({number})\n" for number in range(lines))


def hole(text: str, line: int, around: int | None = None) -> dict[str, str]:
    """The row that hides one line, with so many lines around it (all)."""
    lines = text.split("\n")
    first = 0 if around is None else max(0, line - around)
    last = len(lines) if around is None else line + 1 + around
    return {
        "prefix": "\n".join([*lines[first:line], ""]),
        "suffix": "\n" + "\n".join(lines[line + 1 : last]),
        "middle": lines[line],
    }


# ----------------------------------------------------------------------------------------- columns


def test_plain_rows_are_three_to_one(tmp_path: Path) -> None:
    """The layout and the size of the seed's file: 4,000 rows give exactly 3,000 and 1,000."""
    found = load(write(tmp_path / "rows.jsonl", [row(number) for number in range(4000)]))
    assert (len(found.train), len(found.test)) == (3000, 1000)
    assert len({*found.train, *found.test}) == 4000
    assert found.skipped == {}


def test_more_rows_than_needed_and_fewer(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.jsonl", [row(number) for number in range(400)])
    found = load(path, train=30, test=10)
    assert (len(found.train), len(found.test)) == (30, 10)
    found = load(path, train=3000, test=1000)
    assert (len(found.train), len(found.test)) == (300, 100)


def test_columns_by_their_own_names_also_within_objects(tmp_path: Path) -> None:
    rows = [
        {
            "before": "a",
            "after": "b",
            "answer": f"c{number}",
            "meta": {"file": f"{number}.rs", "lang": "Rust"},
            "x.y": "z",
        }
        for number in range(8)
    ]
    path = write(tmp_path / "rows.jsonl", rows)
    fields = {
        "prefix": "before",
        "suffix": "after",
        "middle": "answer",
        "path": "meta.file",
        "language": "meta.lang",
    }
    found = load(path, fields=fields)
    assert {(one.prefix, one.suffix, one.language) for one in (*found.train, *found.test)} == {
        ("a", "b", "rust")
    }
    assert {one.path for one in (*found.train, *found.test)} == {f"{number}.rs" for number in range(8)}
    assert load(path, fields={**fields, "suffix": "x.y"}).train[0].suffix == "z"


def test_the_seed_s_rows_are_a_marked_prompt_and_solutions(tmp_path: Path) -> None:
    rows = [
        {
            "prompt": f"<|fim_prefix|>def f_{n}(x):\n    <|fim_suffix|>\n# end {n}\n<|fim_middle|>",
            "solutions": middle,
        }
        for n, middle in enumerate(["return 1", ["return 2", "return two"], "return 3", ["return 4"]])
    ]
    rows += [
        {"prompt": "<fim_prefix>a<fim_suffix>b<fim_middle>", "solutions": "starcoder"},
        {
            "prompt": "<|file_sep|>pkg/a.py\n<|fim_prefix|>a<|fim_suffix|>b<|fim_middle|>",
            "solutions": "with a path",
        },
        {"prompt": "no markers", "solutions": "x"},
    ]
    path = write(tmp_path / "rows.jsonl", rows)
    found = load(path, fields={"prompt": "prompt", "middle": "solutions"}, language="python")
    by_middle = {one.middle: one for one in (*found.train, *found.test)}
    assert by_middle["return 1"] == FimPrompt("def f_0(x):\n    ", "\n# end 0\n", "return 1", "", "python")
    assert by_middle["return 2"].suffix == "\n# end 1\n"
    assert (by_middle["starcoder"].prefix, by_middle["starcoder"].suffix) == ("a", "b")
    assert by_middle["with a path"].path == "pkg/a.py"
    assert found.skipped == {"prompt without FIM markers": 1}


def test_what_is_left_out_is_counted_by_reason(tmp_path: Path) -> None:
    rows = [
        *(row(number, language="Python", path=f"{number}.py") for number in range(6)),
        row(6, path="six.py"),
        row(7, path="seven.rs"),
        row(8, language="rust"),
        row(9),
        row(10, language="python", middle="  x "),
        row(11, language="python", middle="y" * 500),
        row(12, language="python", suffix="<|fim_middle|>"),
        row(0, language="python", path="0.py"),
        row(13, language="python", prefix="x = '\ud800"),
    ]
    path = write(tmp_path / "rows.jsonl", rows)
    found = load(path, languages=["python"], shortest=2, longest=400)
    assert len(found.train) + len(found.test) == 7
    assert found.skipped == {
        "another language": 2,
        "language not known": 1,
        "middle too short": 1,
        "middle too long": 1,
        "holds FIM markers": 1,
        "broken encoding": 1,
        "duplicate": 1,
    }
    with pytest.raises(SettingsError, match=r"no train prompt.*another language"):
        load(path, languages=["cobol"])


def test_context_is_cut_as_everywhere(tmp_path: Path) -> None:
    text = source_file("a", 400)
    found = load(write(tmp_path / "rows.jsonl", [hole(text, 200), row(1)]), characters=400, train=1, test=1)
    one = next(one for one in (*found.train, *found.test) if one.middle.startswith("a_"))
    assert len(one.prefix) <= 300
    assert one.prefix.startswith("a_")
    assert len(one.suffix) <= 100
    assert one.suffix.endswith("\n")


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        (
            {"prefix": "before"},
            r":1: prefix must be a string in 'before'; the columns are \['middle', 'prefix'",
        ),
        ({"middle": "meta.answer"}, ":1: middle must be a string in 'meta.answer'"),
        ({"prompt": "prompt"}, ":1: prompt must be a string"),
        ({"text": "prefix"}, "fields: .'text'. is none of"),
        ({"language": "middle.name"}, None),
    ],
)
def test_wrong_columns_are_clear_errors(tmp_path: Path, fields: dict[str, str], said: str | None) -> None:
    path = write(tmp_path / "rows.jsonl", [row(1), row(2)])
    if said is None:
        assert load(path, fields=fields).train
        return
    with pytest.raises(SettingsError, match=said):
        load(path, fields=fields)


def test_broken_files_are_clear_errors(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prefix": "a", "suffix": "b", "middle": "c"}\n{nope\n')
    with pytest.raises(SettingsError, match=":2: not JSON"):
        load(path)
    for line, said in (("[" * 200_000, "nested too deeply"), ('{"x": ' + "9" * 5000 + "}", "4300 digits")):
        path.write_text(line + "\n")
        with pytest.raises(SettingsError, match=f":1: .*{said}"):
            load(path)
    path.write_text("\n")
    with pytest.raises(SettingsError, match="no train prompt"):
        load(path)
    write(path, [row(1)])
    with pytest.raises(SettingsError, match=r"no test prompt.*there must be several"):
        load(path)
    with pytest.raises(SettingsError, match="does not exist"):
        load(tmp_path / "nowhere")


def test_what_an_editor_on_windows_writes_is_read(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.jsonl", [row(number) for number in range(8)])
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes().replace(b"\n", b"\r\n"))
    found = load(path)
    assert len(found.train) + len(found.test) == 8


# ------------------------------------------------------------------------------------------- sides


def test_a_path_is_on_the_side_that_it_is_on_everywhere(tmp_path: Path) -> None:
    rows = [row(number, path=f"{number % 40}.py") for number in range(400)]
    found = load(write(tmp_path / "rows.jsonl", rows))
    assert len(found.train) + len(found.test) == 400
    assert all(fim.is_test(one.path) for one in found.test)
    assert not any(fim.is_test(one.path) for one in found.train)


def test_what_dataset_writes_keeps_its_order(tmp_path: Path) -> None:
    taken = fim.collect(limit=300, characters=320)
    fim.write(tmp_path / "rows.jsonl", taken.prompts)
    found = load(tmp_path / "rows.jsonl", characters=320)
    assert list(found.train) == [one for one in taken.prompts if not fim.is_test(one.path)]
    assert list(found.test) == [one for one in taken.prompts if fim.is_test(one.path)]


@pytest.mark.parametrize("around", [None, 12])
def test_without_paths_pieces_of_one_file_stay_together(tmp_path: Path, around: int | None) -> None:
    """Whole files and windows that overlap."""
    rows = [
        hole(source_file(name), line, around)
        for name in (f"n{number}" for number in range(30))
        for line in range(14, 46, 4)
    ]
    random.Random(1).shuffle(rows)
    found = load(write(tmp_path / "rows.jsonl", rows), train=180, test=60)
    assert (len(found.train), len(found.test)) == (180, 56)  # whole files of eight rows
    names = [{one.middle.split("_")[0] for one in side} for side in (found.train, found.test)]
    assert not names[0] & names[1]


def test_a_licence_or_a_few_common_lines_join_nothing() -> None:
    licence = "".join(f"# line {number} of a licence that everybody uses\n" for number in range(20))
    common = "import os\nimport sys\nimport json\nimport typing\nimport pathlib\n"
    texts = [licence + common + source_file(f"n{number}") for number in range(10)]
    assert copies.groups(texts) == [*range(10)]


def test_one_large_file_does_not_swallow_the_test_side(tmp_path: Path) -> None:
    big, small, other = (source_file(name, 120) for name in ("big", "small", "other"))
    rows = [hole(big, line) for line in range(10, 110)]
    path = write(tmp_path / "rows.jsonl", [*rows, hole(small, 3)])
    found = load(path, train=30, test=10)
    assert {one.middle.split("_")[0] for one in found.train} == {"big"}
    assert {one.middle.split("_")[0] for one in found.test} == {"small"}
    path = write(tmp_path / "rows.jsonl", [*rows, *(hole(other, line) for line in range(10, 90))])
    found = load(path, train=30, test=10)  # both are larger than a quarter
    assert {one.middle.split("_")[0] for one in found.train} == {"big"}
    assert {one.middle.split("_")[0] for one in found.test} == {"other"}
    with pytest.raises(SettingsError, match="no test prompt"):
        load(write(tmp_path / "rows.jsonl", rows))


def test_a_limit_takes_evenly_from_the_files(tmp_path: Path) -> None:
    rows = [row(number, path=f"{number // 20}.py") for number in range(400)]
    found = load(write(tmp_path / "rows.jsonl", rows), train=10, test=2)
    assert len({one.path for one in found.train}) == 10
    assert len({one.path for one in found.test}) == 2


def test_the_same_file_gives_the_same_sides_in_another_process_and_seeds_differ(tmp_path: Path) -> None:
    rows = [hole(source_file(f"n{number % 50}"), 10 + number // 50, 9) for number in range(100)]
    path = write(tmp_path / "rows.jsonl", rows)
    one = load(path, train=30, test=10, seed=1)
    assert load(path, train=30, test=10, seed=1) == one
    assert load(path, train=30, test=10, seed=2).test != one.test
    code = (
        "import sys; from pathlib import Path; from onlinerl.datasets.splits import load\n"
        "print([one.middle for one in load(Path(sys.argv[1]), train=30, test=10, seed=1).test])"
    )
    for seed in ("1", "2"):
        done = subprocess.run(
            [sys.executable, "-c", code, str(path)],
            env={**servers.environment(), "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        )
        assert done.stdout.strip() == str([prompt.middle for prompt in one.test])


@given(st.lists(st.text(alphabet="ab\n ", max_size=60), max_size=8))
def test_groups_of_any_texts(texts: list[str]) -> None:
    found = copies.groups(texts)
    for index, group in enumerate(found):
        assert group <= index
        assert found[group] == group
        assert group <= texts.index(texts[index])


# ------------------------------------------------------------------------------ folders, libraries


def test_a_folder_is_split_as_everywhere() -> None:
    found = load(train=60, test=20, characters=320)
    assert (len(found.train), len(found.test)) == (60, 20)
    assert all(fim.is_test(one.path) for one in found.test)
    assert not any(fim.is_test(one.path) for one in found.train)
    assert found.train == fim.collect(split="train", limit=60, characters=320).prompts
    short = load(train=20, test=5, characters=320, longest=20, shortest=5)
    assert all(len(one.middle.strip()) >= 5 and len(one.middle) <= 20 for one in (*short.train, *short.test))
    assert load(train=9, test=3, languages=["python"]).train
    with pytest.raises(SettingsError, match="JSONL"):
        load(languages=["rust"])


def test_half_of_the_libraries() -> None:
    found = load(train=80, test=60, characters=320, half=True)
    learned, tested = {library(one) for one in found.train}, {library(one) for one in found.test}
    assert learned
    assert all(map(in_first_half, learned))
    assert tested
    assert not any(map(in_first_half, tested))
    share = sum(map(in_first_half, fim.HELD_OUT)) / len(fim.HELD_OUT)
    assert 0.3 < share < 0.7


def test_half_of_the_libraries_of_rows_needs_paths(tmp_path: Path) -> None:
    names = ["json", "argparse", "asyncio", "heapq"]
    rows = [row(n, path=f"src/{names[n % 4]}/m{n}.py") for n in range(80)]
    found = load(write(tmp_path / "rows.jsonl", rows), half=True)
    assert {library(one) for one in found.train} == {"argparse", "asyncio"}
    assert {library(one) for one in found.test} == {"json", "heapq"}
    with pytest.raises(SettingsError, match="path of every row"):
        load(write(tmp_path / "rows.jsonl", [*rows, *(row(n) for n in range(100, 120))]), half=True)


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("argparse.py", "argparse"),
        ("test/test_argparse.py", "argparse"),
        ("test/test_json/test_dump.py", "json"),
        ("src/requests/api.py", "requests"),
        ("/home\\user\\x.py", "home"),
        ("./pkg/x.py", "pkg"),
        ("tests", "tests"),
        ("", ""),
    ],
)
def test_library_is_the_package_at_the_top(path: str, name: str) -> None:
    assert library(FimPrompt("", "", "", path)) == name


def test_examples_in_the_docstrings() -> None:
    for module in (splits, copies):
        result = doctest.testmod(module)
        assert result.attempted
        assert not result.failed
