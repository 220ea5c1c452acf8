"""`fairlane explain`: why a job, a key or a queue waits."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import click

from fairlane.cli.database import app_of
from fairlane.cli.options import job_ids, json_option, key_option, keys_given, place_options, with_app
from fairlane.cli.output import ago, look, show
from fairlane.clock import SECOND, lasting
from fairlane.errors import ConfigurationError
from fairlane.job import State
from fairlane.operations import Explanation, JobFilter, Operations, document_of
from fairlane.policy.keys import canonical_keys

HOLDERS = 5
"""Jobs that are named under a limit; of the others there is a number."""


@click.command()
@click.argument("job", required=False, metavar="[ID]")
@click.option("--queue", help="Explain this queue instead of a job.")
@key_option("keys", "Explain this key of the queue; may be repeated.")
@place_options
@json_option()
def explain(job: str | None, queue: str | None, keys: tuple[str, ...], **given: Any) -> None:
    """Say why a job, a key or a queue waits. Looking changes nothing.

    Names everything that holds it, until when, and who holds it. With --app, also says whether the app knows the task.

    \b
    Example:
      fairlane explain 0198c0de-0000-7000-8000-000000000000 --app shop:app
      fairlane explain --queue webhooks --key account=acme
    """
    if job is not None and keys:
        raise ConfigurationError("--key belongs to --queue; a job has its own keys")
    wanted = keys_given(keys)
    tasks = app_of(given["app"], given["url"]).known_tasks() if given["app"] else None

    async def ask(operations: Operations) -> tuple[Explanation, bool]:
        if job is not None and queue is None:
            if job in [each.queue for each in await operations.policies.show()]:
                raise ConfigurationError(f"{job!r} is a queue, not the id of a job; write --queue {job}")
            return await operations.jobs.explain(job_ids((job,))[0], tasks=tasks), False
        if queue is None or job is not None:
            raise ConfigurationError("explain what? Give the id of a job, or --queue (and --key)")
        explanation = await operations.queues.explain(queue, wanted)
        return explanation, bool(wanted) and await _has_no_jobs(operations, queue, wanted)

    explanation, is_empty = look(ask, given)
    show(explanation, lambda explanation, width: _lines(explanation, is_empty), given, document_of)


async def _has_no_jobs(operations: Operations, queue: str, keys: dict[str, str]) -> bool:
    """Whether it is certain, after one page of each state, that no job with these keys waits or runs."""
    named = canonical_keys(keys)
    task = named.pop("task", None)
    for state in (State.READY, State.RUNNING, State.SCHEDULED):
        wanted = JobFilter(queue=queue, state=state, keys=named, task=task)
        page = await operations.jobs.list(wanted, 1, looks=1)
        if page.jobs or page.after is not None:
            return False
    return True


def _lines(explanation: Explanation, is_empty: bool) -> Iterator[str]:
    subject, now = explanation.subject, explanation.now
    keys = " ".join(f"{name}={value}" for name, value in subject.keys.items() if name != "task")
    if subject.job is not None:
        yield f"{subject.job}  {subject.state}  {subject.queue}  {subject.task or ''}  {keys}".rstrip()
    else:
        yield f"{subject.queue} {keys}".rstrip()
    if is_empty:
        yield f"  no job with {keys or 'this task'} waits or runs"
    elif not explanation.holds:
        yield "  nothing holds it"
    for hold in explanation.holds:
        yield f"  {hold.reason}: {with_app(hold.words)}"
        for holder in hold.holders[:HOLDERS]:
            yield f"    {holder.job}  {holder.task}  {ago(holder.since, now)}  {holder.worker or ''}".rstrip()
        if len(hold.holders) > HOLDERS:
            yield f"    … and {len(hold.holders) - HOLDERS} more"
    if subject.state in (State.SCHEDULED, State.READY):
        yield f"  {_times(explanation)}"
    if subject.job is None and explanation.next_up:
        yield "  next to start in the queue: " + ", ".join(map(str, explanation.next_up))


def _times(explanation: Explanation) -> str:
    earliest, estimate, now = explanation.earliest, explanation.estimate, explanation.now
    if earliest is None:
        return "it cannot start until somebody acts"
    start = "now" if earliest <= now else f"in {lasting((earliest - now) / SECOND)}"
    if estimate is None:
        return f"earliest start: {start}; how much later is unknown, because no run has ended yet"
    probably = f", probably in {lasting((estimate - now) / SECOND)}" if estimate > now else ""
    return f"earliest start: {start}{probably}"
