"""Policies that are tried for people: within bounds, and for as long as somebody waits."""

from __future__ import annotations

import pytest

from fairlane import Policy
from fairlane.errors import ConfigurationError
from fairlane.operations import trials as trying
from fairlane.simulation import JobClass, Workload
from fairlane.simulation.replay import record

MANY = Workload(classes=(JobClass(name="many", jobs=20_000, every="1s"),))


def test_a_simulation_that_nobody_waits_for_ends() -> None:
    pace = trying._Pace()
    pace.stop.set()
    with pytest.raises(ConfigurationError, match="nobody waits"):
        record(Policy("q"), MANY, on_progress=pace)


def test_a_simulation_that_takes_too_long_ends_and_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trying, "LONGEST_TRY", 0)
    with pytest.raises(ConfigurationError, match="use `fairlane simulate`"):
        record(Policy("q"), MANY, on_progress=trying._Pace())
