"""`make bench` and `make bench-full`: Fairlane and its peers side by side; a bar that is missed exits non-zero."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Collection, Sequence

from rich.console import Console

from bench import claims, works_partitions, works_peers, works_postgres, works_sqlite
from bench.bars import BARS
from bench.judging import Verdict, judge
from bench.report import keep, show
from bench.running import Bench, Work, run_all, side_by_side

__all__ = ["main"]

FULL_ROUNDS, SHORT_ROUNDS = 5, 3
FULL_JOBS, SHORT_JOBS = 50_000, 30_000


def main(arguments: Sequence[str], epilog: str = "") -> int:
    """Run the works, judge and keep them; the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m bench",
        description=__doc__,
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--full", action="store_true", help="every work, not only the short ones")
    parser.add_argument(
        "--only", action="append", default=[], metavar="TEXT", help="the work of this name, or all that contain it"
    )
    parser.add_argument("--list", action="store_true", help="name the works and the bars (of --only), and run nothing")
    parser.add_argument("--rounds", type=int, help=f"{SHORT_ROUNDS}, or {FULL_ROUNDS} in full")
    parser.add_argument("--jobs", type=int, help="of a drain: 30,000, or 50,000 in full; other counts follow")
    parser.add_argument("--attempts", type=int, default=3, help="at a run that others disturb")
    parser.add_argument("--save", action=argparse.BooleanOptionalAction, help="to bench/RESULTS.md and docs/images")
    options = parser.parse_args(arguments)
    # A line that goes to a file or a pipe is not broken.
    console = Console(width=None if sys.stdout.isatty() else 200)
    known = all_works()
    if unknown := unmatched(known, options.only):
        names = "\n".join(f"  {work.name}" for work in known)
        parser.error(f"no work's name is or contains {' or '.join(map(repr, unknown))}; the works are\n{names}")
    if options.list:
        for line in listed(known, options.only):
            console.print(line, highlight=False, markup=False)
        return 0
    works = chosen(known, options.only, options.full)
    rounds = options.rounds or (FULL_ROUNDS if options.full else SHORT_ROUNDS)
    with Bench.opened(options.jobs or (FULL_JOBS if options.full else SHORT_JOBS)) as bench:
        series = run_all(bench, works, rounds=rounds, attempts=options.attempts, say=console.print)
    judged = [judge(bar, series) for bar in BARS if bar.figure.work in series]
    show(console, series, judged)
    # A part of the works says little by itself: it is kept when that is asked for.
    if options.save or (options.save is None and not options.only):
        keep(f"{'full' if options.full else 'short'}, {rounds} rounds", works, series, judged)
    # What could not be measured is not met; only whoever leaves works out by name does not ask for it.
    is_missed = any(
        one.verdict is Verdict.MISSED or (one.verdict is Verdict.NOT_MEASURED and not options.only) for one in judged
    )
    return 1 if is_missed or any(each.failed for each in series.values()) else 0


def all_works() -> list[Work]:
    return side_by_side(
        [
            *works_peers.works(),
            *works_postgres.works(),
            *works_sqlite.works(),
            *claims.works(),
            *works_partitions.works(),
        ]
    )


def chosen(works: Sequence[Work], only: Sequence[str], is_full: bool) -> list[Work]:
    """Those named, whatever they cost; else all, or the short ones. A whole name means that work alone."""
    if only:
        names = {work.name for work in works}
        return [work for work in works if any(_is_meant(work, text, names) for text in only)]
    return [work for work in works if is_full or work.is_short]


def unmatched(works: Sequence[Work], only: Sequence[str]) -> list[str]:
    """What was asked for and chooses no work."""
    return [text for text in only if not chosen(works, [text], is_full=True)]


def _is_meant(work: Work, text: str, names: Collection[str]) -> bool:
    return text == work.name if text in names else text in work.name


def listed(works: Sequence[Work], only: Sequence[str]) -> list[str]:
    """The works and the bars, those that `make bench` leaves out with a mark; with `only`, what it chooses."""
    shown = {work.name for work in chosen(works, only, is_full=True)}
    short = {work.name for work in works if work.is_short}
    lines = [f"{work.name}{_mark(work.is_short)}: {work.what}" for work in works if work.name in shown]
    for bar in BARS:
        if bar.figure.work in shown:
            is_short = bar.figure.work in short and (not bar.against or any(each.work in short for each in bar.against))
            lines.append(f"bar{_mark(is_short)}: {bar.what} {bar}")
    return lines


def _mark(is_short: bool) -> str:
    return "" if is_short else " (--full)"
