"""Kills of Taskiq's workers, of the dispatcher and of the broker: nothing lost, no limit exceeded (Must show 2)."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.forward.brokers import ThrowawayRedis
from tests.forward.chaos import SLOTS, Chaos, Engine
from tests.forward.members import BIN

MODULE = "tests.forward.chaos_taskiq"
TASKIQ = Engine(
    MODULE,
    [str(BIN / "taskiq"), "worker", f"{MODULE}:broker", "--workers", "1", "--max-async-tasks", str(SLOTS)],
)


@pytest.mark.slow
def test_kills_around_taskiq_lose_nothing_and_exceed_no_limit(postgres_url: str, tmp_path: Path) -> None:
    with ThrowawayRedis() as broker:
        Chaos(TASKIQ, broker, postgres_url, tmp_path).run()
