"""What the sections of `app.operations` share: the store, the options of changes, and the audience."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Protocol, TypedDict

from fairlane.clock import Clock, Instant, as_instant, duration_of
from fairlane.errors import ConfigurationError
from fairlane.policy.policy import Policy
from fairlane.redaction import Audience, Redact, Redactor, Surface
from fairlane.store.audit import Note
from fairlane.store.boards import QueueTime
from fairlane.store.protocol import Store

Duration = timedelta | str | float
KeyValues = Mapping[str, object]
OnProgress = Callable[[int], None]
LONGEST_TEXT = 1_000
PROGRAM = Audience(Surface.PROGRAM)
LATEST = as_instant(datetime.max.replace(tzinfo=UTC))


class OperationsSource(Protocol):
    """What operations ask of their app."""

    clock: Clock

    async def opened(self) -> Store: ...

    @property
    def forwarded(self) -> Collection[str] | None:
        """The queues that the app leaves to an engine; `None`: no app is at hand."""
        ...

    @property
    def declared_policies(self) -> Mapping[str, Policy]: ...

    @property
    def actor(self) -> str: ...

    @property
    def redact(self) -> Redact | None: ...

    def known_tasks(self) -> list[str]: ...


class ChangeOptions(TypedDict, total=False):
    """What every change takes besides: `reason=""`, `actor=None` (FAIRLANE_ACTOR, else user@host), `dry_run=False`."""

    reason: str
    actor: str | None
    dry_run: bool


class TimedOptions(ChangeOptions, total=False):
    """Options of a change that may end by itself."""

    expires_in: Duration | None
    expires_at: datetime | None


class BulkOptions(ChangeOptions, total=False):
    """Options of a change of many jobs."""

    limit: int
    on_progress: OnProgress | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Intent:
    """The actor of a change, the reason, when it ends, and whether it is a dry run."""

    actor: str
    reason: str = ""
    expires_in: Duration | None = None
    expires_at: datetime | None = None
    dry_run: bool = False

    def __post_init__(self) -> None:
        if not self.actor.strip():
            raise ConfigurationError("a change is recorded with an actor, and none is given; set FAIRLANE_ACTOR")
        for name, text in (("actor", self.actor), ("reason", self.reason)):
            if len(text) > LONGEST_TEXT or "\0" in text:
                raise ConfigurationError(f"{name}: give at most {LONGEST_TEXT:,} characters, and no NUL")
        if self.expires_in is not None and self.expires_at is not None:
            raise ConfigurationError("give how long it lasts or when it ends, not both")

    def note(self, action: str) -> Note:
        return Note(actor=self.actor, action=action, reason=self.reason)

    def ends_at(self, time: QueueTime) -> Instant | None:
        """When the change ends by itself, in queue time; `None`: it does not."""
        at = None
        if self.expires_in is not None:
            at = time.now + duration_of("expires_in", self.expires_in)
        elif self.expires_at is not None:
            try:
                at = as_instant(self.expires_at) + time.ahead  # a time of day goes by the wall clock
            except ConfigurationError as error:
                raise ConfigurationError(f"expires_at: {error}") from None
        if at is not None and at <= time.now:
            raise ConfigurationError(
                "it would have ended already (expires_in, expires_at); give a time to come, or leave it out"
            )
        if at is not None and at > LATEST:
            raise ConfigurationError("it would end after the year 9999; leave the time out, and it ends with somebody")
        return at


class Section:
    """One noun of `app.operations`, such as `app.operations.jobs`."""

    def __init__(self, source: OperationsSource, audience: Audience = PROGRAM, rules: tuple[Redact, ...] = ()) -> None:
        self._source = source
        self._audience = audience
        self._rules = rules

    async def _store(self) -> Store:
        return await self._source.opened()

    @property
    def _redactor(self) -> Redactor | None:
        own = () if self._source.redact is None else (self._source.redact,)
        return Redactor((*own, *self._rules), self._audience) if own or self._rules else None

    def _intent(
        self,
        *,
        actor: str | None = None,
        reason: str = "",
        dry_run: bool = False,
        expires_in: Duration | None = None,
        expires_at: datetime | None = None,
    ) -> Intent:
        who = self._source.actor if actor is None else actor
        return Intent(actor=who, reason=reason, dry_run=dry_run, expires_in=expires_in, expires_at=expires_at)
