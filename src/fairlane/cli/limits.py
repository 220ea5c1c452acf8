"""`fairlane limit`, `weight`, `boost`, `pause`, `suspend` and `overrides`: what operators change, and what is set."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import click
from rich.text import Text

from fairlane.cli.changes import changes, override_lines
from fairlane.cli.options import LookingGroup, json_option, key_option, place_options
from fairlane.cli.output import ago, columns, look_now, show
from fairlane.clock import Instant
from fairlane.operations import LimitInForce, Operations, OverrideInForce, document_of

LIMIT = click.argument("limit")
KEYS = key_option("keys", "Only this key; repeat to combine several.")
TASK = click.option("--task", help="Only of this task.")


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
@changes("limits.set", LIMIT, click.argument("value", metavar="NUMBER", type=float), KEYS, lasts=True)
def set_limit() -> None:
    """Give a limit another number for one key; for the whole queue if that is its scope.

    In force at every worker's next claim. A lower number preempts nothing: what runs drains first. To change a limit
    for every key, change the code and run `fairlane policy apply`.

    \b
    Example:
      fairlane limit set webhooks concurrency:account 20 --key account=acme
      fairlane limit set webhooks rate/1m:endpoint 10 --key endpoint=api.acme.com --until 2030-01-31T08:00
    """


@limit.command("clear")
@changes("limits.clear", LIMIT, KEYS)
def clear_limit() -> None:
    """Let a key have the number again that the policy declares.

    \b
    Example:
      fairlane limit clear webhooks concurrency:account --key account=acme
    """


@limit.command("list")
@click.argument("queue", required=False)
@place_options
@json_option("a JSON array")
def list_limits(queue: str | None, **given: Any) -> None:
    """List the limits of a queue, or of all: what the policy declares, what is in force, and who changed it.

    \b
    Example:
      fairlane limit list
      fairlane limit list webhooks --json
    """

    def draw(found: list[tuple[str, LimitInForce]], width: int) -> list[Text]:
        if not found:
            return [Text("no queue has a limit" if queue is None else f"queue {queue!r} has no limit")]
        first = 0 if queue is None else 1
        headings = ("QUEUE", "LIMIT", "KEY", "DECLARED", "IN FORCE", "SET BY", "ENDS", "REASON")[first:]
        rows = [_row(name, each, now)[first:] for name, each in found]
        return columns(headings, rows, width, flexible=("QUEUE", "KEY", "SET BY", "REASON"))

    found, now = look_now(lambda operations: _limits_by_queue(operations, queue), given)
    show(found, draw, given, lambda found: [{"queue": name, **document_of(each)} for name, each in found])


async def _limits_by_queue(operations: Operations, queue: str | None) -> list[tuple[str, LimitInForce]]:
    known = [each.queue for each in await operations.policies.show() if each.policy is not None]
    names = known if queue is None else [queue]
    return [(name, each) for name in names for each in await operations.limits.list(name)]


def _row(queue: str, limit: LimitInForce, now: Instant) -> tuple[str, ...]:
    keys = " ".join(f"{name}={value}" for name, value in limit.scope)
    everyone = "each partition" if limit.is_per_partition else "the whole queue"
    if limit.declared.by:
        everyone = "every key, by partition" if limit.is_per_partition else "every key"
    override = limit.override
    return (
        queue,
        limit.name.removesuffix(":"),
        keys or everyone,
        repr(limit.declared),
        "suspended" if limit.is_suspended else repr(limit.in_force),
        *((override.set_by, ago(override.expires_at, now), override.reason) if override else ("", "", "")),
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
@changes("weights.set", click.argument("weight", metavar="NUMBER", type=float), KEYS, lasts=True)
def set_weight() -> None:
    """Give a key another weight than the policy declares.

    \b
    Example:
      fairlane weight set webhooks 3 --key account=acme --reason "a larger plan"
    """


@weight.command("clear")
@changes("weights.clear", KEYS)
def clear_weight() -> None:
    """Let a key have the weight again that the policy declares, and no boost.

    \b
    Example:
      fairlane weight clear webhooks --key account=acme
    """


@click.command()
@changes(
    "weights.boost",
    KEYS,
    click.option("--by", "factor", type=float, required=True, help="Multiply its weight by this factor."),
    lasts=True,
)
def boost() -> None:
    """Multiply the weight of a key, for a while. Limits hold all the same.

    \b
    Example:
      fairlane boost webhooks --key account=acme --by 4 --for 30m
    """


@click.command()
@click.argument("queue", required=False)
@place_options
@json_option("a JSON array")
def overrides(queue: str | None, **given: Any) -> None:
    """List what operators have set, of one queue or of all.

    These are pauses, limits, weights and suspensions. One that the policy in force has no place for has no effect, and
    says so.

    \b
    Example:
      fairlane overrides
      fairlane overrides webhooks --json
    """

    def draw(found: list[OverrideInForce], width: int) -> Iterable[str]:
        return override_lines(found, now) if found else ["nothing is overridden"]

    found, now = look_now(lambda operations: operations.overrides.list(queue), given)
    show(found, draw, given, document_of)


@click.command()
@changes("queues.pause", KEYS, TASK, lasts=True)
def pause() -> None:
    """Start nothing more of a queue, of a key or of a task.

    What runs goes on. Every worker obeys at its next claim, and keys that are first seen later are covered.

    \b
    Example:
      fairlane pause webhooks --reason "the vendor is down" --for 1h
      fairlane pause webhooks --key account=acme
      fairlane pause webhooks --task shop.deliver --dry-run
    """


@click.command()
@changes("queues.resume", KEYS, TASK)
def resume() -> None:
    """End a pause: the one of exactly this queue, key or task. Who waited starts at once.

    \b
    Example:
      fairlane resume webhooks
      fairlane resume webhooks --key account=acme
    """


@click.command()
@changes("queues.suspend", lasts=True)
def suspend() -> None:
    """Let no limit of a queue hold anything back, for an emergency.

    The limits go on counting, so that they hold exactly when they come back. Pauses and turns stay.

    \b
    Example:
      fairlane suspend webhooks --for 10m --reason "drain before the maintenance"
    """


@click.command()
@changes("queues.unsuspend")
def unsuspend() -> None:
    """Let the limits of a queue hold again. What runs beyond them drains first.

    \b
    Example:
      fairlane unsuspend webhooks
    """
