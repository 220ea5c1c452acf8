"""`fairlane jobs` and `fairlane dead`: list, show, export, cancel, retry, force, replay and purge jobs."""

from __future__ import annotations

import asyncio
import csv
import io
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import IO, Any

import click

from fairlane.cli.changes import act
from fairlane.cli.database import app_of, operations_on
from fairlane.cli.job_selection import (
    LookingGroup,
    action_options,
    filter_of,
    filter_options,
    job_ids,
    page_options,
    place_options,
    who_options,
)
from fairlane.cli.output import look
from fairlane.cli.tables import Progress, ago, first_line, keys_of, print_table, tell_details
from fairlane.clock import Instant
from fairlane.errors import ConfigurationError, FairlaneError
from fairlane.job import JobRecord
from fairlane.operations import LIMIT, describe_exported, document_of, exported_columns
from fairlane.policy.keys import key_words
from fairlane.policy.unique import OnReplayConflict
from fairlane.redaction import Redactor, Surface, json_text, one_line
from fairlane.store.operators import JobPage

FORMULA = ("=", "+", "-", "@", "\t", "\r", "\n")
"""How a cell begins that a spreadsheet takes for a formula, or for something to cut off until it is one."""
INTERRUPTED = 130


@click.command()
@filter_options
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
def export(form: str | None, as_json: bool, with_payload: bool, output: str | None, **options: Any) -> None:
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
    with _opened(output, goes_on=options["after"] is not None) as stream:
        writer = _Writer(stream, form or "jsonl", with_payload, has_header=options["after"] is None)
        try:
            asyncio.run(_export(writer, options))
        except KeyboardInterrupt:
            writer.tell_rest("interrupted")
            sys.exit(INTERRUPTED)
        except FairlaneError:
            writer.tell_rest("broken off")
            raise
    if writer.after is not None:
        writer.tell_rest("there are more")
    elif output is not None:
        click.echo(f"{writer.count:,} jobs written to {output}", err=True)


async def _export(writer: _Writer, options: dict[str, Any]) -> None:
    async with operations_on(app_of(options["app"], options["url"]), Surface.EXPORT) as operations:
        writer.redactor = operations.redactor
        wanted = filter_of(options, await operations.now(), by_end=False)
        with Progress("exported") as progress:
            async for page in operations.jobs.export(wanted, after=options["after"], limit=options["limit"]):
                writer.write(page.jobs, page.after)
                progress(writer.count)


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


class _Writer:
    """Jobs as lines, each page as a whole: a line that is begun is ended, and `after` is true of what was written."""

    def __init__(self, stream: IO[str], form: str, with_payload: bool, *, has_header: bool) -> None:
        self._stream = stream
        self._is_csv = form == "csv"
        self._with_payload = with_payload
        self._needs_header = has_header
        self.redactor: Redactor | None = None
        self.count = 0
        self.after: str | None = None

    def write(self, jobs: list[JobRecord], after: str | None) -> None:
        described = [describe_exported(each, with_payload=self._with_payload, redactor=self.redactor) for each in jobs]
        lines = (f"{json_text(each)}\n" for each in described)
        self._stream.write(self._as_csv(described) if self._is_csv else "".join(lines))
        self._stream.flush()
        self.count += len(jobs)
        self.after = after

    def _as_csv(self, described: list[dict[str, Any]]) -> str:
        text = io.StringIO()
        writer = csv.writer(text)
        if self._needs_header:
            self._needs_header = False
            writer.writerow(exported_columns(with_payload=self._with_payload))
        writer.writerows([_cell(value) for value in each.values()] for each in described)
        return text.getvalue()

    def tell_rest(self, how: str) -> None:
        """How to go on. Nothing, where nothing was written: then it goes on as it began."""
        if self.after is not None:
            click.echo(f"{how}: {self.count:,} jobs written; go on with --after {self.after}", err=True)


