"""`fairlane jobs`: look at jobs, cancel them, let them run now."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import click

from fairlane.cli.acting import act, action_options, who_options
from fairlane.cli.choosing import LookingGroup, filter_options, place_options
from fairlane.cli.exporting import export

if TYPE_CHECKING:
    from fairlane.clock import Instant
    from fairlane.operations import JobDetails
    from fairlane.store.operators import JobPage

__all__ = ["jobs", "listing", "tell_page"]


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
@click.option("--limit", type=click.IntRange(1, 1_000), default=50, show_default=True, help="Maximum number to list.")
@click.option("--after", metavar="CURSOR", help="Continue from the end of an earlier page.")
@place_options
@click.option("--json", "as_json", is_flag=True, help="Print a JSON object.")
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
    from fairlane.cli.telling import ago, keys_of, print_table

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
    _tell_rest(page)


def listing(options: dict[str, Any], *, by_end: bool) -> tuple[JobPage, Instant]:
    """The page that the options ask for, and the store's time."""
    import asyncio

    from fairlane.cli.choosing import filter_of
    from fairlane.cli.database import app_of, existing_store, redactor_of
    from fairlane.cli.telling import Progress
    from fairlane.operations import list_jobs

    async def look() -> tuple[JobPage, Instant]:
        app = app_of(options["app"], options["url"])
        async with existing_store(app) as store:
            now = await store.now()
            wanted = filter_of(options, now, by_end=by_end)
            with Progress("found") as progress:
                page = await list_jobs(
                    store,
                    wanted,
                    options["limit"],
                    options["after"],
                    redactor=redactor_of(app),
                    on_progress=progress,
                )
            return page, now

    return asyncio.run(look())


def tell_page(page: JobPage) -> None:
    from fairlane.operations import describe_page

    click.echo(json.dumps(describe_page(page)))


def _tell_rest(page: JobPage) -> None:
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
    import asyncio

    from fairlane.cli.choosing import job_ids
    from fairlane.cli.database import app_of, existing_store, redactor_of
    from fairlane.cli.telling import tell_details
    from fairlane.operations import describe_details, show_job

    async def look() -> JobDetails:
        found = app_of(app, url)
        async with existing_store(found) as store:
            return await show_job(store, job_ids((job,))[0], redactor_of(found))

    details = asyncio.run(look())
    if not as_json:
        tell_details(details)
        return
    click.echo(json.dumps(describe_details(details)))


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
    from fairlane.operations import cancel_jobs

    act(cancel_jobs, "cancelled", ids, options, by_end=False)


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
    from fairlane.operations import retry_jobs

    act(retry_jobs, "made due", ids, options, by_end=False)


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
    from fairlane.operations import force_jobs

    act(force_jobs, "forced to start", ids, {**options, "limit": 1_000, "yes": True, "all": False}, by_end=False)
