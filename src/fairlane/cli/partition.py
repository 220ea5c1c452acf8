"""`fairlane partition`: change the number of a queue's partitions."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import click

from fairlane.cli.changes import change_options, intent_of
from fairlane.cli.database import app_of, operations_on
from fairlane.cli.tables import Progress, plural
from fairlane.errors import ConfigurationError
from fairlane.operations import PartitionPlan, Repartitioned, document_of
from fairlane.queue import check_divided_by


@contextmanager
def _resumable() -> Iterator[None]:
    """Ctrl-C says what it leaves behind, and how to go on: what stands still is seen by nobody else at once."""
    try:
        yield
    except KeyboardInterrupt:
        if click.get_current_context().params["dry_run"]:
            raise
        raise click.ClickException(
            "interrupted; if the change had begun (`fairlane doctor` says whether it had), keys that move stand still "
            "until it is over: workers go on with it, and so does the same command; --abandon gives it up"
        ) from None


@click.command()
@_resumable()
@click.argument("queue")
@click.option("--to", "to", type=click.IntRange(1), required=True, help="The new number of partitions.")
@click.option("--by", "by", multiple=True, help="The key to partition by, if the queue has had only one partition.")
@click.option(
    "--accept-missing-keys", is_flag=True, help="Proceed even if waiting jobs lack that key; they all count under None."
)
@click.option("--abandon", is_flag=True, help="Give up a change to another number that is under way.")
@click.option("--yes", is_flag=True, help="Do not ask for confirmation.")
@change_options
def partition(queue: str, to: int, by: tuple[str, ...], yes: bool, **options: Any) -> None:
    """Change the number of a queue's partitions while it works.

    Keys whose partition changes stand still until what runs of them has ended, what waits has moved, and producers have
    learned the new number, which takes 10 seconds; the others go on. Limits and sequences hold throughout. If it is
    interrupted, workers go on with the change, and so does the same command; `--to` the number that it had, with
    `--abandon`, goes back. Programs that declare another number go by the stored one, so they can be deployed before
    or after.

    \b
    Example:
      fairlane partition email --to 8 --dry-run
      fairlane partition email --to 4 --by account --yes --reason "one claim lock is not enough"
      fairlane partition email --to 4 --abandon
    """
    done = asyncio.run(_change(queue, to, by, yes, options))
    if done is None:
        raise click.Abort
    if options["as_json"]:
        click.echo(json.dumps(document_of(done)))
    else:
        _tell(done)


async def _change(queue: str, to: int, by: tuple[str, ...], yes: bool, options: dict[str, Any]) -> Repartitioned | None:
    how = {name: options.pop(name) for name in ("accept_missing_keys", "abandon")}
    intent = intent_of(options)
    app = app_of(options["app"], options["url"])
    async with operations_on(app) as operations:
        (stored,) = await operations.policies.show([queue])
        carried = () if stored.policy is None else stored.policy.stamped_keys
        check_divided_by(queue, by, carried, app.registry.of_queue(queue))
        change = partial(operations.partitions.change, queue, to, by=by or None, **how)
        if not (options["dry_run"] or yes):
            plan = (await change(**{**intent, "dry_run": True})).plan
            if not plan.is_empty and not _confirmed(plan):
                return None
        with Progress("moved") as progress:
            return await change(on_progress=progress, **intent)


def _confirmed(plan: PartitionPlan) -> bool:
    if not sys.stdin.isatty():
        raise ConfigurationError(
            f"queue {plan.queue!r} would go from {plan.before} to {plural(plan.after, 'partition')} and there is "
            "nobody to ask; give --yes, or --dry-run to see what moves"
        )
    return click.confirm(f"{_said(plan)} Go on?", err=True)


def _said(plan: PartitionPlan) -> str:
    running = f"{plan.running:,} that {'runs has' if plan.running == 1 else 'run have'} ended"
    by = f" by {', '.join(plan.by)}" if plan.by else ""
    return (
        f"{plan.queue}: {_given_up(plan)}{plan.before} → {plural(plan.after, 'partition')}{by}; "
        f"{plural(plan.waiting, 'waiting job')} of keys that move {'goes' if plan.waiting == 1 else 'go'} to another "
        f"partition{f', once {running}' if plan.running else ''}."
    )


def _given_up(plan: PartitionPlan) -> str:
    return "" if plan.gives_up is None else f"the change to {plan.gives_up} is given up; "


def _tell(done: Repartitioned) -> None:
    plan = done.plan
    if plan.is_empty:
        click.echo(f"{plan.queue}: nothing to change: it has {plan.after} already")
    elif done.is_dry_run:
        click.echo(_said(plan))
    else:
        partitions, jobs = plural(plan.after, "partition"), plural(done.moved, "job")
        click.echo(f"{plan.queue}: {_given_up(plan)}{plan.before} → {partitions}, {jobs} moved")
        click.echo(f"declare partitions={plan.after} in the program; one that declares another number goes by this one")
