"""What declarations are checked with."""

from __future__ import annotations

import math
from datetime import timedelta
from typing import Any

from fairlane.clock import microseconds
from fairlane.errors import ConfigurationError, InvalidPolicy

__all__ = ["as_whole", "duration_above_zero", "is_number", "is_whole"]


def is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: object) -> bool:
    return is_whole(value) or (isinstance(value, float) and math.isfinite(value))


def as_whole(number: float) -> Any:
    """A number that operators may have given with a fraction: 4.0 is 4, and 4.5 is left for its limit to refuse."""
    return int(number) if number == int(number) else number


def duration_above_zero(what: str, name: str, value: timedelta | str | float) -> int:
    """A duration that a policy was given, in microseconds; `what` and `name` say in errors where it stands."""
    try:
        found = microseconds(value)
    except ConfigurationError as error:
        raise InvalidPolicy(f"{what}: {name}: {error}") from None
    if found <= 0:
        raise InvalidPolicy(f"{what}: `{name}` is a time above 0, such as '500ms' or '1m'")
    return found
