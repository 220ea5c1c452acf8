"""A Django project at work: its database migrated, a worker started and requests made, each by a process of its own."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import closing
from pathlib import Path

import pytest

from tests.django.test_project import PROJECT, database, manage


@pytest.fixture(params=["sqlite-file", "postgres"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Mapping[str, str]:
    """What a project is told of its database, which is empty."""
    return database(request.param, request, tmp_path)


@pytest.fixture
def worker(place: Mapping[str, str], tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """Two processes, started from another folder than the project's."""
    assert manage("migrate", "--run-syncdb", **place).returncode == 0
    command = [sys.executable, str(PROJECT / "manage.py"), "fairlane", "worker", "--processes", "2"]
    with subprocess.Popen(
        command, env={**os.environ, **place}, cwd=tmp_path, text=True, stderr=subprocess.PIPE, stdout=subprocess.PIPE
    ) as running:
        try:
            yield running
        finally:
            running.kill()


@pytest.mark.slow
def test_a_worker_runs_what_a_view_enqueued_in_its_transaction(
    place: Mapping[str, str], worker: subprocess.Popen[str]
) -> None:
    done = manage("shell", "-c", (PROJECT / "place.py").read_text(), **place)
    worker.send_signal(signal.SIGTERM)
    _, logged = worker.communicate(timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr + logged
    assert done.stdout.splitlines()[-4:] == [
        "lost: nothing is left",
        "counted: 3, elsewhere",
        "greeting: hello ada, 3 notes",
        "notes: kept, job of kept, async",
    ]
    assert worker.returncode == 0, logged


def test_migrate_brings_the_schema_up_to_date(empty_postgres_url: str) -> None:
    place = {"TEST_DATABASE": empty_postgres_url}
    planned = manage("migrate", "--plan", **place)
    assert "fairlane.W002" in planned.stderr, "nothing says that there is something to do"
    assert "manage.py migrate" in planned.stderr
    first = manage("migrate", **place)
    assert "Applying fairlane.0001_schema... OK" in first.stdout, first.stderr
    again = manage("migrate", **place)
    assert "Applying" not in again.stdout
    assert "fairlane.W" not in again.stderr


def test_planning_changes_nothing_in_a_sqlite_file(tmp_path: Path) -> None:
    file = tmp_path / "real.db"
    assert manage("migrate", "--plan", TEST_DATABASE=str(file)).returncode == 0
    with closing(sqlite3.connect(file)) as connection:
        assert connection.execute("select name from sqlite_master").fetchall() == []


def test_a_router_keeps_the_schema_out(empty_postgres_url: str) -> None:
    place = {"TEST_DATABASE": empty_postgres_url, "TEST_NO_JOBS": "1"}
    done = manage("migrate", **place)
    assert done.returncode == 0, done.stderr
    assert "Applying auth.0001" in done.stdout
    assert "Applying fairlane." not in done.stdout


def test_a_command_of_fairlane_helps_itself(tmp_path: Path) -> None:
    told = manage("fairlane", "worker", "--help", TEST_DATABASE=str(tmp_path / "real.db")).stdout
    assert "Usage: manage.py fairlane worker" in told
    assert "--concurrency" in told


def test_a_sqlite_file_whose_transactions_read_first_is_told_of(tmp_path: Path) -> None:
    place = {"TEST_DATABASE": str(tmp_path / "shop.db")}
    assert "fairlane.W004" in manage("check", **place, TEST_TRANSACTION_MODE="DEFERRED").stderr
    assert "fairlane.W" not in manage("check", **place).stderr
