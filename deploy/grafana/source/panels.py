"""Grafana's JSON of a dashboard, from rows of panels: what is the same for all of them is said once, here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

Json = dict[str, Any]

SOURCE: Json = {"type": "prometheus", "uid": "${datasource}"}
WIDTH = 24


@dataclass
class Panel:
    """``queries``: PromQL with its legend. ``unit``: Grafana's name. ``kind``: timeseries, stat, state-timeline, table."""

    title: str
    description: str
    queries: Sequence[tuple[str, str]]
    unit: str = "short"
    width: int = 8
    height: int = 8
    kind: str = "timeseries"
    stacked: bool = False
    most: float | None = None
    steps: Sequence[tuple[str, float | None]] = ()
    """Colours from values on."""
    words: dict[str, str] = field(default_factory=dict)
    """Values that have names."""


@dataclass
class Row:
    """``closed``: its panels are fetched once somebody opens it."""

    title: str
    panels: Sequence[Panel]


@dataclass
class Dashboard:
    """``variables``: names of labels, each with the metric that has all of its values."""

    uid: str
    title: str
    description: str
    variables: Sequence[tuple[str, str]]
    rows: Sequence[Row]

    def json(self) -> Json:
        """As Grafana provisions it."""
        return {
            "uid": self.uid,
            "title": f"Warmroute: {self.title}",
            "description": self.description,
            "tags": ["warmroute", "llm"],
            "schemaVersion": 39,
            "version": 1,
            "editable": True,
            "graphTooltip": 1,
            "refresh": "10s",
            "timezone": "",
            "time": {"from": "now-30m", "to": "now"},
            "templating": {"list": [_source(), *(_variable(name, metric) for name, metric in self.variables)]},
            "annotations": {"list": ANNOTATIONS},
            "links": [
                {
                    "type": "dashboards",
                    "tags": ["warmroute"],
                    "title": "Warmroute",
                    "asDropdown": True,
                    "keepTime": True,
                    "includeVars": True,
                }
            ],
            "panels": self._panels(),
        }

    def _panels(self) -> list[Json]:
        made: list[Json] = []
        y = 0
        for row in self.rows:
            grid = {"h": 1, "w": WIDTH, "x": 0, "y": y}
            made.append(
                {
                    "id": len(made) + 1,
                    "type": "row",
                    "title": row.title,
                    "collapsed": False,
                    "panels": [],
                    "gridPos": grid,
                }
            )
            y, x, tallest = y + 1, 0, 0
            for panel in row.panels:
                if x + panel.width > WIDTH:
                    x, y, tallest = 0, y + tallest, 0
                at = {"h": panel.height, "w": panel.width, "x": x, "y": y}
                made.append({"id": len(made) + 1, "gridPos": at, **_panel(panel)})
                x, tallest = x + panel.width, max(tallest, panel.height)
            y += tallest
        return made


def _event(name: str, colour: str, query: str, text: str) -> Json:
    return {
        "name": name,
        "datasource": SOURCE,
        "enable": True,
        "iconColor": colour,
        "expr": query,
        "step": "15s",
        "titleFormat": name,
        "textFormat": text,
    }


ANNOTATIONS = [
    _event("Configuration followed", "blue", "changes(warmroute_config_generation[1m]) > 0", "{{instance}}"),
    _event("Gateway started", "green", 'changes(process_start_time_seconds{job="warmroute"}[1m]) > 0', "{{instance}}"),
    _event("Worker down", "red", 'warmroute_worker_state{state="down"} == 1', "{{worker}}"),
    _event("Worker draining", "orange", 'warmroute_worker_state{state="draining"} == 1', "{{worker}}"),
]


def _source() -> Json:
    return {
        "name": "datasource",
        "label": "Data source",
        "type": "datasource",
        "query": "prometheus",
        "current": {},
        "refresh": 1,
    }


def _variable(name: str, metric: str) -> Json:
    query = f"label_values({metric}, {name})"
    return {
        "name": name,
        "label": name.capitalize(),
        "type": "query",
        "datasource": SOURCE,
        "query": {"query": query, "refId": name},
        "definition": query,
        "refresh": 2,
        "sort": 1,
        "multi": True,
        "includeAll": True,
        "allValue": ".*",
        "current": {"text": ["All"], "value": ["$__all"]},
    }


def _panel(panel: Panel) -> Json:
    defaults: Json = {"unit": panel.unit, "min": 0} if panel.unit != "s" or not panel.words else {"unit": panel.unit}
    if panel.most is not None:
        defaults["max"] = panel.most
    if panel.steps:
        defaults["color"] = {"mode": "thresholds"}
        defaults["thresholds"] = {
            "mode": "absolute",
            "steps": [{"color": colour, "value": value} for colour, value in panel.steps],
        }
    if panel.words:
        named = {value: {"text": text, "index": place} for place, (value, text) in enumerate(panel.words.items())}
        defaults["mappings"] = [{"type": "value", "options": named}]
    legend: Json = {"displayMode": "list", "placement": "bottom", "showLegend": True}
    tooltip: Json = {"mode": "multi", "sort": "desc"}
    options: Json = {"legend": legend, "tooltip": tooltip}
    if panel.kind == "timeseries":
        stacking = {"mode": "normal" if panel.stacked else "none", "group": "A"}
        defaults["custom"] = {
            "lineWidth": 1,
            "fillOpacity": 40 if panel.stacked else 5,
            "showPoints": "never",
            "stacking": stacking,
        }
    elif panel.kind == "state-timeline":
        defaults["custom"] = {"lineWidth": 0, "fillOpacity": 80}
        options = {
            "mergeValues": True,
            "showValue": "auto",
            "alignValue": "left",
            "rowHeight": 0.9,
            "legend": legend,
            "tooltip": {"mode": "single"},
        }
    elif panel.kind == "stat":
        options = {
            "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
            "colorMode": "value",
            "graphMode": "area",
            "textMode": "auto",
        }
    return {
        "type": panel.kind,
        "title": panel.title,
        "description": panel.description,
        "datasource": SOURCE,
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "options": options,
        "targets": [
            {
                "refId": chr(ord("A") + place),
                "datasource": SOURCE,
                "expr": query,
                "legendFormat": told,
                "editorMode": "code",
                "range": True,
            }
            for place, (query, told) in enumerate(panel.queries)
        ],
    }
