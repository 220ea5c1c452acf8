"""Kills of Taskiq's workers, of the dispatcher and of the broker: nothing lost, no limit exceeded (Must show 2)."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.forward.brokers import ThrowawayRedis
from tests.forward.chaos import IS_FULL_SIZE, SLOTS, Chaos, Engine
from tests.forward.members import BIN

MODULE = "tests.forward.chaos_taskiq"
TASKIQ = Engine(
    MODULE,
    [str(BIN / "taskiq"), "worker", f"{MODULE}:broker", "--workers", "1", "--max-async-tasks", str(SLOTS)],
)


@pytest.mark.slow
@pytest.mark.skipif(not IS_FULL_SIZE, reason="FAIRLANE_FORWARD_JOBS=5000")
def test_a_broker_that_forgets_all_it_held_loses_no_job(postgres_url: str, tmp_path: Path) -> None:
    with ThrowawayRedis(durable=False) as broker:
        Chaos(TASKIQ, broker, postgres_url, tmp_path).run()


@pytest.mark.slow
def test_kills_around_taskiq_lose_nothing_and_exceed_no_limit(postgres_url: str, tmp_path: Path) -> None:
    with ThrowawayRedis() as broker:
        Chaos(TASKIQ, broker, postgres_url, tmp_path).run()
