"""`fairlane explain`: why a job, a key or a queue waits."""

from __future__ import annotations

import asyncio
import json

import click

from fairlane.cli.database import app_of, existing_store
from fairlane.cli.job_selection import job_ids, keys_given, place_options, with_app
from fairlane.cli.tables import ago
from fairlane.clock import SECOND, lasting
from fairlane.errors import ConfigurationError
from fairlane.job import State
from fairlane.operations.explanations import describe_explanation, explain_job, explain_queue, has_jobs
from fairlane.redaction import one_line
from fairlane.scheduler.explain import Explanation
from fairlane.store import records

HOLDERS = 5
"""Jobs that are named under a limit; of the others there is a number."""


@click.command()
@click.argument("job", required=False, metavar="[ID]")
@click.option("--queue", help="Explain this queue instead of a job.")
@click.option(
    "--key", "keys", metavar="NAME=VALUE", multiple=True, help="Explain this key of the queue; may be repeated."
)
@place_options
@click.option("--json", "as_json", is_flag=True, help="Print a JSON object.")
def explain(
    job: str | None, queue: str | None, keys: tuple[str, ...], app: str | None, url: str | None, as_json: bool
) -> None:
    """Say why a job, a key or a queue waits. Looking changes nothing.

    Names everything that holds it, until when, and who holds it. With --app, also says whether the app knows the task.

    \b
    Example:
      fairlane explain 0198c0de-0000-7000-8000-000000000000 --app shop:app
      fairlane explain --queue webhooks --key account=acme
    """
    if (job is None) == (queue is None):
        raise ConfigurationError("explain what? Give the id of a job, or --queue (and --key)")
    if job is not None and keys:
        raise ConfigurationError("--key belongs to --queue; a job has its own keys")
    told, is_empty = asyncio.run(_ask(job, queue, keys, app, url))
    if as_json:
        click.echo(json.dumps(describe_explanation(told)))
    else:
        _tell(told, is_empty)


async def _ask(
    job: str | None, queue: str | None, keys: tuple[str, ...], app: str | None, url: str | None
) -> tuple[Explanation, bool]:
    named = app_of(app, url)
    forwarded = named.forwarded if app else None
    async with existing_store(named) as store:
        if job is not None:
            if job in await store.run(records.queues()):
                raise ConfigurationError(f"{job!r} is a queue, not the id of a job; write --queue {job}")
            tasks = named.known_tasks() if app else None
            return await explain_job(store, job_ids((job,))[0], tasks, forwarded), False
        assert queue is not None
        wanted = keys_given(keys)
        told = await explain_queue(store, queue, wanted, forwarded)
        return told, bool(wanted) and await has_jobs(store, queue, wanted) is False


def _tell(told: Explanation, is_empty: bool) -> None:
    subject = told.subject
    keys = one_line(" ".join(f"{name}={value}" for name, value in subject.keys.items() if name != "task"))
    if subject.job is not None:
        click.echo(f"{subject.job}  {subject.state}  {subject.queue}  {one_line(subject.task or '')}  {keys}".rstrip())
    else:
        click.echo(f"{subject.queue} {keys}".rstrip())
    if is_empty:
        click.echo(f"  no job with {keys or 'this task'} waits or runs")
    elif not told.holds:
        click.echo("  nothing holds it")
    for hold in told.holds:
        click.echo(f"  {hold.reason}: {one_line(with_app(hold.words))}")
        for holder in hold.holders[:HOLDERS]:
            click.echo(
                one_line(
                    f"    {holder.job}  {holder.task}  {ago(holder.since, told.now)}  {holder.worker or ''}"
                ).rstrip()
            )
        if len(hold.holders) > HOLDERS:
            click.echo(f"    … and {len(hold.holders) - HOLDERS} more")
    if subject.state in (State.SCHEDULED, State.READY):
        _tell_times(told)
    if subject.job is None and told.next_up:
        click.echo("  next to start in the queue: " + ", ".join(str(job) for job in told.next_up))


def _tell_times(told: Explanation) -> None:
    if told.earliest is None:
        click.echo("  it cannot start until somebody acts")
        return
    earliest = "now" if told.earliest <= told.now else f"in {lasting((told.earliest - told.now) / SECOND)}"
    if told.estimate is None:
        guess = "; how much later is unknown, because no run has ended yet"
    else:
        guess = "" if told.estimate <= told.now else f", probably in {lasting((told.estimate - told.now) / SECOND)}"
    click.echo(f"  earliest start: {earliest}{guess}")
