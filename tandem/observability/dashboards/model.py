"""A Grafana dashboard as values, and its JSON."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

DATASOURCE = {"type": "prometheus", "uid": "tandem"}
_SCHEMA = 39
_WIDTH, _HEIGHT, _PER_ROW = 8, 7, 3


@dataclass(frozen=True, slots=True)
class Query:
    """A query in PromQL. ``legend``: the name of its lines, with ``{{label}}``."""

    expr: str
    legend: str = "{{run}}"


@dataclass(frozen=True, slots=True)
class Panel:
    """A chart of one or more queries. ``unit``: as Grafana names it. ``is_stacked``: the lines add up."""

    title: str
    queries: tuple[Query, ...]
    unit: str = "short"
    is_stacked: bool = False


@dataclass(frozen=True, slots=True)
class Dashboard:
    """A dashboard: ``rows`` of panels by title. ``variables``: what the user chooses, by name, each with the query for its values."""

    name: str
    title: str
    variables: Mapping[str, str]
    rows: Mapping[str, tuple[Panel, ...]]

    def queries(self) -> list[str]:
        """Returns the expressions of all panels."""
        return [query.expr for panels in self.rows.values() for panel in panels for query in panel.queries]


def panel(title: str, *queries: str | tuple[str, str], unit: str = "short", legend: str = "{{run}}", is_stacked: bool = False) -> Panel:
    """Returns a panel of ``queries``, each with ``legend`` or its own."""
    return Panel(title, tuple(Query(each, legend) if isinstance(each, str) else Query(*each) for each in queries), unit, is_stacked)


def to_json(dashboard: Dashboard) -> dict[str, Any]:
    """Returns what Grafana imports, or reads from its folder of dashboards."""
    panels: list[dict[str, Any]] = []
    top = 0
    for title, row in dashboard.rows.items():
        panels.append({"id": len(panels) + 1, "type": "row", "title": title, "collapsed": False, "panels": [], "gridPos": _place(0, top, 24, 1)})
        top += 1
        for number, each in enumerate(row):
            place = _place(number % _PER_ROW * _WIDTH, top + number // _PER_ROW * _HEIGHT, _WIDTH, _HEIGHT)
            panels.append({"id": len(panels) + 1, "gridPos": place, **_chart(each)})
        top += -(-len(row) // _PER_ROW) * _HEIGHT
    return {
        "uid": f"tandem-{dashboard.name}", "title": dashboard.title, "tags": ["tandem"], "schemaVersion": _SCHEMA, "version": 1, "editable": True,
        "time": {"from": "now-1h", "to": "now"}, "refresh": "10s", "timezone": "browser", "graphTooltip": 1,
        "templating": {"list": [_variable(name, query) for name, query in dashboard.variables.items()]}, "annotations": {"list": []}, "panels": panels,
    }  # fmt: skip


def _place(left: int, top: int, width: int, height: int) -> dict[str, int]:
    return {"x": left, "y": top, "w": width, "h": height}


def _chart(panel: Panel) -> dict[str, Any]:
    stacking = {"stacking": {"mode": "normal", "group": "A"}, "fillOpacity": 30} if panel.is_stacked else {"fillOpacity": 0}
    return {
        "type": "timeseries", "title": panel.title, "datasource": DATASOURCE,
        "fieldConfig": {"defaults": {"unit": panel.unit, "custom": {"lineWidth": 1, "showPoints": "never", **stacking}}, "overrides": []},
        "options": {"legend": {"displayMode": "list", "placement": "bottom", "showLegend": True}, "tooltip": {"mode": "multi", "sort": "desc"}},
        "targets": [
            {"refId": chr(ord("A") + number), "datasource": DATASOURCE, "expr": query.expr, "legendFormat": query.legend, "range": True}
            for number, query in enumerate(panel.queries)
        ],
    }  # fmt: skip


def _variable(name: str, query: str) -> dict[str, Any]:
    return {
        "name": name, "label": name, "type": "query", "datasource": DATASOURCE, "query": {"query": query, "refId": name}, "definition": query, "refresh": 2,
        "multi": True, "includeAll": True, "allValue": ".*", "current": {"text": "All", "value": "$__all"}, "sort": 1,
    }  # fmt: skip
