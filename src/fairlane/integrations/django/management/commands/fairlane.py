"""`manage.py fairlane …`: the commands of the `fairlane` program, on the app of this project."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import click
from django.core.management.base import BaseCommand, CommandParser

from fairlane.cli.program import program

APP = "fairlane.integrations.django:app"
DJANGO_OPTIONS = ("--settings", "--pythonpath")


class Command(BaseCommand):
    """Options of Django come before the command of Fairlane, and options of Fairlane after it."""

    help = (
        "Run a command of Fairlane on the queues of this project: worker, status, explain, jobs, doctor, … "
        "Without a command, all are listed; `manage.py fairlane worker --help` is about one."
    )
    requires_system_checks: Sequence[str] = ()

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument(
            "arguments", nargs=argparse.REMAINDER, metavar="COMMAND …", help="a command of Fairlane, with its options"
        )

    def handle(self, *given: str, arguments: Sequence[str] = (), **options: Any) -> None:
        words = list(_without_django_options([*given, *arguments]))
        _let_children_import()
        with self._writing():
            try:
                program.main(args=_with_app(words) or ["--help"], prog_name="manage.py fairlane")
            except SystemExit as end:
                if end.code:
                    raise

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        """Write to the `stdout` that `call_command` was given."""
        if self.stdout._out is sys.stdout:
            yield
        else:
            with contextlib.redirect_stdout(self.stdout):
                yield


def _with_app(words: Sequence[str]) -> list[str]:
    """The words, with the app where the command takes it, unless a database is named."""
    command: click.Command = program
    depth = 0
    while isinstance(command, click.Group) and depth < len(words) and words[depth] in command.commands:
        command = command.commands[words[depth]]
        depth += 1
    place = next((each for each in command.params if each.name == "app"), None)
    if place is None or any(word.split("=")[0] in ("--url", "--app", "--help", "-h") for word in words[depth:]):
        return list(words)
    named = [APP] if isinstance(place, click.Argument) else ["--app", APP]
    return [*words[:depth], *named, *words[depth:]]


def _without_django_options(words: Sequence[str]) -> Iterator[str]:
    """Leave out options of Django, which it has already read."""
    coming = iter(words)
    for word in coming:
        if word in DJANGO_OPTIONS:
            next(coming, None)
        elif word.split("=")[0] not in DJANGO_OPTIONS:
            yield word


def _let_children_import() -> None:
    """Let worker processes, which are programs of their own, import what this process can."""
    here = os.path.dirname(os.path.abspath(sys.argv[0]))
    found = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    if os.path.basename(sys.argv[0]) == "manage.py" and here not in found:
        os.environ["PYTHONPATH"] = os.pathsep.join([here, *filter(None, found)])
