"""Kills of Dramatiq's workers, of the dispatcher and of the broker: nothing lost, no limit exceeded (Must show 2)."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.forward.brokers import ThrowawayRabbit, ThrowawayRedis
from tests.forward.chaos import IS_FULL_SIZE, SLOTS, Chaos, Engine
from tests.forward.members import BIN

MODULE = "tests.forward.chaos_dramatiq"
DRAMATIQ = Engine(MODULE, [str(BIN / "dramatiq"), MODULE, "--processes", "1", "--threads", str(SLOTS)])


# Redis has Taskiq's chaos in every run; here it is for the full size.
ON_REDIS = pytest.param(ThrowawayRedis, marks=pytest.mark.skipif(not IS_FULL_SIZE, reason="FAIRLANE_FORWARD_JOBS=5000"))


@pytest.mark.slow
@pytest.mark.parametrize("make", [ThrowawayRabbit, ON_REDIS])
def test_kills_around_dramatiq_lose_nothing_and_exceed_no_limit(
    make: type[ThrowawayRabbit] | type[ThrowawayRedis], postgres_url: str, tmp_path: Path
) -> None:
    with make() as broker:
        Chaos(DRAMATIQ, broker, postgres_url, tmp_path).run()
