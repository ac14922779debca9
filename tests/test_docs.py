"""The documents say what is: commands parse, settings, paths, files, links and metrics exist."""

from __future__ import annotations

import importlib.util
import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_origin
from urllib.parse import unquote, urlsplit

import click
import pytest
import yaml
from fastapi.routing import APIRoute
from prometheus_client import REGISTRY
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from onlinerl.cli import cli
from onlinerl.config import Node, Policy, Settings, load_settings
from onlinerl.dashboard import app as dashboard
from onlinerl.gateway.app import create_app
from onlinerl.gateway.bodies import checked
from onlinerl.gateway.completions import CompletionRequest
from onlinerl.gateway.feedback import NativeFeedback
from onlinerl.store import runs
from onlinerl.store.database import Database, Writer

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "onlinerl"
PAGES = sorted(
    [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *SOURCE.glob("models/*/*.md")], key=lambda p: p.name
)
READMES = [ROOT / "README.md", ROOT / "README.zh-CN.md"]
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)


def each_page(test: Any) -> Any:
    return pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)(test)


def blocks(page: Path, language: str) -> list[str]:
    return [text for name, text in BLOCK.findall(page.read_text("utf-8")) if name == language]


def inline(page: Path) -> list[str]:
    """What stands in backticks outside of blocks."""
    prose = BLOCK.sub("", page.read_text("utf-8"))
    return [re.sub(r"\s+", " ", code) for code in re.findall(r"`([^`]+)`", prose)]


def commands(page: Path) -> Iterator[tuple[list[str], bool]]:
    """(words after `onlinerl`, whether it stands in a block and so must be complete)."""
    for block in blocks(page, "bash"):
        for line in re.sub(r"\\\n\s*", " ", block).splitlines():
            if line.startswith("onlinerl "):
                yield shlex.split(line, comments=True)[1:], True
    for code in inline(page):
        if code.startswith("onlinerl ") and "…" not in code:
            yield shlex.split(code)[1:], False
        elif re.match(r"versions [a-z]+\b(?!\|)", code):
            yield shlex.split(code), False


def parse(words: list[str], *, whole: bool) -> None:
    """Raise click.ClickException or SettingsError for a command that the command line would not take."""
    command: click.Command = cli
    context = click.Context(cli, info_name="onlinerl")
    rest = words
    while isinstance(command, click.Group) and rest and not rest[0].startswith("-"):
        name, *rest = rest
        below = command.get_command(context, name)
        if below is None:
            raise click.UsageError(f"no verb {name!r}")
        command = below
    if isinstance(command, click.Group):
        assert not rest or rest == ["--help"], words
        return
    try:
        made = command.make_context(words[0], list(rest))
    except click.MissingParameter:
        if whole:
            raise
        return
    load_settings(overrides=made.params.get("overrides", ()))


@pytest.mark.parametrize("page", [*READMES, *sorted((ROOT / "docs").glob("*.md")), ROOT / "ARCHITECTURE.md"])
def test_commands_are_ones_that_the_command_line_takes(page: Path) -> None:
    for words, whole in commands(page):
        try:
            parse(words, whole=whole)
        except Exception as error:
            raise AssertionError(f"{page.name}: onlinerl {shlex.join(words)}: {error}") from error


def test_there_are_commands_and_wrong_ones_are_found() -> None:
    for page in READMES:
        assert len(list(commands(page))) >= 6
    parse(["serve", "policies.tab.trigger.feedback=1"], whole=True)
    wrong = [
        "learn",
        "train --nonsense",
        "serve policies.tab.nonsense=1",
        "versions x",
        "versions promote",
    ]
    for line in wrong:
        with pytest.raises(Exception, match=r"nonsense|no verb|VERSION|Missing"):
            parse(line.split(), whole=True)


def branches(node: type[Node], path: str = "") -> Iterator[tuple[str, bool]]:
    """(dotted path, is a leaf) of every setting, without `policies.NAME`."""
    for name, field in node.model_fields.items():
        if name == "policies":
            yield from branches(Policy)
            continue
        below = field.annotation
        inner = isinstance(below, type) and get_origin(below) is None and issubclass(below, Node)
        yield f"{path}{name}", not inner
        if inner:
            assert isinstance(below, type)
            assert issubclass(below, Node)
            yield from branches(below, f"{path}{name}.")


def test_settings_that_pages_name_exist() -> None:
    every = dict(branches(Settings))
    starts = {path.rpartition(".")[2] for path, leaf in every.items() if not leaf}
    named = 0
    for page in PAGES:
        for code in inline(page):
            name = code.partition("=")[0]
            if not re.fullmatch(r"[a-z_]+(\.[a-z_A-Z]+)+", name):
                continue
            name = re.sub(r"^policies\.\w+\.", "", name)
            if name.split(".")[0] not in starts or name.endswith((".py", ".md")):
                continue
            named += 1
            assert any(f".{path}".endswith(f".{name}") for path in every), f"{page.name}: {code}"
    assert named > 60


