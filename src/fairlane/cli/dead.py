"""`fairlane dead`: what failed for good, and what becomes of it."""

from __future__ import annotations

from functools import partial
from typing import Any

import click

from fairlane.cli.changes import act
from fairlane.cli.job_selection import LookingGroup, action_options, filter_options, place_options
from fairlane.cli.jobs import listing, tell_page
from fairlane.cli.tables import ago, first_line, print_table
from fairlane.clock import microseconds
from fairlane.operations import purge_jobs, replay_jobs
from fairlane.policy.keys import key_words
from fairlane.policy.unique import OnReplayConflict

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
@click.option("--limit", type=click.IntRange(1, 1_000), default=50, show_default=True, help="Maximum number to list.")
@click.option("--after", metavar="CURSOR", help="Continue from the end of an earlier page.")
@place_options
@click.option("--json", "as_json", is_flag=True, help="Print a JSON object.")
def list_(as_json: bool, **options: Any) -> None:
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
    if page.after is not None:
        click.echo(f"there are more: --after {page.after}", err=True)


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
    wait = None if delay is None else microseconds(delay)
    act(partial(replay_jobs, delay=wait, on_conflict=on_conflict), "replayed", ids, options, by_end=True)


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
    act(purge_jobs, "purged", ids, options, by_end=True)
