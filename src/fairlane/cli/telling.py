"""Jobs and reports as people read them: tables that fit the terminal, and whole lines in a pipe."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from fairlane.redaction import indented, json_text, one_line

if TYPE_CHECKING:
    from fairlane.clock import Instant
    from fairlane.job import JobRecord
    from fairlane.operations import JobDetails, Report

__all__ = ["Progress", "ago", "first_line", "keys_of", "print_table", "tell_details", "tell_report"]

SHOWN = 5
"""Skipped jobs that are named; of the others there is a number."""


class Progress:
    """Says how far a bulk action is, once it has taken a second: on a terminal, and beside what is printed."""

    def __init__(self, action: str) -> None:
        import time

        self._action = action
        self._clock = time.monotonic
        self._next = self._clock() + 1.0
        self._is_shown = False

    def __call__(self, done: int) -> None:
        if sys.stderr.isatty() and self._clock() >= self._next:
            self._next = self._clock() + 0.2
            self._is_shown = True
            click.echo(f"\r{done:,} {self._action} …", nl=False, err=True)

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *error: object) -> None:
        if self._is_shown:
            click.echo("\r\x1b[K", nl=False, err=True)


def ago(at: Instant | None, now: Instant) -> str:
    """How long ago, in the largest unit: 12s, 5m, 3h, 2d; `in 5m` for what is to come, `now` for the same second."""
    if at is None:
        return ""
    seconds = abs(now - at) // 1_000_000
    for size, unit in ((86_400, "d"), (3_600, "h"), (60, "m")):
        if seconds >= 2 * size:
            text = f"{seconds // size}{unit}"
            break
    else:
        text = f"{seconds}s"
    if at > now:
        return f"in {text}" if seconds else "now"
    return text


def print_table(headings: Sequence[str], rows: Sequence[Sequence[str]], flexible: Sequence[str]) -> None:
    """A table in which only the `flexible` columns give way: ids can always be copied."""
    from fairlane.cli.drawing import columns, make_console
    from fairlane.cli.showing import print_lines

    print_lines(columns(headings, rows, make_console().width, flexible=flexible))


def keys_of(record: JobRecord) -> str:
    return one_line(" ".join(f"{name}={value}" for name, value in record.keys.items()))


def first_line(text: str | None) -> str:
    return one_line((text or "").strip().partition("\n")[0])


def tell_report(report: Report, as_json: bool, *, hint: str = "") -> None:
    """What was done, or would be; then what was not, and why."""
    if as_json:
        from fairlane.operations import describe_report

        click.echo(json.dumps(describe_report(report)))
        return
    count = len(report.done)
    jobs = f"{count:,} {'job' if count == 1 else 'jobs'}"
    if report.is_dry_run:
        click.echo(f"{jobs} would be {report.action}")
        for record in report.sample:
            click.echo(f"  {record.id}  {record.state}  {one_line(record.queue)}  {one_line(record.task)}")
        if count > len(report.sample):
            click.echo(f"  … and {count - len(report.sample):,} more")
    else:
        click.echo(f"{jobs} {report.action}{hint}")
    if report.replaced:
        those = f"{len(report.replaced):,} waiting {'job' if len(report.replaced) == 1 else 'jobs'}"
        happens = "would be" if report.is_dry_run else "was" if len(report.replaced) == 1 else "were"
        shown = ", ".join(map(str, report.replaced[:SHOWN])) + (", …" if len(report.replaced) > SHOWN else "")
        click.echo(f"{those} with the same unique key {happens} cancelled: {shown}")
    for handled in report.skipped[:SHOWN]:
        click.echo(f"skipped {handled.job}: {handled.skipped}", err=True)
    if len(report.skipped) > SHOWN:
        click.echo(f"skipped {len(report.skipped) - SHOWN:,} more", err=True)
    if report.held:
        held = "1 was" if report.held == 1 else f"{report.held:,} were"
        instead = "; --on-conflict replace cancels a holder that waits" if report.action == "replayed" else ""
        click.echo(f"{held} not {report.action}: another job holds the unique key{instead}", err=True)
    if report.more:
        click.echo("the limit was reached and there are more: run it again, or raise --limit", err=True)


def tell_details(details: JobDetails) -> None:
    """One job on as many lines as it takes."""
    from fairlane.clock import as_datetime
    from fairlane.operations import describe_job

    described = describe_job(details.record)
    error = described.pop("error")
    described["keys"] = keys_of(details.record)
    described["attempt"] = f"{described['attempt']} of {described.pop('max_attempts')}"
    described["call"] = json_text(details.call)
    if details.record.result is not None:
        described["result"] = json_text(details.result)
    for name, value in described.items():
        if value not in (None, "", False):
            click.echo(f"{name.replace('_', ' '):<16} {one_line(str(value))}")
    for each in details.attempts:
        ended = "" if each.ended_at is None else f", {(each.ended_at - each.claimed_at) / 1_000_000:.3f} s"
        click.echo(
            f"\nattempt {each.attempt}: {each.outcome}, {as_datetime(each.claimed_at):%Y-%m-%d %H:%M:%S}{ended}, "
            f"{one_line(each.worker or 'nobody')}"
        )
        if each.error:
            click.echo(indented(each.error))
    if error and not details.attempts:
        click.echo(f"\n{indented(error)}")
