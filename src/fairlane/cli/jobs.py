"""`fairlane jobs` and `fairlane dead`: list, show, export, cancel, retry, force, replay and purge jobs."""

from __future__ import annotations

import asyncio
import csv
import io
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import IO, Any

import click
from rich.text import Text

from fairlane.cli.changes import act, acts
from fairlane.cli.database import app_of, operations_on
from fairlane.cli.options import (
    LookingGroup,
    change_options,
    filter_of,
    filter_options,
    job_ids,
    json_option,
    page_options,
    place_options,
)
from fairlane.cli.output import Given, Progress, ago, columns, look, look_now, show, show_rest
from fairlane.clock import SECOND, Instant, as_datetime
from fairlane.errors import ConfigurationError, FairlaneError
from fairlane.job import JobRecord
from fairlane.operations import LIMIT, JobDetails, Operations, describe_exported, document_of, exported_columns
from fairlane.policy.keys import key_words
from fairlane.redaction import Surface, indented, json_text, one_line
from fairlane.store.operators import JobPage

FORMULA = ("=", "+", "-", "@", "\t", "\r", "\n")
"""How a cell begins that a spreadsheet takes for a formula, or for something to cut off until it is one."""
INTERRUPTED = 130


COLUMNS: Mapping[str, Callable[[JobRecord, Instant], str]] = {
    "ID": lambda job, now: str(job.id),
    "STATE": lambda job, now: str(job.state),
    "QUEUE": lambda job, now: job.queue,
    "TASK": lambda job, now: job.task,
    "KEYS": lambda job, now: key_words(job.keys),
    "TRIES": lambda job, now: f"{job.attempt}/{job.max_attempts}",
    "AGE": lambda job, now: ago(job.enqueued_at, now),
    "DIED": lambda job, now: ago(job.finished_at, now),
    "ERROR": lambda job, now: (job.error or "").strip().partition("\n")[0],
}
FLEXIBLE = ("QUEUE", "TASK", "KEYS", "ERROR")


@click.group(cls=LookingGroup, by_id="show")
def jobs() -> None:
    """List jobs, or show, export, cancel and hurry them.

    Without a command, lists jobs and takes the options of `jobs list`; with an id alone, shows that job.

    \b
    Example:
      fairlane jobs --queue webhooks --state running
      fairlane jobs 0198c0de-0000-7000-8000-000000000000
    """


@jobs.command("list")
@filter_options()
@page_options
def list_(**given: Any) -> None:
    """List jobs, the newest first. Looking changes nothing.

    --since and --until are about the enqueue. Done, dead and cancelled jobs are listed by their end.

    \b
    Example:
      fairlane jobs list --queue webhooks --key account=acme
      fairlane jobs list --state scheduled --since 2h --json
    """
    _list(given, ("ID", "STATE", "QUEUE", "TASK", "TRIES", "AGE", "KEYS"), "no job fits", by_end=False)


def _list(given: Given, headings: Sequence[str], nothing: str, *, by_end: bool) -> None:
    """Print the page of jobs that the options ask for."""

    async def ask(operations: Operations) -> JobPage:
        wanted = filter_of(given, await operations.now(), by_end=by_end)
        with Progress("found") as progress:
            return await operations.jobs.list(wanted, given["limit"], given["after"], on_progress=progress)

    def draw(page: JobPage, width: int) -> list[Text]:
        if not page.jobs:
            return [Text("none found yet" if page.after else nothing)]
        rows = [[COLUMNS[heading](each, now) for heading in headings] for each in page.jobs]
        return columns(headings, rows, width, flexible=FLEXIBLE)

    page, now = look_now(ask, given)
    show(page, draw, given, document_of)
    show_rest(page.after, given)


@jobs.command("show")
@click.argument("job", metavar="ID")
@place_options
@json_option()
def show_job(job: str, **given: Any) -> None:
    """Show one job: its call, its state, and every attempt with its traceback.

    \b
    Example:
      fairlane jobs show 0198c0de-0000-7000-8000-000000000000
      fairlane jobs show 0198c0de-0000-7000-8000-000000000000 --json
    """
    show(look(lambda operations: operations.jobs.show(job_ids((job,))[0]), given), _details, given, document_of)


