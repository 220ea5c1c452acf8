"""What the demo promises about itself, each held against the figures. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from fairlane.clock import SECOND
from fairlane.demo.acts import FAIR, FIFO, LIMITED
from fairlane.demo.figures import Figures
from fairlane.policy.limits import Rate

__all__ = ["Promise", "judge", "verdict"]

FIFO_AT_LEAST = 0.90
FAIR_AT_MOST = 0.25
SLOWER_AT_MOST = 0.10


class Promise(msgspec.Struct, frozen=True):
    """A sentence that could be false, and whether it is true of this run."""

    sentence: str
    kept: bool
    seen: str
    depends_on_the_machine: bool = False
    """A busy machine can break it although nothing is wrong."""


def judge(figures: Sequence[Figures], slots: int) -> list[Promise]:
    """Every promise, in the order of the acts."""
    acts = {each.act: each for each in figures}
    assert LIMITED.rate_limit is not None
    return [
        _once(figures),
        *_turns(acts[FIFO.name], acts[FAIR.name]),
        *_limits(acts[LIMITED.name], LIMITED.rate_limit),
        _slots(figures, slots),
    ]


def _once(figures: Sequence[Figures]) -> Promise:
    missing = sum(each.jobs - each.jobs_run for each in figures)
    twice = sum(each.ran_twice for each in figures)
    total = sum(each.jobs for each in figures)
    return Promise(
        f"{total:,} jobs ran, each exactly once", not missing and not twice, f"{missing} missing, {twice} twice"
    )


def _turns(fifo: Figures, fair: Figures) -> list[Promise]:
    slower = fair.total / fifo.total - 1
    return [
        Promise(
            f"FIFO: the last small-tenant job ends after {FIFO_AT_LEAST:.0%} of the time",
            fifo.last_small_share >= FIFO_AT_LEAST,
            f"{fifo.last_small_share:.0%}",
        ),
        Promise(
            f"Fair: the last small-tenant job ends within {FAIR_AT_MOST:.0%} of the time",
            fair.last_small_share <= FAIR_AT_MOST,
            f"{fair.last_small_share:.0%}",
        ),
        Promise(
            f"Fair takes at most {SLOWER_AT_MOST:.0%} longer than FIFO",
            slower <= SLOWER_AT_MOST,
            f"{slower:+.1%}",
            depends_on_the_machine=True,
        ),
    ]


def _limits(limited: Figures, rate: Rate) -> list[Promise]:
    most = max(limited.in_flight_whale, limited.in_flight_small)
    excess, excess_at_start = limited.rate.worst_excess, limited.rate.worst_excess_at_start
    assert limited.in_flight_limit is not None
    assert excess is not None
    assert excess_at_start is not None
    # Handlers begin a moment after their jobs were admitted, and not all equally late: that much they may bunch up.
    bunching = limited.rate.start_lag * SECOND / rate.interval
    return [
        Promise(
            f"Limits: at most {limited.in_flight_limit} in flight per tenant",
            most <= limited.in_flight_limit,
            f"{most}",
        ),
        Promise(
            "Limits: at most burst + rate·t jobs admitted per endpoint in any time t",
            excess <= 0 and excess_at_start <= bunching,
            f"room for {0.0 - excess:.2f} left; by the handlers' own starts {0.0 - excess_at_start:.2f}",
        ),
    ]


def _slots(figures: Sequence[Figures], slots: int) -> Promise:
    most = max(each.in_flight_all for each in figures)
    return Promise(f"at most {slots} jobs at once", most <= slots, f"{most}")


def verdict(promises: Sequence[Promise]) -> str | None:
    """What to say when promises were broken; `None` when all were kept."""
    broken = [promise for promise in promises if not promise.kept]
    if not broken:
        return None
    said = "; ".join(f"{promise.sentence} (seen: {promise.seen})" for promise in broken)
    if all(promise.depends_on_the_machine for promise in broken):
        return (
            f"the demo took longer than it promises: {said}; other work on this machine can cause that, so run it again"
        )
    return f"the demo does not keep its promises: {said}"
