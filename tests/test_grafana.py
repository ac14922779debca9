"""The Grafana dashboard asks for metrics and labels that exist, and leaves none of the metrics out."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from prometheus_client import REGISTRY

from onlinerl import observe

FILE = Path(__file__).parents[1] / "deploy" / "grafana" / "onlinerl.json"
BOARD: dict[str, Any] = json.loads(FILE.read_text("utf-8"))


def families() -> dict[str, set[str]]:
    """Every name under which a metric is scraped, with its labels."""
    found: dict[str, set[str]] = {}
    for thing in vars(observe).values():
        if not (hasattr(thing, "_labelnames") and hasattr(thing, "collect")):
            continue
        (family,) = thing.describe() or thing.collect()
        endings = {"counter": ["_total"], "histogram": ["_bucket", "_sum", "_count"]}.get(family.type, [""])
        for ending in endings:
            found[family.name + ending] = {*thing._labelnames, *(["le"] if ending == "_bucket" else [])}
    return found


def expressions() -> Iterator[str]:
    for panel in BOARD["panels"]:
        for target in panel.get("targets", []):
            yield target["expr"]
    for note in BOARD["annotations"]["list"]:
        yield note["expr"]
    for variable in BOARD["templating"]["list"]:
        if variable["type"] == "query":
            yield variable["query"]["query"]


def test_every_metric_and_label_that_it_names_exists() -> None:
    known = families()
    asked = 0
    for expression in expressions():
        names = re.findall(r"\bonlinerl_[a-z_]+\b", expression)
        assert names, expression
        for name in names:
            assert name in known, f"{name} in {expression}"
            asked += 1
        for name, labels in re.findall(r"(onlinerl_[a-z_]+)\{([^}]*)\}", expression):
            assert set(re.findall(r"(\w+)\s*[=!]", labels)) <= known[name], expression
        for labels in re.findall(r"\bby \(([^)]*)\)", expression):
            everything = set.union(*(known[name] for name in names))
            assert {label.strip() for label in labels.split(",")} <= everything, expression
        assert expression.count("(") == expression.count(")"), expression
    assert asked > 30


def test_legends_name_labels_that_the_expression_keeps() -> None:
    known = families()
    for panel in BOARD["panels"]:
        for target in panel.get("targets", []):
            names = re.findall(r"\bonlinerl_[a-z_]+\b", target["expr"])
            kept = re.findall(r"\bby \(([^)]*)\)", target["expr"])
            labels = {one.strip() for group in kept for one in group.split(",")} or known[names[0]]
            assert set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"])) <= labels, target


def test_no_metric_of_ours_is_left_out() -> None:
    text = " ".join(expressions())
    ours = {metric.name for metric in REGISTRY.collect() if metric.name.startswith("onlinerl_")}
    assert {name for name in ours if name not in text} == set()


def test_panels_have_places_of_their_own() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in BOARD["panels"]:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken, panel["title"]
        taken |= cells
    assert len({panel["id"] for panel in BOARD["panels"]}) == len(BOARD["panels"])
