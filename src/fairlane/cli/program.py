"""The `fairlane` program: its commands, and how their errors look."""

from __future__ import annotations

import json
import platform
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from importlib.metadata import version as installed_version
from typing import Any

import click

from fairlane.errors import FairlaneError
from fairlane.redaction import indented, without_secrets

SECTIONS = {
    "Run": {
        "worker": ("worker:worker", "Run the jobs of an app."),
        "forward": ("forward:forward", "Run the jobs of an app on Celery, Dramatiq or Taskiq."),
        "dashboard": ("dashboard:dashboard", "Serve the dashboard."),
    },
    "Look": {
        "status": ("views:status", "Say whether work flows, who waits and why, and what to do."),
        "top": ("views:top", "Watch the keys of a queue, or of the busiest queues."),
        "queues": ("views:queues", "List the queues, or show one."),
        "keys": ("views:keys", "List the keys of a queue, or show one."),
        "workers": ("views:workers", "List the workers: slots in use, what they serve, when last seen."),
        "explain": ("explain:explain", "Say why a job, a key or a queue waits."),
        "doctor": ("doctor:doctor", "Look for what is wrong, and say what to do."),
        "audit": ("audit:audit", "List what operators did, newest first: who, when, what and why."),
    },
    "Act": {
        "pause": ("limits:pause", "Start nothing more of a queue, of a key or of a task."),
        "resume": ("limits:resume", "End a pause: the one of exactly this queue, key or task."),
        "limit": ("limits:limit", "Change a limit for single keys, and see what is in force."),
        "weight": ("limits:weight", "Change how large the share of a key is."),
        "boost": ("limits:boost", "Multiply the weight of a key, for a while."),
        "suspend": ("limits:suspend", "Let no limit of a queue hold anything back, for an emergency."),
        "unsuspend": ("limits:unsuspend", "Let the limits of a queue hold again."),
        "overrides": ("limits:overrides", "List what operators have set, of one queue or of all."),
    },
    "Jobs": {
        "enqueue": ("enqueue:enqueue", "Store one job of a task."),
        "jobs": ("jobs:jobs", "List jobs, or show, export, cancel and hurry them."),
        "dead": ("jobs:dead", "List dead jobs, put them back, or remove them."),
        "schedules": ("schedules:schedules", "List schedules, or pause, resume and trigger them."),
    },
    "Policies": {
        "policy": ("policy:policy", "Show the policies in force, or compare and apply an app's own."),
        "simulate": ("simulate:simulate", "Try a policy, or two, on a virtual clock."),
        "partition": ("partition:partition", "Change the number of a queue's partitions while it works."),
    },
    "Set up": {
        "migrate": ("migrate:migrate", "Bring a database's schema up to date."),
        "grants": ("migrate:grants", "Print the SQL for each role's rights."),
        "demo": ("demo:demo", "See every tenant of a queue get its turn, in under a minute."),
        "version": ("program:version", "Print the version of Fairlane and of Python."),
    },
}
"""Every command: its place in this package, and the first sentence of its help."""
COMMANDS = {name: entry for section in SECTIONS.values() for name, entry in section.items()}


class _Imported(Mapping[str, click.Command]):
    """The commands by name. Each is imported when it is asked for: the list of them must not wait for them all."""

    def __getitem__(self, name: str) -> click.Command:
        module, _, found = COMMANDS[name][0].partition(":")
        command: click.Command = getattr(import_module(f"fairlane.cli.{module}"), found)
        return command

    def __iter__(self) -> Iterator[str]:
        return iter(COMMANDS)

    def __len__(self) -> int:
        return len(COMMANDS)


class Program(click.Group):
    """Says in one line what went wrong. A traceback is for errors that nobody foresaw."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except FairlaneError as error:
            raise click.ClickException(without_secrets(indented(str(error), ""))) from error

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        width = max(map(len, COMMANDS))
        for title, section in SECTIONS.items():
            with formatter.section(title):
                formatter.write_dl([(f"{name:<{width}}", summary) for name, (_, summary) in section.items()])


@click.group(
    cls=Program,
    commands=_Imported(),
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100, "show_default": True},
)
@click.version_option(package_name="fairlane", message="%(version)s")
def program() -> None:
    """Fairlane: a durable job queue in which every tenant gets its turn.

    \b
    Example:
      fairlane demo
      fairlane worker shop:app --queues webhooks,email=2 --concurrency 20
    """


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print a JSON object.")
def version(as_json: bool) -> None:
    """Print the version of Fairlane and of Python.

    \b
    Example:
      fairlane version
    """
    found = {"fairlane": installed_version("fairlane"), "python": platform.python_version()}
    click.echo(json.dumps(found) if as_json else f"fairlane {found['fairlane']} (Python {found['python']})")


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command and exit with its status."""
    program.main(args=arguments, prog_name="fairlane")
