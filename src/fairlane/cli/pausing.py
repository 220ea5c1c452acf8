"""`fairlane pause`, `resume`, `suspend`, `unsuspend`."""

from __future__ import annotations

from typing import Any

import click

from fairlane.cli.changing import change, change_options, key_option, lasting_options
from fairlane.cli.choosing import keys_given

__all__ = ["pause", "resume", "suspend", "unsuspend"]


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
    from fairlane import operations

    named = keys_given(keys)
    change(lambda store, intent: operations.pause(store, queue, intent, keys=named, task=task), options)


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
    from fairlane import operations

    named = keys_given(keys)
    change(lambda store, intent: operations.resume(store, queue, intent, keys=named, task=task), options)


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
    from fairlane import operations

    change(lambda store, intent: operations.suspend(store, queue, intent), options)


@click.command()
@click.argument("queue")
@change_options
def unsuspend(queue: str, **options: Any) -> None:
    """Let the limits of a queue hold again. What runs beyond them drains first.

    \b
    Example:
      fairlane unsuspend webhooks
    """
    from fairlane import operations

    change(lambda store, intent: operations.unsuspend(store, queue, intent), options)