def _cell(value: Any) -> Any:
    """A value as a cell has it: what is not text or a number as JSON, and no formula."""
    match value:
        case None:
            return ""
        case bool():
            return str(value).lower()
        case int() | float():
            return value
        case str():
            text = value
        case _:
            text = json.dumps(value, ensure_ascii=False)
    return one_line(f"'{text}" if text.startswith(FORMULA) else text)


@click.group(cls=LookingGroup, by_id="show")
def jobs() -> None:
    """List jobs, or show, export, cancel and hurry them.

    Without a command, lists jobs and takes the options of `jobs list`; with an id alone, shows that job.

    \b
    Example:
      fairlane jobs --queue webhooks --state running
      fairlane jobs 0198c0de-0000-7000-8000-000000000000
    """


jobs.add_command(export)


@jobs.command("list")
@filter_options
@page_options
def list_(as_json: bool, **options: Any) -> None:
    """List jobs, the newest first. Looking changes nothing.

    --since and --until are about the enqueue. Done, dead and cancelled jobs are listed by their end.

    \b
    Example:
      fairlane jobs list --queue webhooks --key account=acme
      fairlane jobs list --state scheduled --since 2h --json
    """
    page, now = listing(options, by_end=False)
    if as_json:
        tell_page(page)
        return
    if not page.jobs:
        click.echo("no job fits")
        return
    rows = [
        (
            str(each.id),
            str(each.state),
            each.queue,
            each.task,
            f"{each.attempt}/{each.max_attempts}",
            ago(each.enqueued_at, now),
            keys_of(each),
        )
        for each in page.jobs
    ]
    print_table(("ID", "STATE", "QUEUE", "TASK", "TRIES", "AGE", "KEYS"), rows, ("QUEUE", "TASK", "KEYS"))
    tell_rest(page)


def listing(options: dict[str, Any], *, by_end: bool) -> tuple[JobPage, Instant]:
    """The page that the options ask for, and the store's time."""

    async def find() -> tuple[JobPage, Instant]:
        async with operations_on(app_of(options["app"], options["url"])) as operations:
            now = await operations.now()
            wanted = filter_of(options, now, by_end=by_end)
            with Progress("found") as progress:
                page = await operations.jobs.list(wanted, options["limit"], options["after"], on_progress=progress)
            return page, now

    return asyncio.run(find())


def tell_page(page: JobPage) -> None:
    click.echo(json.dumps(document_of(page)))


def tell_rest(page: JobPage) -> None:
    if page.after is not None:
        click.echo(f"there are more: --after {page.after}", err=True)


@jobs.command()
@click.argument("job", metavar="ID")
@place_options
@click.option("--json", "as_json", is_flag=True, help="Print a JSON object.")
def show(job: str, app: str | None, url: str | None, as_json: bool) -> None:
    """Show one job: its call, its state, and every attempt with its traceback.

    \b
    Example:
      fairlane jobs show 0198c0de-0000-7000-8000-000000000000
      fairlane jobs show 0198c0de-0000-7000-8000-000000000000 --json
    """
    details = look(lambda operations: operations.jobs.show(job_ids((job,))[0]), app, url)
    if not as_json:
        tell_details(details)
        return
    click.echo(json.dumps(document_of(details)))


@jobs.command()
@click.argument("ids", metavar="[ID]...", nargs=-1)
@filter_options
@action_options
@place_options
def cancel(ids: tuple[str, ...], **options: Any) -> None:
    """Cancel jobs that wait, and ask those that run to stop.

    \b
    Example:
      fairlane jobs cancel 0198c0de-0000-7000-8000-000000000000
      fairlane jobs cancel --queue webhooks --key account=acme --dry-run
    """
    act(lambda jobs: jobs.cancel, "cancelled", ids, options, by_end=False)


@jobs.command()
@click.argument("ids", metavar="[ID]...", nargs=-1)
@filter_options
@action_options
@place_options
def retry(ids: tuple[str, ...], **options: Any) -> None:
    """Let scheduled jobs run now, whether they wait for another attempt or for their time.

    Dead jobs are put back with `fairlane dead replay`.

    \b
    Example:
      fairlane jobs retry 0198c0de-0000-7000-8000-000000000000
      fairlane jobs retry --queue webhooks --task shop.deliver --yes
    """
    act(lambda jobs: jobs.retry, "made due", ids, options, by_end=False)


