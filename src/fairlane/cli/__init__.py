"""The command line: a module for each command, imported when that is called."""

from fairlane.cli.program import main

__all__ = ["main"]
