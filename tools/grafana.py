"""Grafana dashboards as titles, queries and units. The rest of their JSON is the same for all of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

Json = dict[str, Any]

_WIDTH = 24
_SOURCE = {"type": "prometheus", "uid": "${datasource}"}


@dataclass(frozen=True, kw_only=True)
class Query:
    """An expression, and the legend of its series."""

    expr: str
    legend: str = ""


@dataclass(frozen=True, kw_only=True)
class Panel:
    title: str
    queries: Sequence[Query]
    kind: str = "timeseries"
    unit: str = "short"
    width: int = 8
    height: int = 7
    stacked: bool = False
    about: str = ""


@dataclass(frozen=True, kw_only=True)
class Row:
    """Panels under one heading."""

    title: str
    panels: Sequence[Panel]


@dataclass(frozen=True, kw_only=True)
class Dashboard:
    uid: str
    title: str
    rows: Sequence[Row]
    variables: Sequence[tuple[str, str]] = ()
    """Name → the `label_values` of its choices."""


def one(title: str, expr: str, legend: str = "", **rest: Any) -> Panel:
    """Return a panel with a single query."""
    return Panel(title=title, queries=[Query(expr=expr, legend=legend)], **rest)


def stat(title: str, expr: str, unit: str = "short") -> Panel:
    """Return a panel that shows a number."""
    return one(title, expr, kind="stat", unit=unit, width=4, height=4)


def render(dashboard: Dashboard) -> Json:
    """Return the dashboard's JSON."""
    return {
        "uid": dashboard.uid,
        "title": dashboard.title,
        "tags": ["holdfast"],
        "schemaVersion": 39,
        "version": 1,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "30s",
        "time": {"from": "now-6h", "to": "now"},
        "templating": {"list": [_source_variable(), *(_variable(*variable) for variable in dashboard.variables)]},
        "links": [{"title": "Holdfast", "type": "dashboards", "tags": ["holdfast"], "keepTime": True}],
        "panels": list(_panels(dashboard)),
    }


def _panels(dashboard: Dashboard) -> Iterator[Json]:
    number, y = 0, 0
    for row in dashboard.rows:
        number += 1
        yield {
            "id": number,
            "type": "row",
            "title": row.title,
            "collapsed": False,
            "panels": [],
            "gridPos": _at(0, y),
        }
        x, y, tallest = 0, y + 1, 0
        for panel in row.panels:
            number += 1
            if x + panel.width > _WIDTH:
                x, y, tallest = 0, y + tallest, 0
            yield _panel(panel, number, _at(x, y, panel.width, panel.height))
            x, tallest = x + panel.width, max(tallest, panel.height)
        y += tallest


def _at(x: int, y: int, width: int = _WIDTH, height: int = 1) -> Json:
    return {"x": x, "y": y, "w": width, "h": height}


def _panel(panel: Panel, number: int, place: Json) -> Json:
    return {
        "id": number,
        "type": panel.kind,
        "title": panel.title,
        "description": panel.about,
        "datasource": _SOURCE,
        "gridPos": place,
        "fieldConfig": {"defaults": {"unit": panel.unit, "custom": _custom(panel)}, "overrides": []},
        "options": _options(panel),
        "targets": [
            {"refId": chr(ord("A") + index), "datasource": _SOURCE, "expr": query.expr, "legendFormat": query.legend}
            for index, query in enumerate(panel.queries)
        ],
    }


def _custom(panel: Panel) -> Json:
    if panel.kind != "timeseries":
        return {}
    mode = "normal" if panel.stacked else "none"
    return {"fillOpacity": 30 if panel.stacked else 0, "stacking": {"mode": mode, "group": "A"}}


def _options(panel: Panel) -> Json:
    if panel.kind == "stat":
        return {"reduceOptions": {"calcs": ["lastNotNull"]}, "colorMode": "none", "graphMode": "area"}
    return {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi", "sort": "desc"}}


def _source_variable() -> Json:
    return {"name": "datasource", "label": "Prometheus", "type": "datasource", "query": "prometheus"}


def _variable(name: str, values: str) -> Json:
    return {
        "name": name,
        "type": "query",
        "datasource": _SOURCE,
        "query": {"query": values, "refId": "A"},
        "refresh": 2,
        "sort": 1,
    }
