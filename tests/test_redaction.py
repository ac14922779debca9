"""Keys and passwords: nothing that people read has them, and whoever needs them gets them."""

from __future__ import annotations

import doctest
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from onlinerl import config, redaction
from onlinerl.config import WHOLE, Node, Policy, Settings, load_settings
from onlinerl.demo import story
from onlinerl.errors import OnlineRLError, RequestError, SettingsError
from onlinerl.learning.judges.llm import endpoint
from onlinerl.loop import run
from onlinerl.redaction import redacted, redacted_url, secrets_of
from onlinerl.store.database import Database

SECRET = "sk-0123456789"
URL = f"https://team:{SECRET}@judge.example:8443/v1?api-version=2024-02-01&api_key={SECRET}"
HIDDEN = "https://***@judge.example:8443/v1?api-version=2024-02-01&api_key=***"


def test_examples_in_the_docstrings() -> None:
    result = doctest.testmod(redaction)
    assert result.attempted >= 2
    assert not result.failed


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (URL, HIDDEN),
        (f"got '{URL}', and {URL} too", f"got '{HIDDEN}', and {HIDDEN} too"),
        (f"https://{SECRET}@host", "https://***@host"),
        (f"postgresql://me:{SECRET}@db/x?password={SECRET}", "postgresql://***@db/x?password=***"),
        (f"postgresql://me:a/b?c#{SECRET}@db/x", "postgresql://***@db/x"),  # not escaped, as it should be
        (f"http://me:p@{SECRET}@host/v1", "http://***@host/v1"),
        (f"http://me:a/b@c/{SECRET}@host/v1", "http://***@host/v1"),
        (f"http://host?{SECRET}", "http://host?***"),
        (f"http://host/?a={SECRET};b={SECRET}#{SECRET}", "http://host/?a=***;b=***#***"),
        ("http://127.0.0.1:8000/v1", "http://127.0.0.1:8000/v1"),
        ("http://hub.example:80/owner/model@main", "http://hub.example:80/owner/model@main"),
        ("sqlite:////home/me@work/onlinerl.db", "sqlite:////home/me@work/onlinerl.db"),
        ("tab@3 is live? yes: a@b", "tab@3 is live? yes: a@b"),
        ("", ""),
    ],
)
def test_what_is_hidden_of_a_text(text: str, shown: str) -> None:
    assert redacted(text) == shown
    assert redacted(shown) == shown


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        (URL, HIDDEN),
        (f"http://me:it's {SECRET}@host/v1", "http://***@host/v1"),
        (f"http://host/v1?api_key='{SECRET}' \"{SECRET}\"", "http://host/v1?api_key=***"),
        (f"http://host/v1?api_key=<{SECRET}>", "http://host/v1?api_key=***"),
        (f"judge.example/v1?api_key={SECRET}", "***"),
        (f"//me:{SECRET}@judge.example", "***"),
        ("http://127.0.0.1:8000/v1", "http://127.0.0.1:8000/v1"),
        ("sqlite:////home/me@work/onlinerl.db", "sqlite:////home/me@work/onlinerl.db"),
        ("", ""),
    ],
)
def test_what_is_hidden_of_one_url(url: str, shown: str) -> None:
    assert redacted_url(url) == shown
    # and so wherever a setting is written
    settings = load_settings().model_copy(update={"store": config.Store(url=url)})
    assert settings.model_dump(mode="json")["store"]["url"] == shown


@pytest.mark.parametrize("address", [f"judge.example/v1?api_key={SECRET}", f"ftp://me:it's{SECRET}@host"])
def test_a_judges_address_that_is_none_is_told_without_its_key(address: str) -> None:
    with pytest.raises(SettingsError, match="must be http") as caught:
        endpoint(address)
    assert SECRET not in str(caught.value)


