"""What is published for a claimed job: the message, what it carries, and the token by which its job is adopted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from uuid import UUID

import msgspec

from fairlane.errors import FairlaneError, InvalidJob
from fairlane.job import ENGINES_MESSAGE, stored_in, told_in, trace_of


class Unpublishable(FairlaneError):
    """This one message cannot be published, today or tomorrow: its job dies. Any other error is the broker's."""


class Message(msgspec.Struct, frozen=True):
    """One claimed job on its way to the engine."""

    token: Token
    task: str
    """The name of the Fairlane task."""
    target: Any
    """The engine's own task."""
    queue: str | None
    """The engine's queue, where the forwarder names one for the job's; else the engine itself chooses."""
    args: Sequence[Any]
    """Plain JSON values, for the engine's tools: the function gets what is stored with the job. Empty if hidden."""
    kwargs: Mapping[str, Any]
    is_hidden: bool
    """The arguments are left out of the message: they are stored encrypted, or the forwarder was told to."""
    priority: int
    """Fairlane's, from -100 to 100; 0 is as good as none."""
    attempt: int
    headers: Mapping[str, Any] = {}
    """What the producer gave along for the engine's worker."""
    own: str | None = None
    """The message that the engine itself wrote for a routed call, as its forwarder stored it."""
    retries: int = 0
    """How often the engine has retried it before."""

    @property
    def id(self) -> UUID:
        """The job's: the engine's message has the same id, where an engine lets one choose it."""
        return self.token.job

    @property
    def carried(self) -> dict[str, Any]:
        """All headers, with the token among them."""
        return {**self.headers, HEADER: str(self.token)}


class Carried(msgspec.Struct, frozen=True):
    """What a job brings along for its message besides its arguments."""

    headers: Mapping[str, Any] = {}
    own: str | None = None
    retries: int = 0


def as_carried(context: str | None, retries: int) -> Carried:
    """What a job's message carries, from its context as it is stored: what its producer said in
    `context={"headers": {…}}`, the span that it was enqueued in, and the engine's own message of a routed call."""
    if context is None:
        return Carried(retries=retries)
    headers = told_in(context).get("headers")
    own = stored_in(context).get(ENGINES_MESSAGE)
    return Carried(
        {**(headers if isinstance(headers, dict) else {}), **(trace_of(context) or {})},
        own if isinstance(own, str) else None,
        retries,
    )


HEADER = "fairlane"
"""The name under which the token travels: a header, an option, a label."""


class Token(msgspec.Struct, frozen=True):
    """A job and a lease of it. Of all messages with one token, the first to be delivered runs."""

    job: UUID
    lease: UUID

    def __str__(self) -> str:
        return f"{self.job}/{self.lease}"

    @classmethod
    def parse(cls, text: object) -> Token:
        """The token that was written so, or `InvalidJob`."""
        job, _, lease = str(text).partition("/")
        try:
            return cls(UUID(job), UUID(lease))
        except ValueError:
            raise InvalidJob(
                f"{str(text)[:80]!r} is not the token of a forwarded job: its message was written by others"
            ) from None
