"""The command line. Whatever is slow to import is imported by the command that needs it."""

from fairlane.cli.program import main

__all__ = ["main"]
