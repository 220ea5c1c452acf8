"""What a message carries: which job, and the claim that it was published under."""

from __future__ import annotations

from uuid import UUID

import msgspec

from fairlane.errors import InvalidJob

__all__ = ["HEADER", "Token"]

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
