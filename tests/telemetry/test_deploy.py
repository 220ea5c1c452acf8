"""What is checked in for Grafana and Prometheus names only metrics, labels and commands that there are."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import promql_parser
import pytest
import yaml

from fairlane.telemetry.metrics import CATALOGUE
from tests.test_docs import check_command

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
GIVEN_BY_PROMETHEUS = {"instance", "job"}
FOREIGN = {"up"}
"""Metrics that Prometheus makes."""
UNITS = {"short", "ops", "s", "percentunit", "bool"}


def rules() -> list[dict[str, Any]]:
    document = yaml.safe_load((DEPLOY / "prometheus" / "alerts.yml").read_text())
    return [rule for group in document["groups"] for rule in group["rules"]]


def dashboard() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((DEPLOY / "grafana" / "fairlane.json").read_text())
    return found


def panels() -> list[dict[str, Any]]:
    return [panel for panel in dashboard()["panels"] if panel["type"] != "row"]


def filled(expression: str) -> str:
    """An expression with Grafana's variables filled in, as Prometheus gets it."""
    return expression.replace("$__rate_interval", "1m").replace("$queue", ".*").replace("$instance", ".*")


def check(expression: str) -> set[str]:
    """The metrics of an expression. Fail unless it can be read, and they have the labels that are asked of them."""
    parsed = promql_parser.parse(filled(expression))
    metrics: set[str] = set()
    labels: set[str] = set()
    have: set[str] = set()

    def visit(node: Any) -> bool:
        if isinstance(node, promql_parser.VectorSelector):
            assert node.name is not None, f"{expression}: a selector without a name"
            metric, own = known(node.name)
            metrics.add(metric)
            have.update(own)
            asked = {matcher.name for matcher in node.matchers.matchers}
            assert asked <= own, f"{expression}: {node.name} has no label {asked - own}"
        modifier = getattr(node, "modifier", None)
        labels.update(getattr(modifier, "labels", None) or ())
        labels.update(getattr(getattr(modifier, "matching", None), "labels", None) or ())
        return True

    promql_parser.walk(parsed, visit)
    assert labels <= have, f"{expression}: no metric in it has {labels - have}"
    assert metrics, f"{expression}: it asks for nothing"
    return metrics


def known(name: str) -> tuple[str, set[str]]:
    """The metric that a series belongs to, and the labels that it has."""
    if name in FOREIGN:
        return name, GIVEN_BY_PROMETHEUS
    plain = re.sub(r"_(bucket|sum|count)\Z", "", name)
    is_histogram = plain in CATALOGUE and CATALOGUE[plain].kind == "histogram"
    assert is_histogram or name in CATALOGUE, f"there is no metric {name}"
    assert not (name == plain and is_histogram), f"{name} is a histogram: ask for its _bucket, _sum or _count"
    metric = CATALOGUE[plain if is_histogram else name]
    return metric.name, {*metric.labels, *GIVEN_BY_PROMETHEUS, *(["le"] if name.endswith("_bucket") else [])}


@pytest.mark.parametrize("rule", rules(), ids=lambda rule: rule["alert"])
def test_an_alert_can_be_read_and_says_what_to_do(rule: dict[str, Any]) -> None:
    check(rule["expr"])
    assert rule["labels"]["severity"] in ("critical", "warning", "info")
    told = rule["annotations"]
    assert set(told) == {"summary", "runbook", "command"}
    assert all(len(text) > 10 for text in told.values())
    named = set(re.findall(r"\$labels\.(\w+)", " ".join(told.values())))
    assert named <= left_by(rule["expr"])
    check_command(shlex.split(re.sub(r"\{\{ \$labels\.\w+ \}\}", "webhooks", told["command"])))


def left_by(expression: str) -> set[str]:
    """The labels that an alert has: those of the first `by`, or all."""
    if found := re.search(r"\bby \(([^)]+)\)", expression):
        return {label.strip() for label in found[1].split(",")} - {"le"}
    return GIVEN_BY_PROMETHEUS


