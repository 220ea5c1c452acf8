"""Limits with a name: what they say, and who may share them."""

from __future__ import annotations

import pytest

from fairlane import App, Concurrency, Rate
from fairlane.errors import InvalidPolicy
from fairlane.policy import Limit, Policy
from fairlane.policy.limits import read_limit

GPU = Concurrency(50, name="gpu")
VENDOR = Rate(100, per="1m", by="account", name="vendor")


@pytest.mark.parametrize("limit", [GPU, VENDOR], ids=repr)
def test_a_name_is_kept(limit: Limit) -> None:
    assert read_limit(limit.to_document()) == limit
    assert f"name={limit.name!r}" in repr(limit)


def test_limits_without_a_name_are_stored_as_before() -> None:
    assert "name" not in Concurrency(5).to_document()
    assert "name" not in Rate(5, per="1s").to_document()


@pytest.mark.parametrize("name", ["", "a b", "-a", 7, "x" * 121])
def test_what_is_no_name_is_refused(name: object) -> None:
    with pytest.raises(InvalidPolicy, match="is no name"):
        Concurrency(5, name=name)  # type: ignore[arg-type]


def test_a_queue_names_a_limit_once() -> None:
    with pytest.raises(InvalidPolicy, match="'gpu' is declared twice"):
        Policy("train", limits=(GPU, Concurrency(3, by="account", name="gpu")))


def test_the_gates_of_a_name_are_the_same_in_every_queue_and_no_queues_own() -> None:
    train, serve = (Policy(queue, limits=(VENDOR,)) for queue in ("train", "serve"))
    keys = {"account": "acme"}
    assert train.shared_gates_of(0, keys)[0][0] == serve.shared_gates_of(0, keys)[0][0]
    assert train.gates_of(0, keys)[0][0] != serve.gates_of(0, keys)[0][0]


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        (Concurrency(51, name="gpu"), "one limit has one bound"),
        (Concurrency(50, by="account", name="gpu"), "one kind and one scope"),
        (Rate(50, per="1s", name="gpu"), "one kind and one scope"),
    ],
    ids=repr,
)
def test_queues_of_one_app_that_differ_are_refused_with_both_names(other: Limit, reason: str) -> None:
    app = App("sqlite://")
    app.queue("train", limits=[GPU])
    with pytest.raises(InvalidPolicy, match=reason) as refused:
        app.queue("serve", limits=[other])
    assert "'train'" in str(refused.value)
    assert "'serve'" in str(refused.value)
    assert list(app.queues) == ["train"]