def _details(details: JobDetails, width: int) -> Iterator[str]:
    """One job on as many lines as it takes."""
    described = document_of(details.record)
    error = described.pop("error")
    described["keys"] = key_words(details.record.keys)
    described["attempt"] = f"{described['attempt']} of {described.pop('max_attempts')}"
    described["call"] = json_text(details.call)
    if details.record.result is not None:
        described["result"] = json_text(details.result)
    for name, value in described.items():
        if value not in (None, "", False):
            yield f"{name.replace('_', ' '):<16} {value}"
    for each in details.attempts:
        took = "" if each.ended_at is None else f", {(each.ended_at - each.claimed_at) / SECOND:.3f} s"
        yield ""
        yield (
            f"attempt {each.attempt}: {each.outcome}, {as_datetime(each.claimed_at):%Y-%m-%d %H:%M:%S}{took}, "
            f"{each.worker or 'nobody'}"
        )
        yield from indented(each.error).split("\n") if each.error else ()
    if error and not details.attempts:
        yield from ("", *indented(error).split("\n"))


@jobs.command()
@acts("cancel", "cancelled")
def cancel() -> None:
    """Cancel jobs that wait, and ask those that run to stop.

    \b
    Example:
      fairlane jobs cancel 0198c0de-0000-7000-8000-000000000000
      fairlane jobs cancel --queue webhooks --key account=acme --dry-run
    """


@jobs.command()
@acts("retry", "made due")
def retry() -> None:
    """Let scheduled jobs run now, whether they wait for another attempt or for their time.

    Dead jobs are put back with `fairlane dead replay`.

    \b
    Example:
      fairlane jobs retry 0198c0de-0000-7000-8000-000000000000
      fairlane jobs retry --queue webhooks --task shop.deliver --yes
    """


@jobs.command()
@click.argument("ids", metavar="ID...", nargs=-1, required=True)
@change_options
def force(ids: tuple[str, ...], **given: Any) -> None:
    """Let waiting jobs start next, in the slots that come free, whatever pauses and limits say.

    Every limit counts them, and so does the turn of their flow. At most 1,000 jobs.

    \b
    Example:
      fairlane jobs force 0198c0de-0000-7000-8000-000000000000 --reason "the customer waits"
    """
    act("force", "forced to start", ids, {**given, "limit": LIMIT, "yes": True})


@jobs.command()
@filter_options()
@click.option("--format", "form", type=click.Choice(["jsonl", "csv"]), help="JSON Lines or CSV.  [default: jsonl]")
@click.option("--json", "as_json", is_flag=True, help="The same as --format jsonl.")
@click.option(
    "--with-payload", is_flag=True, help="Include calls and results, which may contain secrets and personal data."
)
@click.option(
    "--output", type=click.Path(dir_okay=False), metavar="FILE", help="Write to this file, which must not exist yet."
)
@click.option("--limit", type=click.IntRange(1), help="Maximum number of jobs.  [default: all]")
@click.option("--after", metavar="CURSOR", help="Continue from the end of an earlier export, appending to the file.")
@place_options
def export(form: str | None, as_json: bool, with_payload: bool, output: str | None, **given: Any) -> None:
    """Write jobs to a file or a pipe, the newest first: one job a line, or as CSV. Looking changes nothing.

    However it ends, standard error says how to go on (--after). Text in CSV that a spreadsheet would take for a formula
    has an apostrophe before it. --since and --until are about the enqueue.

    \b
    Example:
      fairlane jobs export --queue webhooks --state dead --output dead.jsonl
      fairlane jobs export --key account=acme --since 24h --format csv > acme.csv
      fairlane jobs export --limit 1000 --with-payload | jq .call
    """
    if as_json and form == "csv":
        raise ConfigurationError("give --json or --format csv, not both")
    app = app_of(given["app"], given["url"])
    goes_on = given["after"] is not None
    header = () if goes_on else exported_columns(with_payload=with_payload)
    after: str | None = None
    count = 0

    async def write(stream: IO[str]) -> None:
        nonlocal after, count, header
        async with operations_on(app, Surface.EXPORT) as operations:
            wanted = filter_of(given, await operations.now(), by_end=False)
            with Progress("exported") as progress:
                async for page in operations.jobs.export(wanted, after=given["after"], limit=given["limit"]):
                    described = [
                        describe_exported(each, with_payload=with_payload, redactor=operations.redactor)
                        for each in page.jobs
                    ]
                    # A page at once: a line that is begun is ended, and `after` is true of what was written.
                    stream.write(_csv(described, header) if form == "csv" else "".join(map(_json_line, described)))
                    stream.flush()
                    after, count, header = page.after, count + len(page.jobs), ()
                    progress(count)

    def print_rest(how: str) -> None:
        """How to go on. Nothing, where nothing was written: then it goes on as it began."""
        if after is not None:
            click.echo(f"{how}: {count:,} jobs written; go on with --after {after}", err=True)

    with _opened(output, goes_on=goes_on) as stream:
        try:
            asyncio.run(write(stream))
        except KeyboardInterrupt:
            print_rest("interrupted")
            sys.exit(INTERRUPTED)
        except FairlaneError:
            print_rest("broken off")
            raise
    print_rest("there are more")
    if after is None and output is not None:
        click.echo(f"{count:,} jobs written to {output}", err=True)


