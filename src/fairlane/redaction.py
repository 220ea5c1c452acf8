"""What may be seen of what jobs carry: obvious secrets are taken out of every error, and an app may say more.

`without_secrets` knows what a secret looks like (see `secret_text`). It is applied where an error becomes text, before
that is stored, logged or sent anywhere. What it cannot know, `App(redact=…)` can.
"""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any

from fairlane.job import Claim, JobRecord
from fairlane.secret_text import MASK, without_secrets

__all__ = [
    "HIDDEN",
    "MASK",
    "Audience",
    "Disclosure",
    "Part",
    "Redact",
    "Redactor",
    "Surface",
    "error_text",
    "without_secrets",
]

log = logging.getLogger("fairlane.redaction")

HIDDEN = "(hidden: redact failed, and the log says why)"


def error_text(error: BaseException) -> str:
    """An error in a line, as it may be stored, logged and shown."""
    return without_secrets(f"{type(error).__name__}: {error}")


class Surface(Enum):
    """Where something is about to be seen."""

    WORKER = "worker"
    """Before it is stored: what is seen here is stored, logged, and sent with events and spans."""
    PROGRAM = "program"
    """By a program, through `app.operations`."""
    CLI = "cli"
    EXPORT = "export"
    DASHBOARD = "dashboard"
    API = "api"

    def __str__(self) -> str:
        return self.value


class Part(Enum):
    """What of a job is about to be seen."""

    CALL = "call"
    """`[arguments, named arguments]`, as JSON."""
    RESULT = "result"
    ERROR = "error"
    """Text: a line, then the traceback."""

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True, slots=True)
class Audience:
    """Who is about to see something, and where."""

    surface: Surface
    viewer: str | None = None
    """The name that the audit would have; `None`: nobody in particular."""
    role: str | None = None
    """`viewer` or `operator`, where the surface knows roles."""


@dataclass(frozen=True, slots=True)
class Disclosure:
    """What `redact` is told about a value: which part of which job it is, and who is about to see it."""

    part: Part
    job: JobRecord | Claim
    """A `Claim` where it has just run, else a `JobRecord`. Both have an `id`, `task`, `queue` and `keys`."""
    audience: Audience

    @property
    def surface(self) -> Surface:
        return self.audience.surface

    @property
    def viewer(self) -> str | None:
        return self.audience.viewer

    @property
    def role(self) -> str | None:
        return self.audience.role


Redact = Callable[[Any, Disclosure], Any]
"""Given a value and what it is about: what of it may be seen. Of an error that is text."""


@dataclass(frozen=True, slots=True)
class Redactor:
    """The rules of an app and of its dashboard, for one audience."""

    rules: tuple[Redact, ...]
    audience: Audience

    def shown(self, part: Part, value: Any, job: JobRecord | Claim) -> Any:
        """What may be seen. Where that cannot be said, it is nothing."""
        if value is None:
            return None
        disclosure = Disclosure(part, job, self.audience)
        try:
            for rule in self.rules:
                value = rule(value, disclosure)
            return value
        except Exception as error:
            # What it failed on may be the secret itself: where it failed is told, and not of what.
            where = "".join(traceback.format_tb(error.__traceback__)[1:]).strip()
            log.error("redact failed for job %s: %s at %s", job.id, type(error).__name__, where)
            return HIDDEN

    def error(self, text: str | None, job: JobRecord | Claim) -> str | None:
        """An error as it may be seen."""
        shown = self.shown(Part.ERROR, text, job)
        return None if shown is None else without_secrets(str(shown))
