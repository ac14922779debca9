"""The command line as a person or a script meets it: a process, its output, its exit code."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import pytest

from onlinerl import base
from onlinerl.cli import cli, main
from onlinerl.config import Settings
from onlinerl.serve import admin_key
from onlinerl.store import versions
from onlinerl.store.database import Database
from onlinerl.weights import directory
from onlinerl.weights.models import resolve_model
from tests.versions import make_version, settings_of

ROOT = Path(__file__).parents[1]


@dataclass(frozen=True)
class Done:
    """What came of a command."""

    returncode: int
    stdout: str
    stderr: str


def onlinerl(*arguments: object) -> Done:
    """Run the command in this process, from its entry point on."""
    out, err = io.StringIO(), io.StringIO()
    code: object = None
    with (
        pytest.MonkeyPatch.context() as patch,
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        patch.setattr(sys, "argv", ["onlinerl", *map(str, arguments)])
        patch.setenv("COLUMNS", "150")
        try:
            main()
        except SystemExit as end:
            code = end.code
    assert isinstance(code, int)
    return Done(code, out.getvalue(), err.getvalue())


def process(*arguments: object, to: str = "/dev/stdout") -> Done:
    """Run it as a process of its own."""
    line = [sys.executable, "-m", "onlinerl.cli", *map(str, arguments)]
    shell = ["sh", "-c", f'exec "$@" > {to}', "sh", *line]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(shell, env=environment, capture_output=True, text=True, timeout=60)
    return Done(done.returncode, done.stdout, done.stderr)


def said(done: Done, code: int) -> str:
    """What it said on standard error, after a check that this is one sentence and the exit code is right."""
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    (sentence,) = done.stderr.strip().splitlines()
    assert sentence.startswith("onlinerl: ")
    return sentence


@pytest.fixture
def home(tmp_path: Path) -> tuple[Path, Settings]:
    """A home with version 0 live and two candidates, 1 and 2."""
    settings = settings_of(tmp_path / "home")
    database = Database.open(settings.database_url)
    base.ensure(settings, "tab", database)
    make_version(settings, database)
    make_version(settings, database, parent=1)
    database.close()
    return settings.home, settings


def verbs(group: click.Group, path: str = "") -> list[str]:
    found = []
    for name, command in group.commands.items():
        found.append(f"{path}{name}")
        if isinstance(command, click.Group):
            found += verbs(command, f"{path}{name} ")
    return found


def test_the_verbs_of_the_contract_are_there_and_explained() -> None:
    found = verbs(cli)
    wanted = ["demo", "serve", "replica", "train", "versions", "replicas", "simulate", "dataset"]
    wanted += [f"versions {verb}" for verb in ["list", "show", "promote", "rollback", "verify", "gc"]]
    assert set(wanted) <= set(found)
    for verb in found:
        command: Any = cli
        for part in verb.split():
            command = command.commands[part]
        assert command.help, verb
        for parameter in command.params:
            if isinstance(parameter, click.Option):
                assert parameter.help, f"{verb} {parameter.name}"


def test_help_is_quick_and_loads_nothing_heavy() -> None:
    script = (
        "import sys, time; start = time.perf_counter(); import onlinerl.cli;"
        "took = time.perf_counter() - start;"
        "heavy = {'torch', 'transformers', 'fastapi', 'sqlalchemy', 'matplotlib'} & set(sys.modules);"
        "print(took, sorted(heavy))"
    )
    runs = [
        subprocess.check_output([sys.executable, "-c", script], text=True).split(maxsplit=1) for _ in "12"
    ]
    assert runs[0][1].strip() == "[]"
    assert min(float(run[0]) for run in runs) < 1.0


def test_serve_never_imports_torch() -> None:
    script = (
        "import sys, onlinerl.serve, onlinerl.demo, onlinerl.cli;"
        "print(sorted({'torch', 'transformers', 'tensorboard'} & set(sys.modules)))"
    )
    assert subprocess.check_output([sys.executable, "-c", script], text=True).strip() == "[]"


def test_versions_list_as_json(home: tuple[Path, Settings]) -> None:
    listed = json.loads(onlinerl("versions", "list", "--json", "--home", home[0]).stdout)
    assert [(v["policy"], v["id"], v["state"], v["parent"], v["run"]) for v in listed] == [
        ("tab", 0, "live", None, None),
        ("tab", 1, "candidate", 0, None),
        ("tab", 2, "candidate", 1, None),
    ]
    assert all(re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", v["created_at"]) for v in listed)
    assert (
        abs(time.time() - time.mktime(time.strptime(listed[2]["created_at"][:19], "%Y-%m-%dT%H:%M:%S"))) < 9e4
    )


def test_versions_for_people(home: tuple[Path, Settings]) -> None:
    table = onlinerl("versions", "list", "--home", home[0]).stdout
    assert "candidate" in table
    assert "live" in table
    shown = onlinerl("versions", "show", "1", "--home", home[0]).stdout
    assert "tab@1" in shown
    data = json.loads(onlinerl("versions", "show", 1, "--json", "--home", home[0]).stdout)
    assert list(data["manifest"]["tensors"]) == ["weight"]


def test_the_table_of_versions_fits_a_terminal(home: tuple[Path, Settings]) -> None:
    onlinerl("versions", "promote", 1, "--home", home[0])
    listed = json.loads(onlinerl("versions", "list", "--json", "--home", home[0]).stdout)
    line = [sys.executable, "-m", "onlinerl.cli", "versions", "list", "--home", str(home[0])]
    narrow = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "COLUMNS": "80"}
    table = subprocess.check_output(line, env=narrow, text=True)
    assert "…" not in table
    assert listed[1]["live_at"][:19].replace("T", " ") in table


def test_a_policy_that_is_neither_named_nor_kept_is_no_empty_list(home: tuple[Path, Settings]) -> None:
    for verb in ("list", "verify"):
        done = onlinerl("versions", verb, "--policy", "nobody", "--home", home[0])
        assert "there is no policy 'nobody'" in said(done, 2)
    # what is kept of a policy that the settings name no more can still be seen
    other = ["--home", home[0], "policies={chat: {}}"]
    assert len(json.loads(onlinerl("versions", "list", "--policy", "tab", "--json", *other).stdout)) == 3


def test_a_version_tells_what_it_learned_from(home: tuple[Path, Settings]) -> None:
    with opened(home[1]) as database:
        learned = directory.DataRange(first_at=1e9, last_at=1e9 + 60, samples=47, steps=2)
        make_version(home[1], database, data=learned)
    shown = onlinerl("versions", "show", 3, "--home", home[0]).stdout
    assert "47 samples in 2 steps" in shown
    assert "2001-09-09 01:46:40 to 2001-09-09 01:47:40" in shown
    assert "learned from" not in onlinerl("versions", "show", 0, "--home", home[0]).stdout


def test_promote_and_roll_back(home: tuple[Path, Settings]) -> None:
    done = onlinerl("versions", "promote", "2", "--home", home[0])
    assert (done.returncode, done.stdout) == (0, "tab@2 is live\n")
    assert "cannot become" in said(onlinerl("versions", "promote", "2", "--home", home[0]), 1)
    back = json.loads(onlinerl("versions", "rollback", "--json", "--home", home[0]).stdout)
    assert (back["id"], back["state"]) == (0, "live")
    assert "nothing to go back to" in said(onlinerl("versions", "rollback", "--home", home[0]), 1)
    assert "no version 9" in said(onlinerl("versions", "promote", "9", "--home", home[0]), 1)
    with opened(home[1]) as database, database.read() as c:
        assert {change.actor for change in versions.history(c, "tab", 2)} >= {"cli"}


def opened(settings: Settings) -> contextlib.closing[Database]:
    return contextlib.closing(Database.open(settings.database_url))


def test_a_setting_may_stand_where_a_version_may(home: tuple[Path, Settings]) -> None:
    setting = "policies.tab.train.lr=1e-5"
    for words in ((), (setting,), ("1", setting), (setting, "server.port=1")):
        done = onlinerl("versions", "verify", "--json", "--home", home[0], *words)
        assert done.returncode == 0, done.stderr
        found = [row["id"] for row in json.loads(done.stdout)]
        assert found == ([1] if "1" in words else [0, 1, 2])
    assert "nowhere" in said(onlinerl("versions", "verify", "--home", home[0], "nowhere.lr=1"), 2)
    assert onlinerl("versions", "verify", "--home", home[0], "x").returncode == 2


def test_looking_makes_no_database(tmp_path: Path) -> None:
    """Neither in the home nor where store.url says."""
    elsewhere = tmp_path / "else" / "where.db"
    url = f"store.url=sqlite:///{elsewhere}"
    for words in ((), (url,)):
        home = ["--home", tmp_path / "home", *words]
        done = onlinerl("versions", "list", "--json", *home)
        assert (done.returncode, json.loads(done.stdout)) == (0, [])
        for verb in (["show", "0"], ["verify"], ["promote", "0"], ["rollback"], ["gc"]):
            assert "no data in" in said(onlinerl("versions", *verb, *home), 1)
    assert list(tmp_path.iterdir()) == []


def test_verify_finds_a_changed_byte_and_promote_refuses_it(home: tuple[Path, Settings]) -> None:
    assert onlinerl("versions", "verify", "--home", home[0]).returncode == 0
    file = directory.folder(home[1].weights_url, "tab", 1) / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    done = onlinerl("versions", "verify", "--json", "--home", home[0])
    assert done.returncode == 1
    assert [one["intact"] for one in json.loads(done.stdout)] == [True, False, True]
    assert onlinerl("versions", "verify", "2", "--home", home[0]).returncode == 0
    assert "tensor weight" in said(onlinerl("versions", "promote", "1", "--home", home[0]), 1)
    assert json.loads(onlinerl("versions", "list", "--json", "--home", home[0]).stdout)[0]["state"] == "live"


def test_gc_takes_what_nothing_needs(home: tuple[Path, Settings]) -> None:
    with opened(home[1]) as database, database.write() as c:
        versions.reject(c, "tab", 2, actor="test", reason="no good")
    folder = directory.folder(home[1].weights_url, "tab", 2)
    dry = json.loads(onlinerl("versions", "gc", "--dry-run", "--json", "--home", home[0]).stdout)
    assert [one["folder"] for one in dry] == [str(folder)]
    assert folder.exists()
    gone = json.loads(onlinerl("versions", "gc", "--json", "--home", home[0]).stdout)
    assert gone == dry
    assert not folder.exists()
    assert directory.folder(home[1].weights_url, "tab", 1).exists()
    listed = json.loads(onlinerl("versions", "list", "--json", "--home", home[0]).stdout)
    assert [v["id"] for v in listed] == [0, 1, 2]
    assert onlinerl("versions", "verify", "--home", home[0]).returncode == 0


def test_looking_at_an_empty_home_makes_nothing(tmp_path: Path) -> None:
    done = onlinerl("versions", "list", "--json", "--home", tmp_path / "none")
    assert (done.returncode, json.loads(done.stdout)) == (0, [])
    assert "no data" in said(onlinerl("versions", "promote", "1", "--home", tmp_path / "none"), 1)
    assert "no `onlinerl serve` runs" in said(onlinerl("replicas", "list", "--home", tmp_path / "none"), 1)
    assert not (tmp_path / "none").exists()


def test_settings_go_after_the_verb(tmp_path: Path, home: tuple[Path, Settings]) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text(f"home: {home[0]}\n")
    done = onlinerl("versions", "list", "-c", file, "policies.tab.train.lr=2e-6", "--json")
    assert len(json.loads(done.stdout)) == 3
    two = ["policies.tab.aliases=[a]", "policies.big.model=fim-27m"]
    assert "choose one with --policy" in said(onlinerl("versions", "promote", "1", "-c", file, *two), 2)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["versions", "list", "polices.tab={}"], "unknown setting polices"),
        (["serve", "policies.tab.train.lrr=1"], "unknown setting policies.tab.train.lrr"),
        (["serve", "-c", "nowhere.yaml"], "does not exist"),
        (["serve", "policies.tab.model=/nowhere/model"], "/nowhere/model"),
        (["train", "policies.tab.model=/nowhere/model"], "/nowhere/model"),
        (["serve", "store.url=postgresql://x/y"], "store.url"),
        (["train", "--policy", "nobody"], "there is no policy 'nobody'"),
    ],
)
def test_wrong_settings_are_one_sentence_and_exit_code_2(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], sentence: str
) -> None:
    monkeypatch.chdir(tmp_path)
    assert sentence in said(onlinerl(*arguments), 2)


def test_a_broken_model_directory_is_one_sentence(tmp_path: Path) -> None:
    model = tmp_path / "model"
    settings_of(tmp_path)
    (model / "model.safetensors").write_bytes(b"\x10\x00\x00\x00\x00\x00\x00\x00{not a header}")
    home = tmp_path / "home"
    done = process("serve", "--port", 0, "--feedback-port", 0, "--home", home, f"policies.tab.model={model}")
    assert "model.safetensors" in said(done, 2)


def test_another_model_under_the_same_name_is_refused(home: tuple[Path, Settings]) -> None:
    done = onlinerl("serve", "--port", 0, "--feedback-port", 0, "--home", home[0])
    assert "another model" in said(done, 2)


def test_a_home_that_cannot_be_written_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert "file" in said(onlinerl("serve", "--home", tmp_path / "file" / "home"), 2)


def test_a_full_disk_is_one_sentence(tmp_path: Path) -> None:
    done = process("versions", "list", "--json", "--home", tmp_path / "none", to="/dev/full")
    assert "No space left" in said(done, 2)


def test_paths_and_names_that_cannot_be_used_are_one_sentence(tmp_path: Path) -> None:
    long = tmp_path / ("x" * 300)
    for verb in (["list"], ["show", 0], ["verify"]):
        assert "too long" in said(onlinerl("versions", *verb, "--home", long), 2)
    ports = ["--port", 0, "--feedback-port", 0]
    for host in ("x" * 300, "a..b"):
        said(onlinerl("serve", *ports, "--home", tmp_path / "home", "--host", host), 2)
    (tmp_path / "home" / "admin.key").mkdir()
    assert "admin.key" in said(onlinerl("serve", *ports, "--home", tmp_path / "home"), 2)
    (tmp_path / "home" / "serve.json").write_text("5")
    said(onlinerl("serve", *ports, "--home", tmp_path / "home", "store.url=sqlite+aiosqlite:///x"), 2)
    (tmp_path / "file").write_text("")
    said(onlinerl("demo", "--home", tmp_path / "demo", "--out", tmp_path / "file"), 2)
    for option in (["--speed", "nan"], ["--speed", "inf"], ["--temperature", "nan"], ["--temperature", "-1"]):
        assert option[0] in said(onlinerl("simulate", "--url", "http://127.0.0.1:9", *option), 2)


def test_an_admin_key_that_was_left_empty_is_made_anew(tmp_path: Path) -> None:
    (tmp_path / "admin.key").write_text("")
    key, new = admin_key(tmp_path)
    assert new
    assert key.startswith("orl-")
    assert admin_key(tmp_path) == (key, False)
    assert (tmp_path / "admin.key").stat().st_mode & 0o777 == 0o600


def test_ids_and_policies_that_cannot_be(home: tuple[Path, Settings]) -> None:
    folder, _ = home
    for verb in (["show"], ["promote"], ["verify"], ["rollback", "--to"]):
        for id in (-1, 2**63, 10**30):
            assert onlinerl("versions", *verb, "--home", folder, "--", id).returncode == 2
            assert onlinerl("versions", *verb, id, "--home", folder).returncode == 2
    for word in ("list", "verify", "gc"):
        done = onlinerl("versions", word, "--home", folder, "--policy", "nobody")
        assert "there is no policy 'nobody'" in said(done, 2)
    assert onlinerl("train", "--home", folder, "--max-steps", 10**20).returncode == 2
    done = onlinerl("versions", "list", "--home", folder / "none", "--policy", "nobody")
    assert "there is no policy 'nobody'" in said(done, 2)


def test_a_model_that_the_engine_can_never_serve_ends_the_server(tmp_path: Path) -> None:
    model, home = tmp_path / "model", tmp_path / "home"
    shutil.copytree(resolve_model("fim-27m"), model)
    config = json.loads((model / "config.json").read_text())
    config |= {"architectures": ["BertForMaskedLM"], "model_type": "bert"}
    (model / "config.json").write_text(json.dumps(config))
    done = process("serve", "--port", 0, "--feedback-port", 0, "--home", home, f"policies.tab.model={model}")
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("onlinerl: the model of the policy tab cannot be served: ")


@pytest.mark.parametrize(
    "arguments",
    [["nonsense"], ["serve", "--nonsense"], ["versions", "promote"], ["simulate", "--users", "0"]],
)
def test_wrong_usage_is_exit_code_2(arguments: list[str]) -> None:
    done = onlinerl(*arguments)
    assert done.returncode == 2
    assert "Usage:" in done.stderr


def test_dataset_from_a_folder(tmp_path: Path) -> None:
    code = tmp_path / "code"
    code.mkdir()
    (code / "one.py").write_text("def f(x):\n    y = x + 1\n    return y * 2\n" * 5)
    out = tmp_path / "out.jsonl"
    done = onlinerl("dataset", "--code", code, "--out", out, "--limit", 3, "--json")
    assert json.loads(done.stdout)["prompts"] == 3
    assert {"prefix", "suffix", "middle"} <= set(json.loads(out.read_text().splitlines()[0]))
    assert "does not exist" in said(onlinerl("dataset", "--code", tmp_path / "no", "--out", out), 2)


@pytest.mark.parametrize("verb", verbs(cli))
def test_every_verb_takes_settings(verb: str) -> None:
    command: Any = cli
    for part in verb.split():
        command = command.commands[part]
    if not isinstance(command, click.Group):
        assert {"file", "home", "overrides"} <= {parameter.name for parameter in command.params}


def test_simulate_finds_the_server_of_its_home_or_says_that_there_is_none(tmp_path: Path) -> None:
    sentence = said(onlinerl("simulate", "--home", tmp_path), 2)
    assert "no `onlinerl serve` runs" in sentence
    assert "--url" in sentence


def test_simulate_without_a_server_says_so() -> None:
    assert "http://127.0.0.1:9" in said(
        onlinerl("simulate", "--url", "http://127.0.0.1:9", "--requests", 1), 2
    )