@pytest.fixture
def routes(tmp_path: Path) -> set[tuple[str, str]]:
    """(method, path) of all that the application answers; names of parameters left out."""
    settings = load_settings(home=tmp_path)
    database = Database.open(settings.database_url)
    try:
        app = create_app({}, Writer(database), database, settings)
        dashboard.mount(app, settings, database, live={}, admin_key=None, replicas=None)
        found = {
            (method, bare(route.path))
            for route in app.routes
            if isinstance(route, APIRoute)
            for method in route.methods or ()
        }
        assert app.openapi_url is not None
        return found | {("GET", app.openapi_url)}
    finally:
        database.close()


def bare(path: str) -> str:
    return re.sub(r"\{[^}]*\}", "{}", path)


def test_http_paths_of_the_page_and_of_the_application_are_the_same(routes: set[tuple[str, str]]) -> None:
    named, paths = set(), set()
    for code in inline(ROOT / "docs" / "http.md"):
        if match := re.fullmatch(r"(GET|POST|PUT|DELETE) (/\S*)", code):
            named.add((match[1], bare(match[2])))
        elif re.fullmatch(r"/[\w./{}-]*", code):
            paths.add(bare(code))
    assert named - routes == set(), "docs/http.md names what is not there"
    assert paths - {path for _, path in routes} == set(), "docs/http.md names what is not there"
    assert routes - named - {("GET", path) for path in paths} == set(), "docs/http.md lacks"


@pytest.mark.parametrize("page", READMES, ids=lambda page: page.name)
def test_what_a_readme_sends_is_accepted(page: Path, routes: set[tuple[str, str]]) -> None:
    models: dict[str, Any] = {"/v1/completions": CompletionRequest, "/v1/feedback": NativeFeedback}
    sent = []
    for block in blocks(page, "bash"):
        for path, body in re.findall(r"^curl -s localhost:808[12](/\S+) .*? -d '(.*?)'", block, re.M | re.S):
            assert ("POST", path) in routes
            checked(models[path], json.loads(body))
            sent.append(path)
    assert sent == list(models)
    continues, *rest = [yaml.safe_load(block) for block in blocks(page, "yaml")]
    assert ("POST", urlsplit(continues["data"][0]["destination"]).path) in routes
    assert ("POST", urlsplit(continues["models"][0]["apiBase"]).path + "/completions") in routes
    for settings in rest:
        Settings.model_validate(settings)


@each_page
def test_links_lead_somewhere(page: Path) -> None:
    text = BLOCK.sub("", page.read_text("utf-8"))
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if urlsplit(target).scheme:
            continue
        file, _, anchor = unquote(target).partition("#")
        place = (page.parent / file).resolve() if file else page
        assert place.exists(), f"{page.name}: {target}"
        assert place.is_relative_to(ROOT)
        if anchor:
            slugs = {slug(heading) for heading in HEADING.findall(BLOCK.sub("", place.read_text("utf-8")))}
            assert anchor in slugs, f"{page.name}: {target}"


