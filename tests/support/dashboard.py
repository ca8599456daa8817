"""The dashboard's queries, by who answers them."""

from __future__ import annotations

import json
import re
from pathlib import Path

DASHBOARD = Path(__file__).parents[2] / "docs" / "grafana.json"


def asked_metrics(by_stages: bool) -> dict[str, set[str]]:
    """Each query with the metrics that it names: of the coordinator, or (those below the row of
    that name) of the stages themselves."""
    panels = json.loads(DASHBOARD.read_text(encoding="utf-8"))["panels"]
    (row,) = (at for at, panel in enumerate(panels) if panel["type"] == "row")
    assert "edgespec join --metrics" in panels[row]["title"]
    chosen = panels[row + 1 :] if by_stages else panels[:row]
    return {
        target["expr"]: set(re.findall(r"(?:edgespec|process)_[a-z_]+", target["expr"]))
        for panel in chosen
        for target in panel["targets"]
    }
