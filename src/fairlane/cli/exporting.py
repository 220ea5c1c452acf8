"""`fairlane jobs export`: jobs into a file or a pipe, a page at a time."""

from __future__ import annotations

import csv
import io
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, TYPE_CHECKING, Any

import click

from fairlane.cli.choosing import filter_options, place_options
from fairlane.errors import ConfigurationError, FairlaneError
from fairlane.redaction import json_text, one_line

if TYPE_CHECKING:
    from fairlane.job import JobRecord
    from fairlane.redaction import Redactor

__all__ = ["export"]

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
    import asyncio

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
    from fairlane.cli.choosing import filter_of
    from fairlane.cli.database import app_of, existing_store, redactor_of
    from fairlane.cli.telling import Progress
    from fairlane.operations import export_jobs

    app = app_of(options["app"], options["url"])
    writer.redactor = redactor_of(app, exports=True)
    async with existing_store(app) as store:
        wanted = filter_of(options, await store.now(), by_end=False)
        with Progress("exported") as progress:
            async for page in export_jobs(store, wanted, after=options["after"], limit=options["limit"]):
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
        from fairlane.operations import describe_exported

        described = [describe_exported(each, with_payload=self._with_payload, redactor=self.redactor) for each in jobs]
        self._stream.write(self._as_csv(described) if self._is_csv else _as_lines(described))
        self._stream.flush()
        self.count += len(jobs)
        self.after = after

    def _as_csv(self, described: list[dict[str, Any]]) -> str:
        from fairlane.operations import exported_columns

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


def _as_lines(described: list[dict[str, Any]]) -> str:
    return "".join(f"{json_text(each)}\n" for each in described)


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