@given(
    st.text(alphabet="abcXYZ019-._~%+", min_size=4, max_size=20),
    st.sampled_from(
        ["https://{}@h/v1", "https://u:{}@h", "http://h/?key={}&n=1", "http://h/v1?n=1&k={}", "http://h#{}"]
    ),
)
def test_no_secret_survives_and_each_is_told_to_whoever_looks_for_it(secret: str, shape: str) -> None:
    url = shape.format(f"<{secret}>".replace("<", "q-").replace(">", "-q"))
    assert secret not in redacted(f"see {url} or not")
    assert any(secret in one for one in secrets_of(url))


def strings(node: type[Node], path: str = "") -> Iterator[str]:
    for name, item in node.model_fields.items():
        below = Policy if name == "policies" else type(item.default)
        where = f"{path}.{name}".removeprefix(".")
        if isinstance(below, type) and issubclass(below, Node):
            yield from strings(below, f"{where}.tab" if name == "policies" else where)
        elif name in ("url", "key", "password", "secret", "token") or name.endswith(("_url", "_key")):
            yield where


def test_no_setting_that_may_hold_a_secret_is_written_as_it_is() -> None:
    names = list(strings(Settings))
    assert {"store.url", "validation.judge.url", "validation.report_judge.url"} <= set(names)
    settings = load_settings(overrides=[f"{name}={URL}" for name in names])
    for text in (
        settings.model_dump_json(),
        str(settings.model_dump()),
        json.dumps(settings.model_dump(mode="json")),
    ):
        assert SECRET not in text
        assert text.count(HIDDEN) == len(names)
    whole = Settings.model_validate_json(settings.model_dump_json(context=WHOLE))
    assert whole == settings
    assert whole.store.url == URL


def test_a_child_process_and_the_demo_get_the_secrets(tmp_path: Path) -> None:
    settings = load_settings(overrides=[f"validation.judge.url={URL}"], home=tmp_path)
    given = Settings.model_validate_json(run.environment(settings)[run.SETTINGS_VARIABLE])
    assert given.validation.judge.url == URL
    assert story.demo_settings(settings).validation.judge.url == URL


@pytest.mark.parametrize(
    "override",
    [
        f"validation.judge={URL}",
        f"validation.judge.concurrency={URL}",
        f"validation.judge.url=[{URL}]",
        f"validation.judge.nonsense.deep={URL}",
        f"{URL.replace('=', '%3D')}",  # the name was forgotten
        f"validation.judge.url={{{URL}",
    ],
)
def test_a_wrong_setting_is_quoted_without_its_secret(override: str) -> None:
    with pytest.raises(SettingsError) as caught:
        load_settings(overrides=[override])
    assert SECRET not in str(caught.value)


@pytest.mark.parametrize(
    "url",
    [
        f"postgresql://me:{SECRET}@db/x",
        f"postgresql://me@db/x?password={SECRET}",
        f"postgresql//me:{SECRET}@db/x",
        f"sqlite://me:{SECRET}@db:port/x",
        SECRET,
    ],
)
def test_a_wrong_database_is_told_without_its_password(url: str) -> None:
    with pytest.raises(SettingsError, match=r"store\.url .*sqlite:////") as caught:
        Database.open(url)
    assert SECRET not in str(caught.value)


def test_every_error_hides_what_its_message_quotes() -> None:
    assert str(OnlineRLError(f"no answer from {URL}")) == f"no answer from {HIDDEN}"
    assert SECRET not in str(RequestError(f"no answer from {URL}", parameter="model"))
    assert str(OnlineRLError()) == ""


def test_yaml_and_json_of_settings_without_secrets_are_what_they_were() -> None:
    settings = load_settings(overrides=["store.url=sqlite:////tmp/x.db"])
    assert settings.model_dump(mode="json") == settings.model_dump(mode="json", context=WHOLE)
    assert (
        yaml.safe_load(yaml.safe_dump(settings.model_dump(mode="json")))["store"]["url"]
        == "sqlite:////tmp/x.db"
    )
