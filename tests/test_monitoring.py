"""Dashboard and alert rules: existing metrics, guarded divisions, tested alerts."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from foreword.metrics.definitions import CATALOG, MODEL_LABEL, PREFIX, Metric
from foreword.metrics.prometheus import ENGINE_PROCESS
from tests.support.waiting import WAIT_S

ROOT = Path(__file__).parent.parent
MONITORING = ROOT / "monitoring"
RULES, RULES_TEST = MONITORING / "foreword-alerts.yml", MONITORING / "foreword-alerts.test.yml"
DASHBOARD = MONITORING / "foreword-dashboard.json"
PAGE = ROOT / "docs" / "monitoring.md"

METRICS = {row.name: row for row in CATALOG}
# prometheus_client's process metrics of the engine, as far as dashboard and alerts use them.
ENGINE_METRICS = {
    f"{ENGINE_PROCESS}_process_{name}".removeprefix(PREFIX): kind
    for name, kind in (("resident_memory_bytes", "gauge"), ("cpu_seconds_total", "counter"))
}
OUTER = {"job", "instance"}  # labels that Prometheus adds
HISTOGRAM = ("_bucket", "_count", "_sum")


def alerts() -> list[dict[str, Any]]:
    groups = yaml.safe_load(RULES.read_text(encoding="utf-8"))["groups"]
    return [rule for group in groups for rule in group["rules"]]


def panels() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(DASHBOARD.read_text(encoding="utf-8"))["panels"]
    return found


def expressions() -> dict[str, str]:
    """Every expression by its location."""
    found = {rule["alert"]: rule["expr"] for rule in alerts()}
    for panel in panels():
        for target in panel.get("targets", ()):
            found[f"{panel['title']} {target['refId']}"] = target["expr"]
    return found


EXPRESSIONS = expressions()


def metric_of(name: str) -> Metric:
    """The row of the catalog that a series belongs to; a histogram is read by its parts."""
    plain = name.removeprefix(PREFIX)
    if plain in ENGINE_METRICS:
        return Metric(plain, ENGINE_METRICS[plain], "", of_model=False)
    for suffix in HISTOGRAM:
        row = METRICS.get(plain.removesuffix(suffix))
        if plain.endswith(suffix) and row is not None and row.metric_type == "histogram":
            return row
    row = METRICS[plain]
    assert row.metric_type != "histogram", f"{name} is a histogram: {', '.join(HISTOGRAM)}"
    return row


def labels_of(metric: Metric) -> set[str]:
    return {*metric.labels, *((MODEL_LABEL,) if metric.of_model else ())}


def selectors(expression: str) -> Iterator[tuple[Metric, str, set[str]]]:
    """(metric, name, labels that are matched) of each series in an expression."""
    for name, matchers in re.findall(rf"\b({PREFIX}\w+)(?:\{{([^}}]*)\}})?", expression):
        yield metric_of(name), name, set(re.findall(r"(\w+)\s*[=!]~?", matchers))


def test_every_series_exists_with_its_labels() -> None:
    for place, expression in EXPRESSIONS.items():
        known = {"le", *OUTER}
        for metric, name, matched in selectors(expression):
            inner = {"le"} if name.endswith("_bucket") else set()
            assert matched <= {*labels_of(metric), *OUTER, *inner}, f"{place}: {name} has no such label"
            known |= labels_of(metric)
        grouped = re.findall(r"\b(?:by|without|on|ignoring)\s*\(([^)]*)\)", expression)
        assert {label.strip() for labels in grouped for label in labels.split(",")} <= known, place


def test_counters_are_read_as_rates_and_gauges_are_not() -> None:
    """A counter's raw value grows with uptime."""
    for place, expression in EXPRESSIONS.items():
        for metric, name, _ in selectors(expression):
            ranged = re.search(rf"(?:rate|increase|resets)\({name}(?:\{{[^}}]*\}})?\[", expression)
            assert bool(ranged) == (metric.metric_type != "gauge"), f"{place}: {name}"


def denominators(expression: str) -> Iterator[str]:
    """The divisor of each `/`, with its parentheses."""
    bare = re.sub(r'"[^"]*"', lambda text: "x" * len(text[0]), expression)
    for division in re.finditer("/", bare):
        start = division.end() + len(bare[division.end() :]) - len(bare[division.end() :].lstrip())
        assert bare[start] == "(", f"no guard after / in {expression}"
        depth = 0
        for end in range(start, len(bare)):
            depth += {"(": 1, ")": -1}.get(bare[end], 0)
            if depth == 0:
                yield expression[start : end + 1]
                break


def guarded(expression: str) -> bool:
    return all(re.search(r"> 0\)$", denominator) for denominator in denominators(expression))