def slug(heading: str) -> str:
    """As GitHub makes anchors."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


@each_page
def test_files_that_are_named_exist(page: Path) -> None:
    for code in inline(page):
        if not re.fullmatch(r"[\w.-]+(/[\w.-]+)*/?", code):
            continue
        top = code.split("/")[0]
        in_repository = "/" in code and (ROOT / top).is_dir()
        in_package = "/" in code and (SOURCE / top).is_dir()
        if page.name == "ARCHITECTURE.md" or page.parent.name == "docs":
            in_package = in_package or code.endswith(".py")
        if in_repository or in_package:
            assert (ROOT / code).exists() or (SOURCE / code).exists(), f"{page.name}: {code}"


def test_the_architecture_page_names_every_room_and_no_other() -> None:
    page = ROOT / "ARCHITECTURE.md"
    (tree,) = [text for _, text in BLOCK.findall(page.read_text("utf-8")) if text.startswith("src/onlinerl/")]
    rooms = re.findall(r"^  (\S+)", tree, re.MULTILINE)
    for room in rooms:
        place = SOURCE / room
        assert place.is_dir() if room.endswith("/") else place.is_file(), room
    there = {place.name for place in SOURCE.iterdir() if (place / "__init__.py").exists()}
    there |= {place.name for place in SOURCE.glob("*.py")} - {"__init__.py"}
    assert there == {room.split("/")[0] for room in rooms} - {"models"}


@each_page
def test_modules_and_make_targets_that_are_named_exist(page: Path) -> None:
    text = page.read_text("utf-8")
    for module in re.findall(r"python -m ([\w.]+)", text):
        assert importlib.util.find_spec(module) is not None, f"{page.name}: {module}"
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    for target in re.findall(r"(?:^|`)make ([a-z-]+)", text, re.MULTILINE):
        assert target in targets, f"{page.name}: make {target}"


def test_the_metrics_of_the_page_are_those_of_the_code() -> None:
    known = {
        metric.name + ("_total" if metric.type == "counter" else "")
        for metric in REGISTRY.collect()
        if metric.name.startswith("onlinerl_")
    }
    assert len(known) > 15
    named = {name for page in PAGES for name in re.findall(r"\bonlinerl_[a-z_]+\b", page.read_text("utf-8"))}
    assert named == known


def test_the_numbers_of_a_run_and_those_of_the_page_are_the_same(tmp_path: Path) -> None:
    """Nothing is written that is not explained, and nothing explained that is not written."""
    from onlinerl.learning.run import train
    from tests.synthetic import fill, tiny_model  # torch is for this one only

    page = (ROOT / "docs" / "metrics.md").read_text("utf-8")
    explained = re.findall(r"^\| `([^`]+)` \|", page, re.MULTILINE)
    assert len(set(explained)) == len(explained)
    overrides = [
        f"policies.tab.model={tiny_model(tmp_path / 'model')}",
        "policies.tab.train.threads=1",
        "policies.tab.train.batch=16",
        "policies.tab.train.holdout=0.3",  # for the estimate at each version
        "policies.tab.train.version_every=1",
        "policies.tab.train.silence.floor=1",  # no show rate reaches it, so it is always looked at
    ]
    settings = load_settings(overrides=overrides, home=tmp_path / "home")
    fill(settings, 20, temperature=0.1)  # too cold: dropped
    fill(settings, 60, seed=1)
    train(settings, "tab", max_steps=2)
    database = Database.open(settings.database_url)
    try:
        with database.read() as c:
            in_store = {name for step in runs.steps(c, 1) for name in step.numbers}
    finally:
        database.close()
    board = EventAccumulator(str(settings.home / "runs" / "1" / "tensorboard"))
    board.Reload()
    written = set(board.Tags()["scalars"])
    assert in_store == {name for name in written if not name.startswith("version/")}
    patterns = {name: re.compile(re.sub("[A-Z]+", "[a-z_-]+", name)) for name in explained}
    unexplained = {name for name in written if not any(p.fullmatch(name) for p in patterns.values())}
    assert not unexplained, "docs/metrics.md lacks"
    unwritten = {
        name for name, pattern in patterns.items() if not any(pattern.fullmatch(one) for one in written)
    }
    assert not unwritten, "docs/metrics.md explains what no run writes"


RESULTS = (ROOT / "docs" / "RESULTS.md").read_text("utf-8")
HEADLINE = json.loads((ROOT / "docs" / "results" / "headline.json").read_text("utf-8"))


def told(text: str) -> list[tuple[float, float]]:
    """Each number of a text and by how much it may be rounded."""
    found = re.findall(r"[-+−]?\d*\.?\d+", text)
    numbers = [(float(one.replace("−", "-")), len(one.partition(".")[2])) for one in found]
    return [(value, 0.501 * 10**-digits) for value, digits in numbers]


def test_the_headlines_table_is_that_of_its_json() -> None:
    metrics = ["sampled.reward", "greedy.reward", "sampled.judge/report", "greedy.judge/report",
               "sampled.accept_shown", "sampled.shown", "greedy.exact", "greedy.characters"]  # fmt: skip
    table = RESULTS.partition("At lr 3e-5:")[2].partition("![learning curves]")[0]
    rows = [line.strip("| ").split(" | ") for line in table.splitlines() if line.startswith("| (")]
    rows += [line.strip("| ").split(" | ") for line in table.splitlines() if line.startswith("| before")]
    assert len(rows) == 7
    for label, *cells in rows:
        facts = HEADLINE["start"]
        if label != "before":
            (arm,) = [
                a for a in HEADLINE["arms"] if a.startswith(label[:4].rstrip()) and a.endswith("lr 3e-5")
            ]
            facts = HEADLINE["arms"][arm]["metrics"]
        for metric, cell in zip(metrics, cells, strict=True):
            if cell == "–":
                continue
            one = facts[metric]
            scale = 100 if "%" in cell else 1
            numbers = told(cell.replace("%", ""))
            for (value, room), name in zip(numbers, ("mean", "low", "high"), strict=len(numbers) == 3):
                assert value == pytest.approx(scale * one[name], abs=room), (label, metric, name)


def test_differences_that_the_results_tell_are_in_the_json() -> None:
    section = RESULTS.partition("![learning curves]")[2].partition("**Sabotages**")[0]
    triples = re.findall(r"([+−]\.\d+) \[([+−]\.\d+), ([+−]\.\d+)\]", section)
    assert len(triples) >= 4
    for triple in triples:
        numbers = told(" ".join(triple))
        assert any(
            all(
                value == pytest.approx(row[name], abs=room)
                for (value, room), name in zip(numbers, ("mean", "low", "high"), strict=True)
            )
            for row in HEADLINE["differences"]
        ), triple


def test_statuses_and_events_of_feedback_are_all_explained() -> None:
    from onlinerl.records import Event, FeedbackStatus

    codes = set(inline(ROOT / "docs" / "http.md"))
    assert {event.value for event in Event} <= codes
    assert {status.value for status in FeedbackStatus} <= codes


def test_fields_of_a_request_are_all_explained() -> None:
    text = (ROOT / "docs" / "http.md").read_text("utf-8")
    for model in (CompletionRequest, NativeFeedback):
        for name in model.model_fields:
            assert re.search(rf"\b{name}\b", text), f"{model.__name__}.{name}"
