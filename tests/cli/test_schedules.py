"""Schedules from the command line, and what is recorded of it."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from fairlane import App
from fairlane.cli.program import program
from fairlane.clock import SECOND, Clock, ManualClock, SystemClock, as_datetime


@pytest.fixture
def url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    url = f"sqlite:///{tmp_path / 'shop.db'}"
    monkeypatch.setenv("FAIRLANE_URL", url)
    monkeypatch.setenv("FAIRLANE_ACTOR", "ada")
    asyncio.run(declare(url))
    return url


async def declare(url: str, clock: Clock | None = None, line: str = "0 9 * * 1-5") -> None:
    app = App(url, clock=clock)

    @app.task(name="report")
    async def report(kind: str) -> None: ...

    app.schedule(line, report, "daily", timezone="Europe/Berlin", name="daily")
    async with app:
        await app.fire_schedules()


def run(*arguments: str) -> Result:
    return CliRunner().invoke(program, ["schedules", *arguments])


def asked(*arguments: str) -> Any:
    found = run(*arguments, "--json")
    assert found.exit_code == 0, found.output
    return json.loads(found.output)


def test_a_schedule_is_listed_with_all_that_is_known(url: str) -> None:
    (daily,) = asked("list")["schedules"]
    assert {name: daily[name] for name in ("name", "state", "recurrence", "missed", "task", "queue", "call")} == {
        "name": "daily",
        "state": "active",
        "recurrence": "0 9 * * 1-5 (Europe/Berlin)",
        "missed": "once",
        "task": "report",
        "queue": "default",
        "call": [["daily"], {}],
    }
    shown = run("list").output
    assert "daily" in shown
    assert "never" in shown


def test_pausing_triggering_and_resuming_are_told_and_recorded(url: str) -> None:
    planned = run("pause", "daily", "--dry-run").output
    assert re.fullmatch(r"daily: would be paused; its next slot (comes in \d+[smhd]|is \d+s late)\n", planned), planned
    assert run("pause", "daily", "--reason", "holidays").output == "daily: paused\n"
    assert asked("list")["schedules"][0]["state"] == "paused"
    assert asked("trigger", "daily")["triggers_waiting"] == 1
    assert asked("resume", "daily", "--as", "bob")["state"] == "active"
    entries = json.loads(CliRunner().invoke(program, ["audit", "--json"]).output)["entries"]
    assert [(each["actor"], each["action"], each["reason"]) for each in entries] == [
        ("bob", "resume schedule", ""),
        ("ada", "trigger schedule", ""),
        ("ada", "pause schedule", "holidays"),
    ]


def test_a_trigger_that_nobody_takes_and_a_slot_that_nobody_fires_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"sqlite:///{tmp_path / 'shop.db'}"
    monkeypatch.setenv("FAIRLANE_URL", url)
    # A slot of every minute was missed by over a minute; not so long ago that nobody has the schedule any more.
    long_ago = as_datetime(SystemClock().now() - 140 * SECOND)
    asyncio.run(declare(url, ManualClock(long_ago), line="* * * * *"))
    answer = run("trigger", "daily").output
    assert "daily: triggered; 1 trigger waits for a worker; its next slot is " in answer
    assert answer.endswith(" late\n")
    assert "2 triggers wait for a worker" in run("trigger", "daily").output
    assert "active, 2 triggers wait for a worker" in run("list").output
    assert " late " in run("list").output
    found = CliRunner().invoke(program, ["doctor"])
    assert found.exit_code == 1
    assert "schedule 'daily' was due at" in found.output


def test_a_schedule_that_is_not_there_is_an_error_with_a_hint(url: str) -> None:
    refused = run("pause", "dayly")
    assert refused.exit_code == 1
    assert "there is no schedule 'dayly'; did you mean 'daily'?" in refused.output


def test_without_schedules_it_says_how_to_have_some(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAIRLANE_URL", f"sqlite:///{tmp_path / 'empty.db'}")
    CliRunner().invoke(program, ["migrate"])
    assert "app.schedule(" in run("list").output
