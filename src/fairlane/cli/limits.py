"""`fairlane limit`, `weight`, `boost` and `overrides`: other numbers for single keys, and what is set."""

from __future__ import annotations

import json
from typing import Any

import click

from fairlane.cli.changes import change, change_options, key_option, lasting_options, tell_overrides
from fairlane.cli.database import app_of
from fairlane.cli.job_selection import LookingGroup, keys_given, place_options
from fairlane.cli.output import look_now
from fairlane.cli.tables import ago, print_table
from fairlane.clock import Instant
from fairlane.operations import LimitInForce, Operations, document_of


@click.group(cls=LookingGroup)
def limit() -> None:
    """Change a limit for single keys, and see what is in force.

    Without a command, lists the limits of all queues. A limit is named as `limit list` shows it, or by its kind or its
    keys where that is clear.

    \b
    Example:
      fairlane limit set webhooks concurrency 20 --key account=acme --for 1h
      fairlane limit list webhooks
    """


@limit.command("set")
@click.argument("queue")
@click.argument("limit", metavar="LIMIT")
@click.argument("number", type=float)
@key_option
@lasting_options
@change_options
def set_limit(queue: str, limit: str, number: float, keys: tuple[str, ...], **options: Any) -> None:
    """Give a limit another number for one key; for the whole queue if that is its scope.

    In force at every worker's next claim. A lower number preempts nothing: what runs drains first. To change a limit
    for every key, change the code and run `fairlane policy apply`.

    \b
    Example:
      fairlane limit set webhooks concurrency:account 20 --key account=acme
      fairlane limit set webhooks rate/1m:endpoint 10 --key endpoint=api.acme.com --until 2030-01-31T08:00
    """
    named = keys_given(keys)
    change(lambda on, intent: on.limits.set(queue, limit, number, keys=named, **intent), options)


@limit.command("clear")
@click.argument("queue")
@click.argument("limit", metavar="LIMIT")
@key_option
@change_options
def clear_limit(queue: str, limit: str, keys: tuple[str, ...], **options: Any) -> None:
    """Let a key have the number again that the policy declares.

    \b
    Example:
      fairlane limit clear webhooks concurrency:account --key account=acme
    """
    named = keys_given(keys)
    change(lambda on, intent: on.limits.clear(queue, limit, keys=named, **intent), options)


@limit.command("list")
@click.argument("queue", required=False)
@place_options
@click.option("--json", "as_json", is_flag=True, help="Print a JSON array.")
def list_limits(queue: str | None, app: str | None, url: str | None, as_json: bool) -> None:
    """List the limits of a queue, or of all: what the policy declares, what is in force, and who changed it.

    \b
    Example:
      fairlane limit list
      fairlane limit list webhooks --json
    """
    found, now = look_now(lambda on: _limits_by_queue(on, queue), app_of(app, url))
    if as_json:
        click.echo(json.dumps([{"queue": name, **document_of(each)} for name, each in found]))
        return
    if not found:
        click.echo("no queue has a limit" if queue is None else f"queue {queue!r} has no limit")
        return
    headings: tuple[str, ...] = ("LIMIT", "KEY", "DECLARED", "IN FORCE", "SET BY", "ENDS", "REASON")
    rows = [_row(each, now) for _, each in found]
    if queue is None:
        headings = ("QUEUE", *headings)
        rows = [(name, *row) for (name, _), row in zip(found, rows, strict=True)]
    print_table(headings, rows, ("QUEUE", "KEY", "SET BY", "REASON"))


async def _limits_by_queue(operations: Operations, queue: str | None) -> list[tuple[str, LimitInForce]]:
    known = [each.queue for each in await operations.policies.show() if each.policy is not None]
    names = known if queue is None else [queue]
    return [(name, each) for name in names for each in await operations.limits.list(name)]


def _row(limit: LimitInForce, now: Instant) -> tuple[str, ...]:
    keys = " ".join(f"{name}={value}" for name, value in limit.scope)
    everyone = "each partition" if limit.is_per_partition else "the whole queue"
    if limit.declared.by:
        everyone = "every key, by partition" if limit.is_per_partition else "every key"
    return (
        limit.name.removesuffix(":"),
        keys or everyone,
        repr(limit.declared),
        "suspended" if limit.is_suspended else repr(limit.in_force),
        limit.override.set_by if limit.override else "",
        ago(limit.override.expires_at, now) if limit.override else "",
        limit.override.reason if limit.override else "",
    )


