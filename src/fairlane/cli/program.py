"""The `fairlane` program: its commands, and how their errors look."""

from __future__ import annotations

import json
from collections.abc import Sequence
from importlib.metadata import version as installed_version
from typing import Any

import click

from fairlane.cli.audit import audit
from fairlane.cli.dashboard import dashboard
from fairlane.cli.dead import dead
from fairlane.cli.demo import demo
from fairlane.cli.doctor import doctor
from fairlane.cli.enqueue import enqueue
from fairlane.cli.explain import explain
from fairlane.cli.forward import forward
from fairlane.cli.jobs import jobs
from fairlane.cli.keys import keys
from fairlane.cli.limits import boost, limit, overrides, pause, resume, suspend, unsuspend, weight
from fairlane.cli.migrate import grants, migrate
from fairlane.cli.partition import partition
from fairlane.cli.policy import policy
from fairlane.cli.queues import queues
from fairlane.cli.schedules import schedules
from fairlane.cli.simulate import simulate
from fairlane.cli.status import status
from fairlane.cli.top import top
from fairlane.cli.worker import worker
from fairlane.cli.workers import workers
from fairlane.errors import FairlaneError
from fairlane.redaction import indented, without_secrets


class Program(click.Group):
    """Says in one line what went wrong. A traceback is for errors that nobody foresaw."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except FairlaneError as error:
            raise click.ClickException(without_secrets(indented(str(error), ""))) from error


@click.group(cls=Program, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(package_name="fairlane", message="%(version)s")
def program() -> None:
    """Fairlane: a durable job queue in which every tenant gets its turn.

    \b
    Example:
      fairlane demo
      fairlane worker shop:app --queues webhooks,email=2 --concurrency 20
    """


@program.command()
@click.option("--json", "as_json", is_flag=True, help="Print a JSON object.")
def version(as_json: bool) -> None:
    """Print the version of Fairlane and of Python.

    \b
    Example:
      fairlane version
    """
    import platform

    found = {"fairlane": installed_version("fairlane"), "python": platform.python_version()}
    click.echo(json.dumps(found) if as_json else f"fairlane {found['fairlane']} (Python {found['python']})")


_IN_A_LINE = {
    "audit": "List what operators did, newest first.",
    "dashboard": "Serve the dashboard.",
    "demo": "Watch tenants share a queue, in a minute.",
    "doctor": "Find what is wrong, and what to do.",
    "explain": "Say why a job, a key or a queue waits.",
    "forward": "Run jobs on Celery, Dramatiq or Taskiq.",
    "grants": "Print the SQL for each role's rights.",
    "keys": "List the keys of a queue, or show one.",
    "limit": "List limits, or change one for a key.",
    "overrides": "List what operators have set.",
    "partition": "Change a queue's number of partitions.",
    "pause": "Pause a queue, a key or a task.",
    "policy": "Show, compare and apply policies.",
    "queues": "List the queues, or show one.",
    "resume": "End a pause.",
    "status": "Say whether work flows, who waits and why.",
    "suspend": "Suspend all limits of a queue.",
    "top": "Watch the busiest keys.",
    "unsuspend": "Let the limits of a queue hold again.",
    "version": "Print the version.",
    "weight": "Change the share of a key.",
    "workers": "List the workers.",
}
"""What the list of commands says where the first sentence of the help is too long for a terminal of 80 columns."""


for command in (
    audit,
    boost,
    dashboard,
    dead,
    demo,
    doctor,
    enqueue,
    explain,
    forward,
    grants,
    jobs,
    keys,
    limit,
    migrate,
    overrides,
    partition,
    pause,
    policy,
    queues,
    resume,
    schedules,
    simulate,
    status,
    suspend,
    top,
    unsuspend,
    weight,
    worker,
    workers,
):
    program.add_command(command)
for name, line in _IN_A_LINE.items():
    program.commands[name].short_help = line


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command and exit with its status."""
    program.main(args=arguments, prog_name="fairlane")