def test_there_is_an_alert_for_everything_that_can_go_wrong() -> None:
    asked = set().union(*(check(rule["expr"]) for rule in rules()))
    assert asked >= {
        "fairlane_queue_ready_jobs",
        "fairlane_queue_startable_jobs",
        "fairlane_queue_long_runs",
        "fairlane_workers_blocked",
        "fairlane_event_loop_blocked_seconds_total",
        "fairlane_queue_oldest_wait_seconds",
        "fairlane_queue_dead_jobs",
        "fairlane_loop_alive",
        "fairlane_claims_lost_total",
        "up",
        "fairlane_store_connected",
        "fairlane_telemetry_failures_total",
    }
    names = [rule["alert"] for rule in rules()]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("panel", panels(), ids=lambda panel: panel["title"])
def test_a_panel_asks_for_what_there_is_and_has_a_unit(panel: dict[str, Any]) -> None:
    assert panel["type"] in ("stat", "timeseries")
    assert panel["targets"]
    for target in panel["targets"]:
        check(target["expr"])
        for label in re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]):
            assert label in left_by(target["expr"])
    assert panel["fieldConfig"]["defaults"]["unit"] in UNITS
    assert len(panel["description"]) > 5


def test_figures_of_the_fleet_are_not_added_up_over_those_who_tell_them() -> None:
    """Every worker tells of them: their sum counts a queue once for each worker."""
    for expression in [rule["expr"] for rule in rules()] + [t["expr"] for p in panels() for t in p["targets"]]:
        for name in re.findall(r"fairlane_\w+", expression):
            if name in CATALOGUE and CATALOGUE[name].scope == "fleet" and not expression.startswith("absent"):
                assert re.search(rf"max (by \([^)]+\) )?\({name}|max\({name}", expression), expression


def test_the_dashboard_shows_every_metric_once_at_least_and_lies_on_a_grid() -> None:
    shown = set().union(*(check(target["expr"]) for panel in panels() for target in panel["targets"]))
    hidden = {"fairlane_jobs_claimed_total", "fairlane_queue_scheduled_jobs", "fairlane_queue_workers"}
    assert shown == set(CATALOGUE) - hidden
    whole = dashboard()
    assert len({panel["id"] for panel in whole["panels"]}) == len(whole["panels"])
    taken: set[tuple[int, int]] = set()
    for place in (panel["gridPos"] for panel in whole["panels"]):
        cells = set(cells_of(place))
        assert place["x"] + place["w"] <= 24
        assert not cells & taken
        taken |= cells
    variables = {each["name"]: each for each in whole["templating"]["list"]}
    assert set(variables) == {"datasource", "queue", "instance"}
    for name in ("queue", "instance"):
        metric, label = re.fullmatch(r"label_values\((\w+), (\w+)\)", variables[name]["definition"]).groups()  # type: ignore[union-attr]
        assert label in known(metric)[1]


def cells_of(place: dict[str, int]) -> Iterator[tuple[int, int]]:
    for x in range(place["x"], place["x"] + place["w"]):
        for y in range(place["y"], place["y"] + place["h"]):
            yield x, y


@pytest.mark.parametrize(
    "wrong",
    [
        "fairlane_jobs_walked_total",
        'fairlane_jobs_ended_total{colour="red"}',
        "sum by (colour) (fairlane_jobs_running)",
        "fairlane_job_run_seconds",
        "sum by (task) (fairlane_jobs_running)",
    ],
)
def test_what_there_is_not_is_noticed(wrong: str) -> None:
    with pytest.raises(AssertionError):
        check(wrong)


@pytest.mark.parametrize("wrong", ["sum(fairlane_slots", "rate(fairlane_slots)", "fairlane_slots >"])
def test_what_cannot_be_read_is_noticed(wrong: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        check(wrong)
