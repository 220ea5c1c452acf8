"""Must show: a cap that follows a service whose capacity falls to a third and comes back."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest

from fairlane.clock import SECOND
from fairlane.policy import AdaptiveConcurrency, Concurrency
from tests.scheduler.downstream import (
    ADAPTIVE,
    EPOCH,
    FALL_AND_RECOVERY,
    PICTURE,
    Measured,
    Phase,
    Settled,
    draw,
    measure,
    measure_all,
    simulate,
)

pytestmark = pytest.mark.slow

RECOVERY = 250
"""Settlements after which good calls come at 85 % of the ideal rate again."""


@pytest.fixture(scope="module")
def settled() -> list[list[Settled]]:
    return simulate(ADAPTIVE)


@pytest.fixture(scope="module")
def measured(settled: list[list[Settled]]) -> list[Measured]:
    starts = [EPOCH + at * SECOND for at in (0, 20, 40)]
    return [measure(*each) for each in zip(FALL_AND_RECOVERY, settled, starts, strict=True)]


def test_throughput_stays_within_15_percent_of_the_ideal_cap(measured: list[Measured]) -> None:
    assert all(each.throughput > 0.85 for each in measured), measured


def test_errors_stay_under_2_percent_after_convergence(measured: list[Measured]) -> None:
    assert all(each.errors < 0.02 for each in measured), measured


def test_recovery_takes_a_stated_number_of_settlements(measured: list[Measured]) -> None:
    assert all(each.recovery is not None and each.recovery <= RECOVERY for each in measured), measured


def test_the_fall_itself_fails_fewer_calls_than_were_in_flight(measured: list[Measured]) -> None:
    # A fixed cap of 30 fails 97 % of all calls for as long as the fall lasts.
    assert measured[1].failed < 30


def test_a_cap_that_does_not_move_fails_nearly_every_call_of_a_service_that_fell() -> None:
    (before, after) = measure_all(Concurrency(30, by="endpoint"), (Phase(30, 2), Phase(10, 1)))
    assert before.errors == 0
    assert after.errors > 0.9


def test_without_a_target_failures_alone_keep_it_near_a_service_that_refuses() -> None:
    # A saw between half and all of it: three quarters on average, as with TCP.
    steady = measure_all(AdaptiveConcurrency(max=200, by="endpoint"), (Phase(30, 16),), waiting_room=0.0)[0]
    assert 0.7 < steady.throughput < 0.9
    assert steady.errors < 0.02


def test_the_picture_in_the_docs_is_of_this_simulation(settled: list[list[Settled]]) -> None:
    drawn = draw(FALL_AND_RECOVERY, settled)
    ElementTree.fromstring(drawn)
    assert PICTURE.read_text() == drawn, "run `python -m tests.scheduler.downstream`"
