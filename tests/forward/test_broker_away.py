"""E04: a broker that is away is given no jobs: they wait in their place, never started, and run when it is back."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from fairlane import Job, State
from tests.forward import shop_dramatiq, shop_taskiq
from tests.forward.brokers import ThrowawayBroker, ThrowawayRabbit, ThrowawayRedis
from tests.forward.members import BIN, Place, at_work

WATCHDOG = "90s"
DRAMATIQ = [str(BIN / "dramatiq"), f"{shop_dramatiq.__name__}:broker", "--processes", "1", "--threads", "4"]
TASKIQ = [str(BIN / "taskiq"), "worker", f"{shop_taskiq.__name__}:broker", "--workers", "1"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("module", "worker", "make_broker"),
    [
        pytest.param(shop_dramatiq, DRAMATIQ, ThrowawayRedis, id="Dramatiq on Redis"),
        pytest.param(shop_taskiq, TASKIQ, ThrowawayRabbit, id="Taskiq on RabbitMQ"),
    ],
)
def test_what_a_broker_refuses_waits_in_its_place_and_runs_when_it_is_back(
    module: ModuleType, worker: list[str], make_broker: type[ThrowawayBroker], postgres_url: str, tmp_path: Path
) -> None:
    with make_broker() as broker:
        shop = module.make(postgres_url, broker.url, tmp_path)
        with at_work(module.__name__, worker, Place(postgres_url, broker, tmp_path).environment, tmp_path):
            assert shop.tasks["add"].enqueue_sync(1, 2).result_sync(WATCHDOG) == 3
            broker.stop()
            job = shop.tasks["add"].enqueue_sync(2, 3)
            refused = _record_once_refused(shop.app, job)
            assert (refused.state, refused.attempt) == (State.READY, 0)
            broker.start()
            assert job.result_sync(WATCHDOG) == 5
            assert shop.app.run_blocking(job.record()).attempt == 1
        shop.app.close_sync()


def _record_once_refused(app: Any, job: Job[Any]) -> Any:
    # It may be claimed once more by the time we look: what was said of it stays.
    while True:
        record = app.run_blocking(job.record())
        if record.state is State.READY and (record.error or "").startswith("broker refused: "):
            return record
