"""The examples with Celery, Dramatiq and Taskiq, by the commands of their READMEs."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.examples.readme import Example
from tests.forward.brokers import ThrowawayRedis

pytestmark = [pytest.mark.slow, pytest.mark.parametrize("name", ["celery_shop", "dramatiq_shop", "taskiq_shop"])]


def test_it_passes_its_own_test(name: str, tmp_path: Path) -> None:
    assert "2 passed" in Example(name, tmp_path).run("pytest")


def test_it_starts_and_sends_mails(name: str, tmp_path: Path) -> None:
    with ThrowawayRedis() as redis:
        example = Example(name, tmp_path, REDIS_URL=redis.url)
        with example.started("sh start.sh") as shop:
            shop.wait_for("serves mails")
            sent = example.run("python order.py")
            assert "has stopped" in shop.stop()
    assert sent.splitlines() == [
        f"mail {number} of {account} is sent" for number in (1, 2, 3) for account in ("acme", "bolt")
    ]