def test_every_division_is_guarded() -> None:
    """0 / 0 is NaN; `> 0` removes the sample instead."""
    assert [place for place, expression in EXPRESSIONS.items() if not guarded(expression)] == []


def test_empty_quantiles_are_guarded() -> None:
    quantiles = {place: text.strip() for place, text in EXPRESSIONS.items() if "histogram_quantile" in text}
    assert quantiles
    assert [place for place, text in quantiles.items() if not re.search(r"and .*_count.* > 0$", text)] == []


def test_unguarded_division_is_detected() -> None:
    assert guarded("rate(a[5m]) / (rate(b[5m]) > 0) < 0.6")
    assert not guarded("rate(a[5m]) / (rate(b[5m]) + rate(c[5m])) < 0.6")
    assert guarded('rate(a{path="x/y"}[5m]) > 0')
    with pytest.raises(AssertionError, match="no guard"):
        guarded("rate(a[5m]) / rate(b[5m])")


# Alerts


def test_alerts_have_summary_and_instructions() -> None:
    for rule in alerts():
        assert re.fullmatch(r"Foreword[A-Z]\w+", rule["alert"])
        assert rule["labels"]["severity"] in ("critical", "warning", "info"), rule["alert"]
        notes = rule["annotations"]
        assert set(notes) == {"summary", "description", "action"}, rule["alert"]
        assert all(note and "\n" not in note for note in notes.values()), rule["alert"]
        assert "$labels.instance" in notes["summary"], rule["alert"]


def test_alerts_are_unique_and_documented() -> None:
    names = [rule["alert"] for rule in alerts()]
    assert len(set(names)) == len(names)
    written = re.findall(r"^\| `(Foreword\w+)` \| (\w+) \|", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert written == [(rule["alert"], rule["labels"]["severity"]) for rule in alerts()]


def rule_tests() -> dict[str, list[dict[str, Any]]]:
    """Expectations of the rule tests by alert."""
    found: dict[str, list[dict[str, Any]]] = {}
    for test in yaml.safe_load(RULES_TEST.read_text(encoding="utf-8"))["tests"]:
        for expected in test["alert_rule_test"]:
            found.setdefault(expected["alertname"], []).append(expected)
    return found


def test_every_alert_has_a_firing_test() -> None:
    expected = rule_tests()
    assert set(expected) == {rule["alert"] for rule in alerts()}
    assert all(any(test["exp_alerts"] for test in tests) for tests in expected.values())


def test_the_series_of_the_rule_tests_exist() -> None:
    for test in yaml.safe_load(RULES_TEST.read_text(encoding="utf-8"))["tests"]:
        for series in test["input_series"]:
            for metric, name, labels in selectors(series["series"]):
                inner = {"le"} if name.endswith("_bucket") else set()
                assert labels == {*labels_of(metric), *OUTER, *inner}, series["series"]


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
@pytest.mark.parametrize(
    "command", [("check", "rules", RULES.name), ("test", "rules", RULES_TEST.name)], ids=lambda c: c[0]
)
def test_promtool_accepts_the_rules(command: tuple[str, ...]) -> None:
    done = subprocess.run(
        ["promtool", *command], cwd=MONITORING, capture_output=True, text=True, timeout=WAIT_S, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


# The dashboard


def test_the_dashboard_can_be_imported() -> None:
    board = json.loads(DASHBOARD.read_text(encoding="utf-8"))
    assert board["title"] == "Foreword" and board["uid"] == "foreword" and board["schemaVersion"] >= 36
    variables = {item["name"]: item for item in board["templating"]["list"]}
    assert set(variables) == {"datasource", "job", "instance", MODEL_LABEL}
    assert variables["datasource"]["type"] == "datasource"
    ids = [panel["id"] for panel in panels()]
    assert len(set(ids)) == len(ids)
    for panel in panels():
        if panel["type"] != "row":
            assert panel["datasource"]["uid"] == "${datasource}" and panel["description"], panel["title"]


def test_panels_do_not_overlap() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in panels():
        place = panel["gridPos"]
        cells = {(place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])}
        assert not cells & taken and place["x"] + place["w"] <= 24, panel["title"]
        taken |= cells


def test_every_panel_filters_by_instance_and_model() -> None:
    for panel in panels():
        for target in panel.get("targets", ()):
            for metric, name, labels in selectors(target["expr"]):
                wanted = OUTER | ({MODEL_LABEL} if metric.of_model else set())
                assert labels >= wanted, f"{panel['title']}: {name}"


def test_the_dashboard_shows_every_metric() -> None:
    shown = {
        metric.name
        for panel in panels()
        for target in panel.get("targets", ())
        for metric, _, _ in selectors(target["expr"])
    }
    assert shown == {*METRICS, *ENGINE_METRICS}
