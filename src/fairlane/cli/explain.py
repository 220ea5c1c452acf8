"""`fairlane explain`: why a job, a key or a queue waits."""

from __future__ import annotations

import json

import click

from fairlane.cli.database import app_of
from fairlane.cli.job_selection import job_ids, keys_given, place_options, with_app
from fairlane.cli.output import ask_app
from fairlane.cli.tables import ago
from fairlane.clock import SECOND, lasting
from fairlane.errors import ConfigurationError
from fairlane.job import State
from fairlane.operations import JobFilter, Operations, document_of
from fairlane.policy.keys import canonical_keys
from fairlane.redaction import one_line
from fairlane.scheduler.explain import Explanation

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
    loaded, wanted = app_of(app, url), keys_given(keys)
    tasks = loaded.known_tasks() if app else None
    told, is_empty = ask_app(lambda operations: _ask(operations, job, queue, wanted, tasks), loaded)
    if as_json:
        click.echo(json.dumps(document_of(told)))
    else:
        _tell(told, is_empty)


async def _ask(
    operations: Operations, job: str | None, queue: str | None, keys: dict[str, str], tasks: list[str] | None
) -> tuple[Explanation, bool]:
    if job is not None:
        if job in [each.queue for each in await operations.policies.show()]:
            raise ConfigurationError(f"{job!r} is a queue, not the id of a job; write --queue {job}")
        return await operations.jobs.explain(job_ids((job,))[0], tasks=tasks), False
    assert queue is not None
    told = await operations.queues.explain(queue, keys)
    return told, bool(keys) and await _has_jobs(operations, queue, keys) is False


async def _has_jobs(operations: Operations, queue: str, keys: dict[str, str]) -> bool | None:
    """Whether a job with these keys waits or runs; `None` where more would have to be read than one page looks at."""
    named = canonical_keys(keys)
    task = named.pop("task", None)
    is_known = True
    for state in (State.READY, State.RUNNING, State.SCHEDULED):
        wanted = JobFilter(queue=queue, state=state, keys=named, task=task)
        page = await operations.jobs.list(wanted, 1, looks=1)
        if page.jobs:
            return True
        is_known = is_known and page.after is None
    return False if is_known else None


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
