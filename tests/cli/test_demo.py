"""The demo itself, small, through the program, with real workers."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import asyncpg
import pytest

from fairlane.testing.postgres import ThrowawayPostgres
from tests.cli.conftest import Fairlane

SMALL = ["demo", "--scale", "0.1", "--json"]


def checked(result: subprocess.CompletedProcess[str]) -> dict[str, dict[str, Any]]:
    """The figures by act. Whatever does not depend on how busy this machine is must hold."""
    assert result.stdout, result.stderr
    said = json.loads(result.stdout)
    fifo, fair, limits = said["acts"]
    for act in said["acts"]:
        assert (act["jobs"], act["jobs_run"], act["ran_twice"]) == (600, 600, 0)
        assert act["in_flight_all"] <= 20
    assert fifo["whale_admitted_before"] == 500
    assert fair["whale_admitted_before"] < 250
    assert fifo["jain"] < 0.2 < 0.7 < fair["jain"]
    assert max(limits["in_flight_whale"], limits["in_flight_small"]) <= 5 < fifo["in_flight_whale"]
    assert limits["rate"]["worst_excess"] <= 0
    kept = all(promise["kept"] for promise in said["promises"])
    assert (result.returncode == 0) is kept
    assert result.stderr == "" if kept else result.stderr.startswith("Error: the demo ")
    return {act["act"]: act for act in said["acts"]}


def test_the_demo_plays_on_sqlite_and_leaves_nothing(fairlane: Fairlane, tmp_path: Path, scratch: Path) -> None:
    checked(fairlane(*SMALL))
    assert [*tmp_path.iterdir(), *scratch.iterdir()] == []


def test_the_demo_plays_on_a_postgresql_and_leaves_nothing(
    fairlane: Fairlane, postgres: ThrowawayPostgres, postgres_url: str
) -> None:
    def databases() -> set[str]:
        async def look() -> set[str]:
            connection = await asyncpg.connect(postgres.url())
            try:
                return {row[0] for row in await connection.fetch("select datname from pg_database")}
            finally:
                await connection.close()

        return asyncio.run(look())

    checked(fairlane(*SMALL, "--url", postgres_url))
    assert not {name for name in databases() if name.startswith("fairlane_demo")}


def test_the_demo_shows_its_figures(fairlane: Fairlane) -> None:
    result = fairlane("demo", "--scale", "0.01")
    assert "Act 3 of 3  Limits" in result.stdout
    assert "last small-tenant job / total" in result.stdout


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_demo_that_is_interrupted_stops_its_workers_and_leaves_nothing(signum: signal.Signals, scratch: Path) -> None:
    demo = subprocess.Popen(
        [sys.executable, "-u", "-m", "fairlane.cli", "demo"],
        cwd=scratch,
        env={**os.environ, "TMPDIR": str(scratch)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert demo.stdout is not None
    for line in demo.stdout:
        if "running" in line:  # the workers are up
            break
    workers = [int(path.stem) for path in scratch.glob("*/*.ready")]
    assert len(workers) == 2
    demo.send_signal(signum)
    demo.stdout.read()
    demo.stdout.close()
    assert demo.wait() != 0
    assert list(scratch.iterdir()) == []
    for worker in workers:
        with pytest.raises(ProcessLookupError):
            os.kill(worker, 0)
