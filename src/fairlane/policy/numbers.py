"""Numbers that are not the same for every key: given for those that are named, or brought along by jobs.

A number that jobs bring along is declared as a function of their context. Producers evaluate it at enqueue, and the
newest one holds for its key. What is stored of such a declaration is only that it comes from the job: claimers enforce
what was brought, and never call anything.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, StrEnum
from typing import Any, TypeVar

from fairlane.clock import SECOND
from fairlane.errors import InvalidKey, InvalidPolicy
from fairlane.policy.keys import By, canonical_key

T = TypeVar("T")


class Same(Enum):
    """The declared number is that of every key."""

    SAME = "same"


SAME = Same.SAME

Source = Callable[[Mapping[str, Any]], float]
"""Gives the number of a job's key, from the job's context."""


class Origin(StrEnum):
    """Where a number that is in force came from."""

    POLICY = "policy"
    """It is declared."""
    JOB = "job"
    """The newest job of its key brought it along."""
    OVERRIDE = "override"
    """An operator has set it."""
    DEFAULT = "default"
    """Jobs are to bring it along, and none has yet: 1 holds until one does."""

    @property
    def words(self) -> str:
        """As people read it, behind the number; nothing for what the policy declares."""
        return _ORIGINS[self]


_ORIGINS = {
    Origin.POLICY: "",
    Origin.JOB: "from its newest job",
    Origin.OVERRIDE: "set by an operator",
    Origin.DEFAULT: "until a job brings a number",
}


FROM_JOB = {"from": "job"}
"""What is stored in place of a number that jobs bring along."""

UNTIL_BROUGHT = 1
"""What holds for a key none of whose jobs has brought a number: they were enqueued under a policy that did not ask for
one. The least with which they run."""

VALUES_LAST = 30 * 24 * 3_600 * SECOND
"""For how long a gate without jobs keeps the number that was brought to it."""


@dataclass(frozen=True, slots=True)
class FromJob:
    """A number that jobs bring along. Read from a stored policy it has no source, and says the same."""

    source: Source | None = field(default=None, compare=False)

    def __repr__(self) -> str:
        return "<from the job>"


def from_job(number: object) -> FromJob | None:
    """What was given in place of a number, if that is a function of the job's context or stands for one."""
    if isinstance(number, FromJob):
        return number
    if number == FROM_JOB:
        return FromJob()
    return FromJob(number) if callable(number) else None


def number_at(
    named: Mapping[str, float], brought: FromJob | None, values: Sequence[str | None], value: float | None
) -> float | Same | None:
    """The number that holds at one key, where a `value` came in place of what is declared; `None`: none does."""
    if value is not None:
        return value
    if brought is not None:
        return UNTIL_BROUGHT
    if not named:
        return SAME
    return None if values[0] is None else named.get(values[0])


def named_numbers(what: str, by: By, given: Mapping[Any, Any], checked: Callable[[object], T]) -> dict[str, T]:
    """A number for each key that is named, in canonical form; `what` names the policy in errors."""
    if len(by) != 1:
        raise InvalidPolicy(f"{what}: numbers for named keys need a single key in `by`")
    if not given:
        raise InvalidPolicy(f"{what}: it names no key, so it would hold for none; name some, or leave it out")
    numbers: dict[str, T] = {}
    for value, number in given.items():
        try:
            key = canonical_key(by[0], value)
        except InvalidKey as error:
            raise InvalidPolicy(f"{what}: {error}") from None
        if key is None:
            raise InvalidPolicy(f"{what}: None cannot be named; it is what jobs without a value share")
        if key in numbers:
            raise InvalidPolicy(f"{what}: the number of {key!r} is given twice")
        numbers[key] = checked(number)
    return numbers
