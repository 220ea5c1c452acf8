"""Shares of worker-seconds on a simulated clock."""

from __future__ import annotations

from typing import Literal

import pytest

from fairlane.clock import SECOND
from fairlane.policy import Fair, Policy
from tests.scheduler.ledger import LaneKey
from tests.scheduler.simulation import EPOCH, Fleet

LONG, SHORT = 34 * SECOND, 1 * SECOND


def share_of_long(
    weights: dict[str, float], *, lanes: int = 1, slots: int = 10, charge: Literal["time", "count"] = "time"
) -> float:
    """The share of worker-seconds that goes to the tenant of 34-second jobs, both tenants always busy."""

    def run_time(lane: LaneKey) -> int:
        return LONG if dict(lane[1])["account"] == "long" else SHORT

    policy = Policy("q", Fair(by="account", weight=weights, charge=charge), keys=("account", "endpoint"))
    fleet = Fleet(policy, slots=slots, run_time=run_time)
    fleet.refill = True
    for nth in range(lanes):
        fleet.enqueue({"account": "long", "endpoint": f"e{nth}"}, count=2 * slots // lanes + 1)
    fleet.enqueue({"account": "short", "endpoint": "e"}, count=2 * slots)
    fleet.run(until=EPOCH + 4_000 * SECOND)
    had = fleet.service("account", EPOCH + 400 * SECOND, fleet.now)
    assert sum(had.values()) == slots * 3_600 * SECOND, "a slot stood idle"
    return had["long"] / sum(had.values())


@pytest.mark.parametrize("lanes", [1, 50])
@pytest.mark.parametrize("slots", [1, 10])
def test_weights_of_five_to_one_give_five_to_one_by_time_whatever_the_jobs_and_lanes(lanes: int, slots: int) -> None:
    assert share_of_long({"long": 5}, lanes=lanes, slots=slots) == pytest.approx(5 / 6, abs=0.02)
    assert share_of_long({"short": 5}, lanes=lanes, slots=slots) == pytest.approx(1 / 6, abs=0.02)


@pytest.mark.parametrize("lanes", [1, 50])
@pytest.mark.parametrize("slots", [1, 10])
def test_f03_f11_equal_weights_give_equal_time_whatever_the_jobs_and_lanes(lanes: int, slots: int) -> None:
    assert share_of_long({}, lanes=lanes, slots=slots) == pytest.approx(0.5, abs=0.02)


def test_counting_instead_of_timing_gives_the_tenant_of_long_jobs_nearly_everything() -> None:
    assert share_of_long({}, charge="count") == pytest.approx(34 / 35, abs=0.02)
