"""The settings tree: documented, read, strict."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import onlinerl
from onlinerl.config import Node, Policy, Settings, load_settings, reference
from onlinerl.errors import SettingsError

SOURCE = Path(onlinerl.__file__).parent
ROOT = SOURCE.parents[1]


def fields(node: type[Node], path: str = "") -> Iterator[tuple[str, str, str | None, bool]]:
    """(dotted path, name, documentation, is a leaf) of every setting."""
    for name, item in node.model_fields.items():
        below = Policy if name == "policies" else type(item.default)
        leaf = not (isinstance(below, type) and issubclass(below, Node))
        yield f"{path}{name}", name, item.description, leaf
        if not leaf:
            yield from fields(below, f"{path}{name}.")


def test_every_setting_is_documented() -> None:
    found = list(fields(Settings))
    assert len(found) > 60
    assert [path for path, _, text, _ in found if not (text or "").strip()] == []


def test_every_setting_is_read_somewhere() -> None:
    text = "\n".join(file.read_text() for file in sorted(SOURCE.rglob("*.py")) if file.name != "config.py")
    unread = [
        path for path, name, _, leaf in fields(Settings) if leaf and not re.search(rf"\.{name}\b(?!\()", text)
    ]
    assert set(unread) - {"store.url"} == set()  # that one is read in Settings.database_url


def test_the_settings_page_is_the_one_that_the_code_makes() -> None:
    assert (ROOT / "docs" / "settings.md").read_text() == reference()


def test_without_a_file_there_is_one_policy_on_the_built_in_model() -> None:
    settings = load_settings()
    assert list(settings.policies) == ["tab"]
    policy = settings.policies["tab"]
    assert policy.model == "fim-27m"
    assert policy.publish == "candidate"
    assert (policy.trigger.feedback, policy.trigger.drift) == (None, None)
    assert (settings.server.host, settings.server.port, settings.server.feedback_port) == (
        "127.0.0.1",
        8081,
        8082,
    )


def test_overrides_win_over_the_file_and_home_over_both(tmp_path: Path) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text("home: elsewhere\npolicies:\n  small:\n    train: {lr: 1e-5, batch: 8}\n")
    settings = load_settings(
        file, ["policies.small.train.lr=2e-6", "policies.small.aliases=[a, b]"], home=tmp_path / "home"
    )
    small = settings.policies["small"]
    assert (small.train.lr, small.train.batch, small.aliases) == (2e-6, 8, ("a", "b"))
    assert settings.home == tmp_path / "home"


@pytest.mark.parametrize(
    ("text", "overrides", "said"),
    [
        ("polices: {}", [], "unknown setting polices"),
        (
            "policies: {tab: {train: {learning_rate: 1}}}",
            [],
            "unknown setting policies.tab.train.learning_rate",
        ),
        ("", ["policies.tab.train.lr=fast"], "policies.tab.train.lr"),
        ("", ["policies.tab.train.lr=-1"], "greater than 0"),
        ("", ["server.port=70000"], "server.port"),
        ("", ["nonsense"], "is not an override"),
        ("", ["a.b=[1"], "not valid YAML"),
        ("server: 3", ["server.port=1"], "server is a value, not a branch"),
        ("[1, 2]", [], "must hold a mapping"),
        ("a: [1", [], "not valid YAML"),
        ("home: 2020-99-99", [], "not valid YAML"),
        ("[" * 20_000, [], "nested too deeply"),
        ("", ["home=0b_"], "the value of home is not valid YAML"),
        ("", ["home=!!int x"], "the value of home is not valid YAML"),
        ("", ["home=" + "9" * 5000], "the value of home is not valid YAML"),
        ("", ["home=" + "[" * 20_000], "nested too deeply"),
        ("", ["policies.tab.train.lr=inf"], "policies.tab.train.lr"),
        ("", ["policies.tab.joins.window=.inf"], "policies.tab.joins.window"),
        ("", ["policies.tab.train.batch=1000000000000000000000"], "policies.tab.train.batch"),
        ("", ['home="a\\0b"'], "NUL"),
        ("policies: {}", [], "policies"),
        ("policies: {'a b': {}}", [], "policy name 'a b'"),
        ("policies: {a: {aliases: [b]}, b: {}}", [], "belongs to both"),
    ],
)
def test_wrong_settings_are_refused_in_one_sentence(
    tmp_path: Path, text: str, overrides: list[str], said: str
) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text(text)
    with pytest.raises(SettingsError, match=re.escape(said)) as refused:
        load_settings(file, overrides)
    assert "\n" not in str(refused.value)


def test_anchors_do_not_make_a_small_file_into_a_long_error(tmp_path: Path) -> None:
    lines = ["a: &a [x, x, x, x, x, x, x, x, x, x]"]
    for above, name in zip("abcdefghi", "bcdefghij", strict=True):
        lines.append(f"{name}: &{name} [{', '.join([f'*{above}'] * 10)}]")
    file = tmp_path / "settings.yaml"
    file.write_text("\n".join([*lines[:6], "server: {host: *f}"]))
    with pytest.raises(SettingsError, match=re.escape("server.host")) as refused:
        load_settings(file)
    assert len(str(refused.value)) < 3000


def test_a_file_that_is_not_there_or_not_text_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="does not exist"):
        load_settings(tmp_path / "none.yaml")
    with pytest.raises(SettingsError, match="cannot be read"):
        load_settings(tmp_path)
    (tmp_path / "bytes.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(SettingsError):
        load_settings(tmp_path / "bytes.yaml")
