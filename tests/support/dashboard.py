"""The metrics that the Grafana dashboard asks for."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

DASHBOARD = Path(__file__).parents[2] / "examples" / "grafana" / "openengine.json"
_FUNCTIONS = {"by", "sum", "max", "rate", "increase", "histogram_quantile", "label_values"}


def expressions(dashboard: dict[str, Any]) -> list[str]:
    """The queries of all panels."""
    return [target["expr"] for p in dashboard["panels"] for target in p.get("targets", ())]


def metric_names(dashboard: dict[str, Any]) -> set[str]:
    """The names in all queries, those that fill the variables included."""
    variables = [v["definition"] for v in dashboard["templating"]["list"] if "definition" in v]
    names: set[str] = set()
    for query in (*expressions(dashboard), *variables):
        bare = re.sub(r"\{[^{}]*\}|\[[^\[\]]*\]|by \([^()]*\)", "", query)
        bare = re.sub(r", (job|instance)\)", ")", bare)
        names |= set(re.findall(r"[a-zA-Z_][\w:]*", bare))
    return names - _FUNCTIONS
