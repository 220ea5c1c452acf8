"""Numbers that are not the same for every key."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from fairlane.errors import InvalidKey, InvalidPolicy
from fairlane.policy.by import By
from fairlane.policy.keys import canonical_key

__all__ = ["named_numbers"]

T = TypeVar("T")


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
