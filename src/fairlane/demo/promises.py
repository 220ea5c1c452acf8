"""What the demo promises about itself, each held against the figures. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from fairlane.demo.acts import FAIR, FIFO, LIMITED
from fairlane.demo.figures import Figures

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
    return [*_once(figures), *_turns(acts), *_limits(acts[LIMITED.name]), _slots(figures, slots)]


def _once(figures: Sequence[Figures]) -> list[Promise]:
    missing = sum(each.jobs - each.jobs_run for each in figures)
    twice = sum(each.ran_twice for each in figures)
    total = sum(each.jobs for each in figures)
    return [
        Promise(
            f"all {total:,} jobs ran, each exactly once", not missing and not twice, f"{missing} missing, {twice} twice"
        )
    ]


def _turns(acts: Mapping[str, Figures]) -> list[Promise]:
    fifo, fair = acts[FIFO.name], acts[FAIR.name]
    slower = fair.total / fifo.total - 1
    return [
        Promise(
            f"FIFO: small tenants wait for the whale (their last job ends after {FIFO_AT_LEAST:.0%} of the time)",
            fifo.last_small_share >= FIFO_AT_LEAST,
            f"{fifo.last_small_share:.1%}",
        ),
        Promise(
            f"Fair: small tenants do not wait (their last job ends within {FAIR_AT_MOST:.0%} of the time)",
            fair.last_small_share <= FAIR_AT_MOST,
            f"{fair.last_small_share:.1%}",
        ),
        Promise(
            f"Fair costs at most {SLOWER_AT_MOST:.0%} of total time against FIFO",
            slower <= SLOWER_AT_MOST,
            f"{slower:+.1%}",
            depends_on_the_machine=True,
        ),
    ]


def _limits(limited: Figures) -> list[Promise]:
    most = max(limited.in_flight_whale, limited.in_flight_small)
    excess = limited.rate.worst_excess
    assert limited.in_flight_limit is not None
    assert excess is not None
    return [
        Promise(
            f"Limits: never more than {limited.in_flight_limit} in flight for any tenant",
            most <= limited.in_flight_limit,
            f"at most {most}",
        ),
        Promise(
            "Limits: no endpoint ever above burst + rate·t, in a window of any length t",
            excess <= 0,
            f"worst window {excess:+.2f} jobs",
        ),
    ]


def _slots(figures: Sequence[Figures], slots: int) -> Promise:
    most = max(each.in_flight_all for each in figures)
    return Promise(f"never more than {slots} jobs at once", most <= slots, f"at most {most}")


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
