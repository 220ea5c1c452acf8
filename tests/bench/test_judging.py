"""Verdicts of the benchmark."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from bench import __main__ as program
from bench import pruning
from bench.bars import BARS
from bench.comparison import all_works, chosen, listed, unmatched
from bench.judging import NOISE, Bar, Figure, Run, Series, Verdict, is_noisy, judge, quietest
from bench.pictures import draw
from bench.running import Bench, Work, run_all, side_by_side
from fairlane.testing.postgres import ThrowawayPostgres

NOTHING = Run(figures={}, foreign_load=0.0)


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


def test_what_is_compared_is_run_close_together() -> None:
    names = ["a: drain", "b: drain", "a: pickup", "huey: x", "drain", "fair drain", "pickup"]
    works = [Work(name=name, what="", run=lambda bench: NOTHING) for name in names]
    ordered = [work.name for work in side_by_side(works)]
    assert ordered == ["a: drain", "b: drain", "drain", "fair drain", "a: pickup", "pickup", "huey: x"]


def test_every_bar_is_about_works_that_exist() -> None:
    works = {work.name for work in all_works()}
    asked = {figure.work for bar in BARS for figure in (bar.figure, *bar.against)}
    theirs = {name for name in asked if ": " in name}  # peers are present when their folder is
    assert asked - theirs <= works


def test_a_picture_needs_two_things_to_compare() -> None:
    alone = runs("drain", 10)
    assert draw(alone, "test") == {}
    both = draw(alone | runs("fair drain, 1,000 keys", 5), "test")
    assert list(both) == ["bench-drain.svg"]
    assert "<svg" in both["bench-drain.svg"]


def test_a_work_that_fails_is_told_and_the_others_are_run(tmp_path: Path) -> None:
    def fail(bench: Bench) -> Run:
        raise RuntimeError("3 of 10 jobs did not run exactly once")

    works = [Work(name="fails", what="", run=fail), Work(name="runs", what="", run=lambda bench: NOTHING)]
    told: list[str] = []
    series = run_all(Bench(ThrowawayPostgres(), tmp_path, 1), works, rounds=2, attempts=1, say=told.append)
    assert [len(each.runs) for each in series.values()] == [1, 2]
    assert series["fails"].failed == "RuntimeError: 3 of 10 jobs did not run exactly once"
    assert "FAILED" in told[0]


def test_a_disturbed_run_is_repeated_and_no_longer_than_agreed(tmp_path: Path) -> None:
    loads = iter([1.0, 0.6, 0.9, 0.5, 0.1])
    work = Work(name="x", what="", run=lambda bench: Run(figures={"n": 1.0}, foreign_load=next(loads)))
    series = run_all(Bench(ThrowawayPostgres(), tmp_path, 1), [work], rounds=2, attempts=3, say=lambda text: None)
    assert [run.foreign_load for run in series["x"].runs] == [0.6, 0.1]


def test_whoever_stops_a_run_keeps_what_was_measured(tmp_path: Path) -> None:
    def stop(bench: Bench) -> Run:
        raise KeyboardInterrupt

    works = [Work(name="runs", what="", run=lambda bench: NOTHING), Work(name="stops", what="", run=stop)]
    series = run_all(Bench(ThrowawayPostgres(), tmp_path, 1), works, rounds=2, attempts=1, say=lambda text: None)
    assert [len(each.runs) for each in series.values()] == [1, 0]


def test_a_whole_name_chooses_one_work_and_a_part_of_it_many() -> None:
    works = [Work(name=name, what="", run=lambda bench: NOTHING) for name in ("drain", "fair drain", "pickup")]
    assert [work.name for work in chosen(works, ["drain"], is_full=False)] == ["drain"]
    assert [work.name for work in chosen(works, ["dra"], is_full=False)] == ["drain", "fair drain"]
    assert chosen(works, [], is_full=False) == []
    assert len(chosen(works, [], is_full=True)) == 3


@pytest.mark.parametrize(
    ("bench", "known"), [(program.main, "fair drain, 1,000 keys"), (pruning.main, "SQLite, kept for 1 s")]
)
def test_a_name_that_no_work_has_is_refused_with_those_there_are(
    bench: Callable[[list[str]], int], known: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        bench(["--only", "nosuch"])
    assert ended.value.code == 2
    told = capsys.readouterr().err
    assert "'nosuch'" in told
    assert known in told


def test_one_name_of_several_that_chooses_nothing_is_told() -> None:
    assert unmatched(all_works(), ["fair drain", "nosuch", "whale"]) == ["nosuch"]


def test_the_help_names_the_other_benchmarks(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        program.main(["--help"])
    told = capsys.readouterr().out
    for name in ("history", "horizon", "pruning", "shared", "stream"):
        assert f"python -m bench {name} " in told


def test_the_list_marks_what_a_short_run_leaves_out() -> None:
    lines = listed(all_works(), [])
    assert any(line.startswith("drain: ") for line in lines)
    assert any(line.startswith("memory of a worker (--full): ") for line in lines)
    assert "bar (--full): memory of a worker, MiB ≤ 150" in lines
    assert "bar: whale: last small / total ≤ 0.25" in lines


def test_the_list_of_some_works_has_only_their_bars() -> None:
    lines = listed(all_works(), ["SQLite, four processes"])
    assert [line.partition(":")[0] for line in lines] == ["SQLite, four processes", "bar", "bar"]
