"""Verdicts of the benchmark."""

from __future__ import annotations

import pytest

from bench.bars import BARS
from bench.judging import NOISE, Bar, Figure, Run, Series, Verdict, is_noisy, judge, quietest


def runs(work: str, *values: float, name: str = "jobs/s", foreign: float = 0.0) -> dict[str, Series]:
    return {work: Series(work, [Run(figures={name: value}, foreign_load=foreign) for value in values])}


TWICE = Bar(what="ours", figure=Figure("ours", "jobs/s"), against=(Figure("theirs", "jobs/s"),), least=2)


def test_the_ratio_of_medians_decides_not_the_best_run() -> None:
    series = runs("ours", 10, 21, 100) | runs("theirs", 1, 10, 11)
    assert judge(TWICE, series).value == 2.1
    assert judge(TWICE, series).verdict is Verdict.MET


def test_a_bar_is_met_at_its_number_and_missed_below() -> None:
    assert judge(TWICE, runs("ours", 20) | runs("theirs", 10)).verdict is Verdict.MET
    assert judge(TWICE, runs("ours", 19.9) | runs("theirs", 10)).verdict is Verdict.MISSED


def test_what_was_not_measured_meets_no_bar() -> None:
    assert judge(TWICE, runs("ours", 20)).verdict is Verdict.NOT_MEASURED
    assert judge(TWICE, runs("theirs", 20)).verdict is Verdict.NOT_MEASURED


def test_the_best_peer_has_the_most_jobs_a_second() -> None:
    peers = (Figure("a", "jobs/s"), Figure("b", "jobs/s"), Figure("absent", "jobs/s"))
    bar = Bar(what="enqueue", figure=Figure("ours", "jobs/s"), against=peers, least=3)
    judged = judge(bar, runs("ours", 30) | runs("a", 10) | runs("b", 15))
    assert (judged.value, judged.opponent, judged.verdict) == (2, "b", Verdict.MISSED)


def test_the_best_peer_has_the_shortest_wait() -> None:
    peers = (Figure("a", "ms"), Figure("b", "ms"))
    bar = Bar(what="pickup", figure=Figure("ours", "ms"), against=peers, most=1)
    series = runs("ours", 4, name="ms") | runs("a", 2, name="ms") | runs("b", 8, name="ms")
    assert (judge(bar, series).value, judge(bar, series).opponent) == (2, "a")
    assert judge(bar, series).verdict is Verdict.MISSED


def test_a_bar_of_nought_allows_nothing() -> None:
    bar = Bar(what="violations", figure=Figure("ours", "violations"), most=0)
    assert judge(bar, runs("ours", 0, name="violations")).verdict is Verdict.MET
    assert judge(bar, runs("ours", 1, name="violations")).verdict is Verdict.MISSED


def test_a_bar_says_at_least_or_at_most() -> None:
    with pytest.raises(ValueError, match="not both"):
        Bar(what="x", figure=Figure("a", "b"), least=1, most=2)
    with pytest.raises(ValueError, match="give `least` or `most`"):
        Bar(what="x", figure=Figure("a", "b"))


def test_a_run_beside_others_is_noisy_and_the_quietest_attempt_counts() -> None:
    loud, louder = (Run(figures={}, foreign_load=NOISE + more) for more in (0.1, 0.2))
    calm = Run(figures={}, foreign_load=NOISE)
    assert [is_noisy(run) for run in (calm, loud)] == [False, True]
    assert quietest([louder, loud, louder]) is loud


def test_a_peer_that_cannot_do_a_work_has_no_figures_and_says_why() -> None:
    series = Series("x: whale", [Run(figures={}, foreign_load=0.0, unsupported="no keys")])
    assert series.unsupported == "no keys"
    assert series.names == []


def test_no_bar_is_stated_twice() -> None:
    assert len({bar.what for bar in BARS}) == len(BARS)
