"""What is checked where an app is declared: keys that can be provided, names of tasks, settings that make sense."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Collection, Iterable
from difflib import get_close_matches
from pathlib import Path
from types import FrameType
from typing import Any

from fairlane.clock import microseconds
from fairlane.errors import ConfigurationError, InvalidPolicy
from fairlane.policy.gates import Limit
from fairlane.policy.keys import BUILT_IN
from fairlane.policy.partitions import checked_width, parse_partition
from fairlane.policy.policy import Policy
from fairlane.task import Duration, KeySource, Task

__all__ = [
    "check_divided_by",
    "check_keys",
    "check_name",
    "check_options",
    "checked_count",
    "checked_size",
    "checked_time",
    "folder_of",
    "is_async",
    "key_source",
    "name_of",
    "names",
    "several",
    "width_of",
]

MOST_KEPT = 1_000_000
"""Finished jobs that can be kept by count: every sweep counts them."""


def check_name(name: str, declared: Collection[str]) -> None:
    """Refuse a queue's name that is taken, or that a partition has or could have."""
    if name in declared:
        raise ConfigurationError(f"queue {name!r} is declared twice; put its whole policy into one declaration")
    if (partition := parse_partition(name)) is not None:
        raise ConfigurationError(
            f"queue {name!r}: names that end in __p and a number belong to partitions; give it another name, or "
            f"declare app.queue({partition[0]!r}, partitions=…), which makes them"
        )


def check_options(what: str, given: Iterable[str], known: Collection[str], remedy: str = "") -> None:
    """Refuse an option that there is not, with the one that is meant, or with the remedy for this name."""
    for name in given:
        if name not in known:
            similar = get_close_matches(name, known, n=1)
            meant = f"did you mean {similar[0]}=?" if similar else remedy.format(name)
            raise ConfigurationError(f"{what}: there is no option {name}=; {meant or 'there are ' + ', '.join(known)}")


def names(given: str | Iterable[str]) -> tuple[str, ...]:
    """One name or several."""
    return (given,) if isinstance(given, str) else tuple(given)


def several(limits: Limit | Iterable[Limit]) -> tuple[Limit, ...]:
    """One limit or several."""
    return tuple(limits) if isinstance(limits, Iterable) else (limits,)


def width_of(queue: str, partitions: object, by: Collection[str], per_partition: Collection[Limit]) -> int:
    """The number of partitions that a queue is declared with. What is said about them needs one."""
    for given, value in (("partition_by", by), ("per_partition", per_partition)):
        if partitions is None and value:
            raise ConfigurationError(
                f"queue {queue!r}: {given}={value!r} is about partitions, and it has none; give partitions=… too "
                "(with partitions=1 it is one queue, which can be divided later), or leave it out"
            )
    return 1 if partitions is None else checked_width(partitions)


def check_keys(policy: Policy, tasks: Iterable[Task[..., Any]]) -> None:
    """Refuse a policy that looks at a key which no task of its queue can provide."""
    listed = list(tasks)
    if not listed:
        return
    scopes: list[tuple[str, tuple[str, ...]]] = [(repr(limit), limit.by) for limit in policy.limits]
    if policy.fair:
        scopes.insert(0, (repr(policy.fair), policy.fair.by))
    scopes.append((f"keys={policy.keys!r}", policy.keys))
    if policy.partition is not None:
        scopes.append((f"partition_by={policy.partition.by!r}", policy.partition.by))
    for what, by in scopes:
        for key in by:
            if key not in BUILT_IN and not any(task.can_provide(key) for task in listed):
                raise InvalidPolicy(
                    f"queue {policy.queue!r}: {what} looks at the key {key!r}, which none of its tasks can provide "
                    f"({', '.join(task.name for task in listed)}); give one of them a parameter {key!r} or keys=…"
                )


def check_divided_by(queue: str, by: Iterable[str], carried: Iterable[str], tasks: Iterable[Task[..., Any]]) -> None:
    """Refuse to divide a queue by a key that its jobs do not carry by its policy, and none of its tasks can provide."""
    listed, known = list(tasks), {*carried}
    for key in by:
        if listed and key not in known and not any(task.can_provide(key) for task in listed):
            for task in listed:
                known.update(task.options.keys if isinstance(task.options.keys, tuple) else task.codec.parameters)
            raise ConfigurationError(
                f"queue {queue!r} cannot be divided by {key!r}: none of its tasks can provide that key; "
                f"they can provide {', '.join(sorted(known)) or 'none'}"
            )


def key_source(keys: KeySource | Iterable[str]) -> KeySource:
    """Where keys come from, in one form: names, a function, or nothing."""
    if keys is None or isinstance(keys, tuple):
        return keys
    if isinstance(keys, str):
        return (keys,)
    return keys if callable(keys) else tuple(keys)


def is_async(function: Callable[..., Any]) -> bool:
    """Whether calling it gives something to await."""
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


def name_of(function: Callable[..., Any]) -> str:
    """`module.qualname`. A script that runs as `__main__` goes by the name that importing it would give it."""
    if not hasattr(function, "__qualname__"):
        raise ConfigurationError(f"{function!r} has no name of its own; give it one: app.task(name=…)")
    module = function.__module__
    if module == "__main__":
        main = sys.modules["__main__"]
        spec = getattr(main, "__spec__", None)
        module = spec.name if spec else Path(getattr(main, "__file__", None) or "__main__").stem
    return f"{module}.{function.__qualname__}"


def checked_size(max_payload: object) -> int:
    """A number of bytes above 0."""
    if isinstance(max_payload, bool) or not isinstance(max_payload, int) or max_payload < 1:
        raise ConfigurationError(f"max_payload={max_payload!r} is not a number of bytes above 0")
    return max_payload


def checked_time(name: str, duration: Duration) -> int:
    """A time of at least 0, in microseconds."""
    try:
        amount = microseconds(duration)
    except ConfigurationError as error:
        raise ConfigurationError(f"{name}: {error}") from None
    if amount < 0:
        raise ConfigurationError(f"{name}={duration!r} is not a time of at least 0")
    return amount


def checked_count(count: object) -> int | None:
    """How many finished jobs are kept at most; `None`: as many as there are."""
    if count is None:
        return None
    if isinstance(count, bool) or not isinstance(count, int) or not 0 <= count <= MOST_KEPT:
        raise ConfigurationError(f"retention_count={count!r} is not a number of jobs from 0 to {MOST_KEPT:,}")
    return count


def folder_of(frame: FrameType | None) -> Path:
    """Where the file lies whose code called this frame."""
    caller = frame.f_back if frame else None
    file = caller.f_globals.get("__file__") if caller else None
    return Path(file).resolve().parent if file else Path.cwd()
