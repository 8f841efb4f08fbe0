"""Boards as Grafana's JSON, one panel a line, so that a change of one is a change of a line."""

import json
from collections.abc import Callable, Iterator
from typing import Any

from helm.boards.panels import Board, Panel, Row, Shape

_WIDTH = 24  # of a board, in Grafana's units
_SOURCE = {"type": "prometheus", "uid": "${datasource}"}
_GATEWAYS = "baton_requests_in_flight"  # which every gateway has

Json = dict[str, Any]


def as_json(board: Board, meaning: Callable[[str], str]) -> str:
    """Returns the text of a board. meaning: says what a metric is, in the panels that show it."""
    head = {
        "title": board.title,
        "uid": f"baton-{board.name}",
        "tags": ["baton"],
        "schemaVersion": 39,
        "timezone": "browser",
        "refresh": "30s",
        "time": {"from": "now-1h", "to": "now"},
        "links": [
            {"type": "dashboards", "title": "Baton", "tags": ["baton"], "keepTime": True, "includeVars": True},
        ],
        "templating": {"list": list(_variables(board))},
    }
    lines = [f" {json.dumps(key)}: {json.dumps(value)}" for key, value in head.items()]
    panels = ",\n".join(f"  {json.dumps(panel)}" for panel in _panels(board, meaning))
    return "{\n" + ",\n".join([*lines, f' "panels": [\n{panels}\n ]']) + "\n}\n"


def _variables(board: Board) -> Iterator[Json]:
    yield {"name": "datasource", "label": "source", "type": "datasource", "query": "prometheus"}
    yield _labels("namespace", f"label_values({_GATEWAYS}, namespace)") | _ALL
    yield _labels("job", f'label_values({_GATEWAYS}{{namespace=~"$namespace"}}, job)') | _ALL
    if board.bounds_of is not None:
        query = f'label_values({board.bounds_of}_bucket{{namespace=~"$namespace",job=~"$job"}}, le)'
        chosen = {"text": "1.0", "value": "1.0"}
        yield _labels("slo", query) | {"label": "goal (s)", "regex": "/^[0-9.]+$/", "sort": 3, "current": chosen}


# Metrics of a Prometheus outside of Kubernetes have no namespace, which only `.*` finds too.
_ALL = {"includeAll": True, "allValue": ".*", "current": {"text": "All", "value": "$__all"}}


def _labels(name: str, query: str) -> Json:
    return {"name": name, "label": name, "type": "query", "datasource": _SOURCE, "query": query, "refresh": 2}


def _panels(board: Board, meaning: Callable[[str], str]) -> Iterator[Json]:
    number, top = 0, 0
    for row in board.rows:
        place = {"h": 1, "w": _WIDTH, "x": 0, "y": top}
        number, top = number + 1, top + 1
        yield {"id": number, "type": "row", "title": row.title, "collapsed": False, "gridPos": place, "panels": []}
        for index, panel in enumerate(row.panels):
            number += 1
            yield {"id": number, **_panel(panel, meaning), "gridPos": _place(row, index, top)}
        top += row.height * -(-len(row.panels) // row.columns)


def _place(row: Row, index: int, top: int) -> Json:
    line, column = divmod(index, row.columns)
    width = _WIDTH // row.columns
    return {"h": row.height, "w": width, "x": column * width, "y": top + line * row.height}


def _panel(panel: Panel, meaning: Callable[[str], str]) -> Json:
    shown = dict.fromkeys(name for query in panel.queries for name in query.metrics)
    return {
        "type": panel.shape.split()[0],
        "title": panel.title,
        "description": "\n\n".join(f"`{name}`: {meaning(name)}" for name in shown),
        "datasource": _SOURCE,
        **_LOOKS[panel.shape](panel),
        "targets": [_target(panel, index) for index in range(len(panel.queries))],
    }


def _target(panel: Panel, index: int) -> Json:
    query = panel.queries[index]
    target: Json = {"expr": query.expr, "legendFormat": query.legend, "refId": chr(ord("A") + index)}
    if panel.shape in (Shape.TABLE, Shape.HEAT):
        target["format"] = str(panel.shape)
    if panel.shape in (Shape.TABLE, Shape.NUMBER):
        target["instant"] = True
    return target


def _lines(panel: Panel) -> Json:
    custom: Json = {"lineWidth": 1, "fillOpacity": 10, "showPoints": "never"}
    if panel.shape is Shape.STACK:
        custom |= {"stacking": {"mode": "normal"}, "fillOpacity": 60}
    return {
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0, "custom": custom}, "overrides": []},
        "options": {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi"}},
    }


def _number(panel: Panel) -> Json:
    steps: list[Json] = [{"color": "green", "value": None}]
    if panel.wrong_from is not None:
        steps.append({"color": "red", "value": panel.wrong_from})
    defaults = {"unit": panel.unit, "noValue": "0", "thresholds": {"mode": "absolute", "steps": steps}}
    reduced = {"calcs": ["lastNotNull"], "fields": "", "values": False}
    return {"fieldConfig": {"defaults": defaults, "overrides": []}, "options": {"reduceOptions": reduced}}


def _table(panel: Panel) -> Json:
    """Shows labels alone: the value of an info metric is 1."""
    hidden = {"Time": True, "Value": True}
    return {
        "fieldConfig": {"defaults": {"unit": panel.unit}, "overrides": []},
        "options": {"showHeader": True},
        "transformations": [{"id": "organize", "options": {"excludeByName": hidden}}],
    }


def _heat(panel: Panel) -> Json:
    return {
        "fieldConfig": {"defaults": {}, "overrides": []},
        "options": {
            "calculate": False,
            "cellGap": 0,
            "color": {"mode": "scheme", "scheme": "Viridis", "exponent": 0.5, "steps": 64},
            "yAxis": {"unit": panel.unit},
            "tooltip": {"mode": "single", "yHistogram": True},
        },
    }


_LOOKS: dict[Shape, Callable[[Panel], Json]] = {
    Shape.LINES: _lines,
    Shape.STACK: _lines,
    Shape.NUMBER: _number,
    Shape.TABLE: _table,
    Shape.HEAT: _heat,
}