def _json_line(described: dict[str, Any]) -> str:
    return f"{json_text(described)}\n"


def _csv(described: list[dict[str, Any]], header: Sequence[str]) -> str:
    text = io.StringIO()
    writer = csv.writer(text)
    if header:
        writer.writerow(header)
    writer.writerows([_cell(value) for value in each.values()] for each in described)
    return text.getvalue()


@contextmanager
def _opened(output: str | None, *, goes_on: bool) -> Iterator[IO[str]]:
    if output is None:
        yield sys.stdout
        return
    try:
        # Line ends are the writer's business: CSV has its own.
        with open(output, "a" if goes_on else "x", encoding="utf-8", newline="", opener=_private) as stream:
            yield stream
    except FileExistsError:
        raise ConfigurationError(f"{output} is there already; remove it, or go on with it: --after CURSOR") from None
    except OSError as error:
        raise ConfigurationError(f"{output} cannot be written: {error.strerror or error}") from error


def _private(path: str, flags: int) -> int:
    """Jobs are nobody's business but the owner's. A file that is there keeps its mode."""
    return os.open(path, flags, 0o600)


def _cell(value: Any) -> Any:
    """A value as a cell has it: what is not text or a number as JSON, and no formula."""
    if value is None or isinstance(value, bool):
        return "" if value is None else str(value).lower()
    if isinstance(value, int | float):
        return value
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return one_line(f"'{text}" if text.startswith(FORMULA) else text)


# `fairlane dead`: what failed for good, and what becomes of it.

DELAY = click.option("--delay", metavar="DURATION", help="Run them after this delay.  [default: immediately]")
ON_CONFLICT = click.option(
    "--on-conflict",
    type=click.Choice(["reject", "replace"]),
    default="reject",
    help="If another job holds the unique key: skip the job, or cancel that one if it waits.",
)


@click.group(cls=LookingGroup)
def dead() -> None:
    """List dead jobs, put them back, or remove them.

    Without a command, lists dead jobs and takes the options of `dead list`.

    \b
    Example:
      fairlane dead --queue webhooks
      fairlane dead replay --queue webhooks --since 2h
    """


@dead.command("list")
@filter_options(("dead",))
@page_options
def list_dead(**given: Any) -> None:
    """List dead jobs, the last to die first.

    --since and --until are about the time of death.

    \b
    Example:
      fairlane dead list
      fairlane dead list --queue webhooks --key account=acme --since 2h --json
    """
    headings = ("ID", "QUEUE", "TASK", "KEYS", "TRIES", "DIED", "ERROR")
    _list({**given, "state": "dead"}, headings, "no job is dead", by_end=True)


@dead.command()
@acts("replay", "replayed", DELAY, ON_CONFLICT, states=("dead", "cancelled"), by_end=True)
def replay() -> None:
    """Put dead jobs back at the end of their lanes. Attempts are counted afresh; the history stays.

    Cancelled jobs are put back too if they are named, or with --state cancelled. A job whose unique key another
    job holds is skipped and reported: a key never has two live jobs.

    \b
    Example:
      fairlane dead replay 0198c0de-0000-7000-8000-000000000000
      fairlane dead replay --queue webhooks --since 2h --dry-run
      fairlane dead replay --all --limit 10000 --delay 10m --yes
    """


@dead.command()
@acts("purge", "purged", states=("dead", "cancelled", "done"), by_end=True)
def purge() -> None:
    """Remove dead jobs for good, with their history.

    Done and cancelled jobs are removed too if they are named, or with --state.

    \b
    Example:
      fairlane dead purge 0198c0de-0000-7000-8000-000000000000
      fairlane dead purge --queue webhooks --until 2d --yes
    """
