"""`fairlane partition`: change the number of a queue's partitions."""

from __future__ import annotations

from functools import partial
from typing import Any

import click

from fairlane.cli.changes import is_interactive
from fairlane.cli.database import app_of
from fairlane.cli.options import change_options, intent_of
from fairlane.cli.output import Progress, look, plural, show
from fairlane.errors import ConfigurationError
from fairlane.operations import Operations, PartitionPlan, Repartitioned, document_of
from fairlane.queue import check_divided_by


@click.command()
@click.argument("queue")
@click.option("--to", "to", type=click.IntRange(1), required=True, help="The new number of partitions.")
@click.option("--by", "by", multiple=True, help="The key to partition by, if the queue has had only one partition.")
@click.option(
    "--accept-missing-keys", is_flag=True, help="Proceed even if waiting jobs lack that key; they all count under None."
)
@click.option("--abandon", is_flag=True, help="Give up a change to another number that is under way.")
@click.option("--yes", is_flag=True, help="Do not ask for confirmation.")
@change_options
def partition(queue: str, to: int, by: tuple[str, ...], yes: bool, **given: Any) -> None:
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
    app = app_of(given["app"], given["url"])
    how = {**intent_of(given), "accept_missing_keys": given["accept_missing_keys"], "abandon": given["abandon"]}

    async def ask(operations: Operations) -> Repartitioned:
        (stored,) = await operations.policies.show([queue])
        carried = () if stored.policy is None else stored.policy.keys_of_job
        check_divided_by(queue, by, carried, app.registry.of_queue(queue))
        change = partial(operations.partitions.change, queue, to, by=by or None)
        if not (given["dry_run"] or yes):
            plan = (await change(**{**how, "dry_run": True})).plan
            if not plan.is_empty and not _is_confirmed(plan):
                raise click.Abort
        with Progress("moved") as progress:
            return await change(on_progress=progress, **how)

    try:
        done = look(ask, given)
    except KeyboardInterrupt:
        if given["dry_run"]:
            raise
        raise click.ClickException(INTERRUPTED) from None
    show(done, _draw, given, document_of)


INTERRUPTED = (
    "interrupted; if the change had begun (`fairlane doctor` says whether it had), keys that move stand still until it "
    "is over: workers go on with it, and so does the same command; --abandon gives it up"
)
"""Says what is left behind and how to go on: what stands still is seen by nobody else at once."""


def _is_confirmed(plan: PartitionPlan) -> bool:
    if not is_interactive():
        raise ConfigurationError(
            f"queue {plan.queue!r} would go from {plan.before} to {plural(plan.after, 'partition')} and there is "
            "nobody to ask; give --yes, or --dry-run to see what moves"
        )
    return click.confirm(f"{_outlook(plan)} Go on?", err=True)


def _outlook(plan: PartitionPlan) -> str:
    """What the change comes to, before it is made."""
    running = f"{plan.running:,} that {'runs has' if plan.running == 1 else 'run have'} ended"
    by = f" by {', '.join(plan.by)}" if plan.by else ""
    return (
        f"{_heads(plan)}{by}; {plural(plan.waiting, 'waiting job')} of keys that move "
        f"{'goes' if plan.waiting == 1 else 'go'} to another partition{f', once {running}' if plan.running else ''}."
    )


def _heads(plan: PartitionPlan) -> str:
    given_up = "" if plan.gives_up is None else f"the change to {plan.gives_up} is given up; "
    return f"{plan.queue}: {given_up}{plan.before} → {plural(plan.after, 'partition')}"


def _draw(done: Repartitioned, width: int) -> list[str]:
    plan = done.plan
    if plan.is_empty:
        return [f"{plan.queue}: nothing to change: it has {plan.after} already"]
    if done.is_dry_run:
        return [_outlook(plan)]
    return [
        f"{_heads(plan)}, {plural(done.moved, 'job')} moved",
        f"declare partitions={plan.after} in the program; one that declares another number goes by this one",
    ]
