"""What `fairlane worker` tells Python's collector."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from fairlane.cli.worker import COLLECT_AFTER, spare_the_collector


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    before = gc.get_threshold()
    yield
    gc.set_threshold(*before)
    gc.unfreeze()


def test_a_worker_process_lets_a_whole_claim_pass_before_it_looks_for_cycles() -> None:
    gc.set_threshold(700, 10, 10)
    spare_the_collector()
    assert gc.get_threshold()[0] == COLLECT_AFTER
    assert gc.get_freeze_count() > 0


@pytest.mark.parametrize("young", [0, 100_000], ids=["never", "less often"])
def test_an_app_that_has_set_its_own_threshold_keeps_it(young: int) -> None:
    gc.set_threshold(young, 10, 10)
    spare_the_collector()
    assert gc.get_threshold()[0] == young
