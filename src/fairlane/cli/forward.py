"""`fairlane forward`."""

from __future__ import annotations

import os
from typing import Any

import click

from fairlane.cli.database import find_modules_here, load_object
from fairlane.cli.worker import (
    end_well_when_stopped_early,
    log_to_stderr,
    logging_options,
    metrics_options,
    queue_shares,
)
from fairlane.forward import Forwarder
from fairlane.forward.dispatcher import Dispatching
from fairlane.worker import WorkerOptions, run_worker


@click.command()
@click.argument("forwarder", metavar="MODULE:FORWARDER")
@click.option("--queues", help="Which queues to dispatch, with weights.  [default: all of the forwarder]")
@click.option("--concurrency", type=int, default=16, help="Concurrent publishes.")
@click.option("--lease", default="30s", help="How long a job that has not begun is held without a heartbeat.")
@click.option("--drain-timeout", default="30s", help="How long publishing may go on after SIGTERM.")
@click.option("--name", help="Display name of this dispatcher.  [default: host:pid]")
@metrics_options
@logging_options
def forward(forwarder: str, queues: str | None, log_level: str, log_format: str, **options: Any) -> None:
    """Run the jobs of an app on Celery, Dramatiq or Taskiq.

    Claims jobs under their policy and publishes a message for each, which the engine's own workers run. Run as many of
    these as you like. SIGTERM or Ctrl-C: claims nothing more; what is published is left to its messages.

    \b
    Example:
      fairlane forward shop:forwarder
      fairlane forward shop:forwarder --queues emails,webhooks=2 --lease 10s
    """
    end_well_when_stopped_early()
    log_to_stderr(log_level, log_format, options["name"])
    loaded = load_forwarder(forwarder)
    loaded.prepare()
    own = sorted({each.task.queue for each in loaded.forwarded.values()})  # the app may have other forwarders
    served = queue_shares(queues, (), own) if own else ()
    raise SystemExit(run_worker(Dispatching(loaded), WorkerOptions(queues=served, **options)))


def load_forwarder(place: str) -> Forwarder:
    """The forwarder that `place` names. `shop` alone stands for `shop:forwarder`."""
    find_modules_here()
    _set_up_django()  # its models can be imported only then
    found = load_object(place, "forwarder", Forwarder)  # type: ignore[type-abstract]  # never called
    _set_up_django()  # a module such as Celery's in a project says itself which settings hold
    return found


def _set_up_django() -> None:
    """What a program that is no command of Django's has to do where the environment names a project."""
    if not os.environ.get("DJANGO_SETTINGS_MODULE"):
        return
    try:
        from django.apps import apps  # a project may have no Django

        import django
    except ImportError:
        return  # an environment that was meant for others
    if not apps.ready:
        django.setup()
