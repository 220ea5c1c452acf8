"""O09: no setting can make a loop spin or crash; bad ones are refused at start, by name."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from fairlane.errors import ConfigurationError
from fairlane.worker import QueueShare, WorkerOptions

REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"concurrency": 0}, "concurrency=0"),
    ({"concurrency": -1}, "concurrency=-1"),
    ({"concurrency": 2.5}, "concurrency=2.5"),
    ({"concurrency": True}, "concurrency=True"),
    ({"concurrency": 1_000_000}, "concurrency=1000000"),
    ({"prefetch": -1}, "prefetch=-1"),
    ({"lease": 0}, "lease=0"),
    ({"lease": "1ms"}, "lease='1ms'"),
    ({"lease": "forever"}, "lease: 'forever' is not a duration"),
    ({"lease": float("nan")}, "lease: nan is not a duration"),
    ({"drain_timeout": -1}, "drain_timeout=-1"),
    ({"drain_timeout": float("inf")}, "drain_timeout: inf is not a duration"),
    ({"cancel_grace": "-1s"}, "cancel_grace: '-1s' is not a duration"),
    ({"poll": 0}, "poll=0"),
    ({"poll": "10ms"}, "poll='10ms'"),
    ({"order": "random"}, "order='random' cannot be used; give 'weighted' or 'strict'"),
    ({"queues": "a,a"}, "queues: 'a' is named twice"),
    ({"queues": "a=0"}, "queues: 'a': weight=0.0"),
    ({"queues": "a=1e9"}, "queues: 'a=1e9' is not a queue"),
    ({"queues": "a=1.2.3"}, "queues: 'a=1.2.3' is not a queue"),
    ({"queues": "a=1000000000"}, "queues: 'a': weight=1000000000.0"),
    ({"queues": "a:5-2"}, "queues: 'a': max_slots=2"),
    ({"queues": "a:-0"}, "queues: 'a': max_slots=0"),
    ({"queues": "a:9-,b", "concurrency": 8}, "queues: their min_slots add up to 9, more than concurrency=8"),
    ({"queues": "a:8-,b", "concurrency": 8}, "leave 'b' no slot of concurrency=8"),
    ({"queues": 7}, "queues=7 is not a list of queues"),
]


@pytest.mark.parametrize(("settings", "message"), REFUSED)
def test_a_bad_setting_is_refused_with_its_name(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError) as refused:
        WorkerOptions(**settings)
    assert message in str(refused.value)


def test_queues_are_written_with_weights_and_slots() -> None:
    assert WorkerOptions(queues="webhooks, email=2, reports=0.5:1-10,bulk:-4").shares == (
        QueueShare(name="webhooks"),
        QueueShare(name="email", weight=2),
        QueueShare(name="reports", weight=0.5, min_slots=1, max_slots=10),
        QueueShare(name="bulk", max_slots=4),
    )


def test_times_may_be_written_in_any_way() -> None:
    for lease in ("1m", 60, timedelta(minutes=1)):
        assert WorkerOptions(lease=lease).lease == timedelta(minutes=1)


def test_a_worker_that_names_no_queue_serves_all_of_its_app() -> None:
    assert [share.name for share in WorkerOptions().serving(["a", "b"]).shares] == ["a", "b"]
    assert [share.name for share in WorkerOptions(queues="b").serving(["a", "b"]).shares] == ["b"]