@jobs.command()
@click.argument("ids", metavar="ID...", nargs=-1, required=True)
@click.option("--dry-run", is_flag=True, help="Show what would be done, and change nothing.")
@click.option("--json", "as_json", is_flag=True, help="Print a JSON object.")
@who_options
@place_options
def force(ids: tuple[str, ...], **options: Any) -> None:
    """Let waiting jobs start next, in the slots that come free, whatever pauses and limits say.

    Every limit counts them, and so does the turn of their flow. At most 1,000 jobs.

    \b
    Example:
      fairlane jobs force 0198c0de-0000-7000-8000-000000000000 --reason "the customer waits"
    """
    options |= {"limit": LIMIT, "yes": True, "all": False}
    act(lambda jobs: jobs.force, "forced to start", ids, options, by_end=False)


# `fairlane dead`: what failed for good, and what becomes of it.

_which = partial(filter_options, states=("dead",))
_which_ended = partial(filter_options, states=("dead", "cancelled"))
_which_to_purge = partial(filter_options, states=("dead", "cancelled", "done"))


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
@_which
@page_options
def list_dead(as_json: bool, **options: Any) -> None:
    """List dead jobs, the last to die first.

    --since and --until are about the time of death.

    \b
    Example:
      fairlane dead list
      fairlane dead list --queue webhooks --key account=acme --since 2h --json
    """
    page, now = listing({**options, "state": "dead"}, by_end=True)
    if as_json:
        tell_page(page)
        return
    if not page.jobs:
        click.echo("no job is dead" if not page.after else "none found yet")
        return
    rows = [
        (
            str(each.id),
            each.queue,
            each.task,
            key_words(each.keys),
            f"{each.attempt}/{each.max_attempts}",
            ago(each.finished_at, now),
            first_line(each.error),
        )
        for each in page.jobs
    ]
    print_table(("ID", "QUEUE", "TASK", "KEYS", "TRIES", "DIED", "ERROR"), rows, ("QUEUE", "TASK", "KEYS", "ERROR"))
    tell_rest(page)


@dead.command()
@click.argument("ids", metavar="[ID]...", nargs=-1)
@_which_ended
@click.option("--delay", metavar="DURATION", help="Run them after this delay.  [default: immediately]")
@click.option(
    "--on-conflict",
    type=click.Choice(["reject", "replace"]),
    default="reject",
    show_default=True,
    help="If another job holds the unique key: skip the job, or cancel that one if it waits.",
)
@action_options
@place_options
def replay(ids: tuple[str, ...], delay: str | None, on_conflict: OnReplayConflict, **options: Any) -> None:
    """Put dead jobs back at the end of their lanes. Attempts are counted afresh; the history stays.

    Cancelled jobs are put back too if they are named, or with --state cancelled. A job whose unique key another
    job holds is skipped and reported: a key never has two live jobs.

    \b
    Example:
      fairlane dead replay 0198c0de-0000-7000-8000-000000000000
      fairlane dead replay --queue webhooks --since 2h --dry-run
      fairlane dead replay --all --limit 10000 --delay 10m --yes
    """
    act(lambda jobs: jobs.replay, "replayed", ids, options, by_end=True, delay=delay, on_conflict=on_conflict)


@dead.command()
@click.argument("ids", metavar="[ID]...", nargs=-1)
@_which_to_purge
@action_options
@place_options
def purge(ids: tuple[str, ...], **options: Any) -> None:
    """Remove dead jobs for good, with their history.

    Done and cancelled jobs are removed too if they are named, or with --state.

    \b
    Example:
      fairlane dead purge 0198c0de-0000-7000-8000-000000000000
      fairlane dead purge --queue webhooks --until 2d --yes
    """
    act(lambda jobs: jobs.purge, "purged", ids, options, by_end=True)
