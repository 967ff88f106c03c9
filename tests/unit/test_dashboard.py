"""The Grafana dashboard: that it can be imported, and that it asks for nothing that nobody has."""

from __future__ import annotations

import inspect
import itertools
import json
import re
from typing import Any

from prometheus_client import REGISTRY
from vllm.v1.metrics import loggers

from tests.support.dashboard import DASHBOARD, expressions, metric_names
from tests.unit.test_server_metrics import instruments

SCHEMA_VERSION = 39
"""Grafana 10.3; later ones migrate it."""
ROWS = ["Traffic", "Latency", "Engine load", "Cache", "Errors", "Event loop"]
SUFFIXES = {
    "counter": [""],
    "gauge": [""],
    "histogram": ["_bucket", "_sum", "_count"],
}


def dashboard() -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads(DASHBOARD.read_text())
    return loaded


def test_it_can_be_imported() -> None:
    board = dashboard()
    assert board["schemaVersion"] == SCHEMA_VERSION
    assert board["title"]
    assert re.fullmatch(r"[\w-]{1,40}", board["uid"])
    assert "id" not in board
    variables = {variable["name"]: variable for variable in board["templating"]["list"]}
    assert list(variables) == ["datasource", "job", "instance"]
    assert variables["datasource"]["query"] == "prometheus"
    ids = [panel["id"] for panel in board["panels"]]
    assert len(set(ids)) == len(ids)
    source = {"type": "prometheus", "uid": "${datasource}"}
    for panel in board["panels"]:
        if panel["type"] == "row":
            continue
        assert panel["type"] == "timeseries"
        assert panel["title"]
        assert panel["fieldConfig"]["defaults"]["unit"]
        assert panel["datasource"] == source
        assert panel["targets"]
        for target in panel["targets"]:
            assert target["datasource"] == source
            assert target["legendFormat"]
        refs = [target["refId"] for target in panel["targets"]]
        assert len(set(refs)) == len(refs)


def test_its_rows() -> None:
    panels = dashboard()["panels"]
    assert [panel["title"] for panel in panels if panel["type"] == "row"] == ROWS
    for previous, panel in itertools.pairwise(panels):
        assert not (previous["type"] == panel["type"] == "row")


def test_no_two_panels_are_in_one_place() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in dashboard()["panels"]:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        cells = set(
            itertools.product(
                range(place["x"], place["x"] + place["w"]),
                range(place["y"], place["y"] + place["h"]),
            )
        )
        assert not cells & taken
        taken |= cells


def test_its_queries_are_whole() -> None:
    for expression in expressions(dashboard()):
        for opening, closing in ("()", "{}", "[]"):
            assert expression.count(opening) == expression.count(closing)
        selectors = re.findall(r"\{([^{}]*)\}", expression)
        assert selectors
        for selector in selectors:
            assert 'job=~"$job", instance=~"$instance"' in selector
        assert "rate(" not in expression or "[$__rate_interval]" in expression


def test_every_metric_of_ours_exists() -> None:
    exported = {each.name + suffix for each in instruments() for suffix in SUFFIXES[each.kind]}
    asked = {name for name in metric_names(dashboard()) if name.startswith("openengine_")}
    assert len(asked) > 10
    assert asked <= exported


def test_every_metric_of_ours_is_on_it() -> None:
    asked = metric_names(dashboard())
    for each in instruments():
        assert any(name.startswith(each.name) for name in asked), each.name


def test_every_metric_of_others_exists() -> None:
    """Their names are in vLLM's source; a live engine is asked elsewhere."""
    declared = set(re.findall(r'"(vllm:\w+)"', inspect.getsource(loggers)))
    exported = {name + suffix for name in declared for suffix in ("", "_total", "_bucket")}
    exported |= {sample.name for metric in REGISTRY.collect() for sample in metric.samples}
    others = {name for name in metric_names(dashboard()) if not name.startswith("openengine_")}
    assert len(others) > 8
    assert others <= exported
