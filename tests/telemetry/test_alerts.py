"""The alert rules, run by Prometheus' own tool: they page for what stands still, not for what is held on purpose."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.installing import apt_install, may_install, one_at_a_time

RULES = Path(__file__).resolve().parents[2] / "deploy" / "prometheus" / "alerts.yml"


@pytest.fixture(scope="module")
def promtool() -> str:
    with one_at_a_time():
        if shutil.which("promtool") is None:
            if not may_install():
                pytest.skip("promtool is not installed, and may not be")
            apt_install("prometheus")
    found = shutil.which("promtool")
    assert found is not None
    return found


def series(name: str, value: str, **labels: str) -> dict[str, str]:
    told = ",".join(f'{label}="{text}"' for label, text in labels.items())
    return {"series": f"{name}{{{told}}}", "values": value}


def of_queue(ready: int, held: int, running: int, limit: str) -> list[dict[str, str]]:
    """A queue as a worker tells of it for ten minutes, a sample every fifteen seconds."""
    stats = {"ready": ready, "startable": ready - held, "running": running}
    told = [series(f"fairlane_queue_{name}_jobs", f"{value}x40", queue="shop") for name, value in stats.items()]
    return [*told, series("fairlane_queue_held_jobs", f"{held}x40", queue="shop", limit=limit)]


CASES: list[tuple[str, list[dict[str, str]], str, list[dict[str, str]]]] = [
    ("a slow rate holds all", of_queue(10, 10, 0, "rate"), "FairlaneJobsWaitAndNothingRuns", []),
    ("a pause holds all", of_queue(10, 10, 0, "pause:account"), "FairlaneJobsWaitAndNothingRuns", []),
    ("some run", of_queue(10, 0, 1, "rate"), "FairlaneJobsWaitAndNothingRuns", []),
    (
        "one paused job beside 10,000 that are stuck",
        of_queue(10_001, 1, 0, "pause:account"),
        "FairlaneJobsWaitAndNothingRuns",
        [{"queue": "shop", "severity": "critical"}],
    ),
    (
        "a handler blocks a loop now",
        [series("fairlane_workers_blocked", "_x36 1x4", task="parse")],
        "FairlaneEventLoopBlocked",
        [{"task": "parse", "severity": "warning"}],
    ),
    (
        "a handler has blocked the loop of the only worker",
        [series("fairlane_event_loop_blocked_seconds_total", "0x30 29x10", task="parse", instance="a")],
        "FairlaneEventLoopBlocked",
        [{"task": "parse", "severity": "warning"}],
    ),
    (
        "a handler has blocked a loop for two seconds",
        [series("fairlane_event_loop_blocked_seconds_total", "0x30 2x10", task="parse", instance="a")],
        "FairlaneEventLoopBlocked",
        [],
    ),
    (
        "a run takes long",
        [series("fairlane_queue_long_runs", "_x30 1x10", queue="shop", task="export")],
        "FairlaneLongRun",
        [{"queue": "shop", "task": "export", "severity": "warning"}],
    ),
    (
        "a run took long for a moment",
        [series("fairlane_queue_long_runs", "_x30 1x2 stale", queue="shop", task="export")],
        "FairlaneLongRun",
        [],
    ),
]


@pytest.mark.parametrize(("told", "alert", "paged"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_an_alert_pages_for_what_stands_still(
    promtool: str, tmp_path: Path, told: list[dict[str, str]], alert: str, paged: list[dict[str, Any]]
) -> None:
    """N11 and O18, after ten minutes of samples."""
    rules = yaml.safe_load(RULES.read_text())
    for group in rules["groups"]:  # what an alert says is checked elsewhere; here, when it does
        group["rules"] = [{**rule, "annotations": {}} for rule in group["rules"] if rule["alert"] == alert]
        assert group["rules"], alert
    (tmp_path / "alerts.yml").write_text(yaml.safe_dump(rules))
    expected = {"eval_time": "10m", "alertname": alert, "exp_alerts": [{"exp_labels": each} for each in paged]}
    test = {"interval": "15s", "input_series": told, "alert_rule_test": [expected]}
    (tmp_path / "test.yml").write_text(yaml.safe_dump({"rule_files": ["alerts.yml"], "tests": [test]}))
    done = subprocess.run(
        [promtool, "test", "rules", "test.yml"], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_rules_are_what_prometheus_takes(promtool: str) -> None:
    done = subprocess.run([promtool, "check", "rules", str(RULES)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