@click.group()
def weight() -> None:
    """Change how large the share of a key is.

    \b
    Example:
      fairlane weight set webhooks 3 --key account=acme
      fairlane weight clear webhooks --key account=acme
    """


@weight.command("set")
@click.argument("queue")
@click.argument("number", type=float)
@key_option
@lasting_options
@change_options
def set_weight(queue: str, number: float, keys: tuple[str, ...], **options: Any) -> None:
    """Give a key another weight than the policy declares.

    \b
    Example:
      fairlane weight set webhooks 3 --key account=acme --reason "a larger plan"
    """
    named = keys_given(keys)
    change(lambda on, intent: on.weights.set(queue, number, keys=named, **intent), options)


@weight.command("clear")
@click.argument("queue")
@key_option
@change_options
def clear_weight(queue: str, keys: tuple[str, ...], **options: Any) -> None:
    """Let a key have the weight again that the policy declares, and no boost.

    \b
    Example:
      fairlane weight clear webhooks --key account=acme
    """
    named = keys_given(keys)
    change(lambda on, intent: on.weights.clear(queue, keys=named, **intent), options)


@click.command()
@click.argument("queue")
@key_option
@click.option("--by", "factor", type=float, required=True, help="Multiply its weight by this factor.")
@lasting_options
@change_options
def boost(queue: str, keys: tuple[str, ...], factor: float, **options: Any) -> None:
    """Multiply the weight of a key, for a while. Limits hold all the same.

    \b
    Example:
      fairlane boost webhooks --key account=acme --by 4 --for 30m
    """
    named = keys_given(keys)
    change(lambda on, intent: on.weights.boost(queue, factor, keys=named, **intent), options)


@click.command()
@click.argument("queue", required=False)
@place_options
@click.option("--json", "as_json", is_flag=True, help="Print a JSON array.")
def overrides(queue: str | None, app: str | None, url: str | None, as_json: bool) -> None:
    """List what operators have set, of one queue or of all.

    These are pauses, limits, weights and suspensions. One that the policy in force has no place for has no effect, and
    says so.

    \b
    Example:
      fairlane overrides
      fairlane overrides webhooks --json
    """
    found, now = look_now(lambda on: on.overrides.list(queue), app_of(app, url))
    if as_json:
        click.echo(json.dumps(document_of(found)))
        return
    tell_overrides(found, now)
    if not found:
        click.echo("nothing is overridden")


@click.command()
@click.argument("queue")
@key_option
@click.option("--task", help="Only of this task.")
@lasting_options
@change_options
def pause(queue: str, keys: tuple[str, ...], task: str | None, **options: Any) -> None:
    """Start nothing more of a queue, of a key or of a task.

    What runs goes on. Every worker obeys at its next claim, and keys that are first seen later are covered.

    \b
    Example:
      fairlane pause webhooks --reason "the vendor is down" --for 1h
      fairlane pause webhooks --key account=acme
      fairlane pause webhooks --task shop.deliver --dry-run
    """
    named = keys_given(keys)
    change(lambda on, intent: on.queues.pause(queue, keys=named, task=task, **intent), options)


@click.command()
@click.argument("queue")
@key_option
@click.option("--task", help="Only of this task.")
@change_options
def resume(queue: str, keys: tuple[str, ...], task: str | None, **options: Any) -> None:
    """End a pause: the one of exactly this queue, key or task. Who waited starts at once.

    \b
    Example:
      fairlane resume webhooks
      fairlane resume webhooks --key account=acme
    """
    named = keys_given(keys)
    change(lambda on, intent: on.queues.resume(queue, keys=named, task=task, **intent), options)


@click.command()
@click.argument("queue")
@lasting_options
@change_options
def suspend(queue: str, **options: Any) -> None:
    """Let no limit of a queue hold anything back, for an emergency.

    The limits go on counting, so that they hold exactly when they come back. Pauses and turns stay.

    \b
    Example:
      fairlane suspend webhooks --for 10m --reason "drain before the maintenance"
    """
    change(lambda on, intent: on.queues.suspend(queue, **intent), options)


@click.command()
@click.argument("queue")
@change_options
def unsuspend(queue: str, **options: Any) -> None:
    """Let the limits of a queue hold again. What runs beyond them drains first.

    \b
    Example:
      fairlane unsuspend webhooks
    """
    change(lambda on, intent: on.queues.unsuspend(queue, **intent), options)
