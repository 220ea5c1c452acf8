"""`fairlane enqueue`: one job by hand."""

from __future__ import annotations

import asyncio
import json
from difflib import get_close_matches
from typing import Any
from uuid import UUID

import click

from fairlane.app import App
from fairlane.cli.database import load_app
from fairlane.cli.options import json_option, keys_given
from fairlane.enqueue import JobBuilder
from fairlane.errors import ConfigurationError, InvalidJob, UndecodablePayload, UnknownTask
from fairlane.job import NewJob
from fairlane.policy.policy import Policy
from fairlane.task import Call, Task


@click.command()
@click.argument("app", metavar="MODULE:APP")
@click.argument("task")
@click.option(
    "--args", "args", metavar="JSON", default="[]", show_default=False, help="Positional arguments: a JSON array."
)
@click.option(
    "--kwargs", "kwargs", metavar="JSON", default="{}", show_default=False, help="Arguments by name: a JSON object."
)
@click.option("--queue", help="Another queue than the task's.")
@click.option("--priority", type=int, help="Another priority than the task's.")
@click.option("--delay", metavar="DURATION", help="Run it after this delay.")
@click.option("--keys", metavar="NAME=VALUE", multiple=True, help="A key of the job; may be repeated.")
@click.option("--context", metavar="JSON", help="What the queue's policy asks about the job: a JSON object.")
@click.option("--dry-run", is_flag=True, help="Check the call and print the job, but do not store it.")
@json_option()
def enqueue(
    app: str,
    task: str,
    args: str,
    kwargs: str,
    keys: tuple[str, ...],
    context: str | None,
    dry_run: bool,
    as_json: bool,
    **given: Any,
) -> None:
    """Store one job of a task. The task goes by its full name, or by its last part where that is enough.

    \b
    Example:
      fairlane enqueue shop:app deliver --kwargs '{"account": "acme"}'
      fairlane enqueue shop:app shop.deliver --args '["acme"]' --priority 5 --delay 10m
    """
    loaded = load_app(app)
    found = _task(loaded, task)
    given["keys"] = keys_given(keys, "--keys") or None
    given["context"] = None if context is None else _json("--context", context, dict)
    options = {name: value for name, value in given.items() if value is not None}
    call = found.using(**options).call(*_json("--args", args, list), **_json("--kwargs", kwargs, dict))
    built = _checked(loaded, found, call)
    job = None if dry_run else str(asyncio.run(_store(loaded, call)))
    if as_json:
        document = {"id": job, "queue": built.queue, "task": built.task, "keys": built.keys, "dry_run": dry_run}
        click.echo(json.dumps(document))
    elif dry_run:
        text = found.codec.unsealed_call(call.args, call.kwargs).decode()
        click.echo(f"would be stored: {built.task} in {built.queue}, {text}")
    else:
        click.echo(job)


def _task(app: App, name: str) -> Task[..., Any]:
    """The task of this full name, or the only one whose last part it is."""
    if (found := app.registry.find(name)) is not None:
        return found
    tasks = {task.name: task for task in app.registry}
    alike = [full for full in tasks if full.rpartition(".")[2] == name]
    if len(alike) == 1:
        return tasks[alike[0]]
    if alike:
        raise UnknownTask(f"several tasks are named {name!r}: {', '.join(sorted(alike))}")
    similar = get_close_matches(name, [*tasks, *(full.rpartition(".")[2] for full in tasks)], n=1)
    suggestion = f"did you mean {similar[0]!r}?" if similar else f"known are: {', '.join(sorted(tasks)) or 'none'}"
    raise UnknownTask(f"no task is named {name!r}; {suggestion}")


def _json(option: str, text: str, kind: type) -> Any:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ConfigurationError(f"{option} is not JSON: {error}") from None
    if not isinstance(value, kind):
        what = "a JSON array, such as '[1, \"acme\"]'" if kind is list else "a JSON object, such as '{\"number\": 1}'"
        raise ConfigurationError(f"{option} is a {type(value).__name__}; give {what}")
    return value


def _checked(app: App, task: Task[..., Any], call: Call[Any]) -> NewJob:
    """The job as its queue is declared here; refused if the task's annotations would refuse its arguments later."""
    name = call.options.queue_of(task)
    policy = app.queues[name].policy if name in app.queues else Policy(name)
    built = JobBuilder(call, policy, app.max_payload, declared=policy).build(call, UUID(int=0))
    try:
        task.codec.decode_call(built.payload)
    except UndecodablePayload as error:
        raise InvalidJob(str(error)) from None
    return built


async def _store(app: App, call: Call[Any]) -> Any:
    async with app:
        (job,) = await app.enqueue_many([call])
        return job.id
