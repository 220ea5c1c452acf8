"""`--queues` and `--slots`."""

from __future__ import annotations

import pytest

from fairlane.cli.worker import queue_shares
from fairlane.errors import ConfigurationError, UnknownQueue
from fairlane.worker.options import QueueShare

DECLARED = ["webhooks", "email", "reports"]


def test_a_worker_serves_all_queues_of_its_app_by_default() -> None:
    assert queue_shares(None, [], DECLARED) == tuple(QueueShare(name=name) for name in DECLARED)


def test_queues_have_weights() -> None:
    assert queue_shares("webhooks,email=2", [], DECLARED) == (
        QueueShare(name="webhooks"),
        QueueShare(name="email", weight=2),
    )


@pytest.mark.parametrize(
    ("slots", "least", "most"), [("email=1:5", 1, 5), ("email=1-5", 1, 5), ("email=2:", 2, None), ("email=:3", 0, 3)]
)
def test_a_queue_has_a_least_and_a_most_of_slots(slots: str, least: int, most: int | None) -> None:
    (share,) = queue_shares("email=2", [slots], DECLARED)
    assert share == QueueShare(name="email", weight=2, min_slots=least, max_slots=most)


def test_a_queue_that_the_app_does_not_declare_is_refused_with_the_nearest_one() -> None:
    with pytest.raises(UnknownQueue, match="declares no queue 'webhook'; did you mean 'webhooks'"):
        queue_shares("webhook", [], DECLARED)


def test_a_queue_like_no_other_is_answered_with_all_there_are() -> None:
    with pytest.raises(UnknownQueue, match="it declares webhooks, email, reports"):
        queue_shares("x", [], DECLARED)


@pytest.mark.parametrize("slots", ["email", "email=5", "email=a:b", "=1:2"])
def test_slots_that_cannot_be_read_say_how_to_write_them(slots: str) -> None:
    with pytest.raises(ConfigurationError, match="such as email=1:5"):
        queue_shares(None, [slots], DECLARED)


def test_slots_for_a_queue_that_is_not_served_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="does not serve 'email'; it serves webhooks"):
        queue_shares("webhooks", ["email=1:2"], DECLARED)


def test_a_most_below_the_least_is_refused() -> None:
    with pytest.raises(ConfigurationError):
        queue_shares(None, ["email=5:1"], DECLARED)


@pytest.mark.parametrize("queues", ["", ",", " "])
def test_no_queue_at_all_is_refused(queues: str) -> None:
    with pytest.raises(ConfigurationError, match="names no queue"):
        queue_shares(queues, [], DECLARED)


def test_an_app_whose_queues_are_all_an_engines_is_told_so() -> None:
    with pytest.raises(ConfigurationError, match="an engine runs all that it declares"):
        queue_shares(None, [], [])


def test_a_queue_named_twice_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="named twice"):
        queue_shares("email,email=2", [], DECLARED)
