"""What is published for a claimed job: the message, what it carries, and the token that its job is adopted by."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from uuid import UUID

import msgspec

from fairlane.errors import FairlaneError, InvalidJob
from fairlane.job import ENGINES_MESSAGE, given_context, stored_in, trace_of


class Unpublishable(FairlaneError):
    """This message can never be published: its job dies. Any other error is a refusal of the broker."""


class Message(msgspec.Struct, frozen=True):
    """One claimed job on its way to the engine."""

    token: Token
    task: str
    """The name of the Fairlane task."""
    target: Any
    """The engine's own task."""
    queue: str | None
    """The engine's queue, if the forwarder maps the job's queue to one; otherwise the engine chooses."""
    args: Sequence[Any]
    """Plain JSON values, for the engine's tools; the function gets what is stored with the job. Empty if hidden."""
    kwargs: Mapping[str, Any]
    is_hidden: bool
    """Whether the arguments are left out of the message: they are stored encrypted, or the forwarder hides them."""
    priority: int
    """Fairlane's priority, from -100 to 100; 0 means none."""
    attempt: int
    headers: Mapping[str, Any] = {}
    """Headers from the producer, for the engine's worker."""
    own: str | None = None
    """The message that the engine wrote for a routed call, as its forwarder stored it."""
    retries: int = 0
    """How often the engine has retried it so far."""

    @property
    def id(self) -> UUID:
        """The id of the job. The engine's message has the same id, if the engine lets us choose it."""
        return self.token.job

    @property
    def carried(self) -> dict[str, Any]:
        """All headers, the token included."""
        return {**self.headers, HEADER: str(self.token)}


class Carried(msgspec.Struct, frozen=True):
    """What the message of a job carries besides the arguments."""

    headers: Mapping[str, Any] = {}
    own: str | None = None
    retries: int = 0


def as_carried(context: str | None, retries: int) -> Carried:
    """What the message of a job carries, from its stored context: the headers in `context={"headers": {…}}`, the span
    that it was enqueued in, and, for a routed call, the engine's own message."""
    if context is None:
        return Carried(retries=retries)
    headers = given_context(context).get("headers")
    own = stored_in(context).get(ENGINES_MESSAGE)
    return Carried(
        {**(headers if isinstance(headers, dict) else {}), **(trace_of(context) or {})},
        own if isinstance(own, str) else None,
        retries,
    )


HEADER = "fairlane"
"""The name of the header, option or label that carries the token."""


class Token(msgspec.Struct, frozen=True):
    """A job and its lease. Of all messages with the same token, the first to be delivered runs."""

    job: UUID
    lease: UUID

    def __str__(self) -> str:
        return f"{self.job}/{self.lease}"

    @classmethod
    def parse(cls, text: object) -> Token:
        """The token in this text, or `InvalidJob`."""
        job, _, lease = str(text).partition("/")
        try:
            return cls(UUID(job), UUID(lease))
        except ValueError:
            raise InvalidJob(
                f"{str(text)[:80]!r} is not the token of a forwarded job: its message was written by others"
            ) from None
