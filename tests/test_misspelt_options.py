"""A misspelt keyword of any public callable is refused with the one that is meant."""

from __future__ import annotations

import inspect
import re

import msgspec
import pytest

from fairlane.errors import ConfigurationError
from tests.test_wrong_values import GROUPS, PURE, Row, _made, answered, opened

NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
LEFT = {
    **dict.fromkeys(("Cancel", "Dead", "Retry", "Snooze"), "what parameters are checked with is built on their module"),
    **dict.fromkeys(("JobContext.ack", "JobContext.ack_sync", "JobContext.progress_sync"), "called for every job"),
    "Policy": "app.queue(…) makes it",
    "in_memory": "a context manager",
}
ALL = {name: row for group in (PURE, *GROUPS.values()) for name, row in group.items()}


def option_of(row: Row) -> str | None:
    """An option that it has; `None` where others are keys or arguments of a task, or a struct takes them."""
    parameters = inspect.signature(row.of).parameters.values()
    if any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters):
        return None
    if inspect.isclass(row.of) and issubclass(row.of, msgspec.Struct):
        return None
    options = (each.name for each in parameters if each.kind in NAMED and each.default is not each.empty)
    return next(options, None)


@pytest.mark.parametrize("name", [name for name, row in ALL.items() if option_of(row) is not None and name not in LEFT])
async def test_a_misspelt_keyword_is_refused_with_the_one_that_is_meant(name: str) -> None:
    row = ALL[name]
    option = option_of(row)
    assert option is not None
    async with opened("sqlite://") as world:
        await world.more_claims()
        good = {each: _made(argument, world) for each, argument in row.good.items() if each != option}
        called = name.lower() if name in GROUPS["operating"] else name.rpartition(".")[2].removesuffix("_sync")
        told = f"{called}: there is no option {option}_=; did you mean {option}=?"
        with pytest.raises(ConfigurationError, match=f"^{re.escape(told)}$"):
            await answered(row.call(world), {**good, f"{option}_": None}, None)
