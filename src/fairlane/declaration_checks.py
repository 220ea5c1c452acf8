"""Checks of declarations: names of queues and tasks, keys that tasks can provide, and settings of an app."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from types import FrameType
from typing import Any

from fairlane import parameters
from fairlane.clock import duration_of
from fairlane.errors import ConfigurationError, InvalidPolicy
from fairlane.parameters import is_storable, shown
from fairlane.policy.keys import BUILT_IN, MAX_KEY_BYTES, NAME, normalize_by
from fairlane.policy.limits import Limit
from fairlane.policy.partitions import checked_width, parse_partition
from fairlane.policy.policy import Policy
from fairlane.task import Duration, KeySource, Task

_QUEUE_NAME = re.compile(rf"{NAME}\Z")


def check_name(name: str, declared: Collection[str]) -> None:
    """Refuse a queue name that is taken, or that could be the name of a partition."""
    if name in declared:
        raise ConfigurationError(f"queue {name!r} is declared twice; put its whole policy into one declaration")
    if (partition := parse_partition(name)) is not None:
        raise ConfigurationError(
            f"queue {name!r}: names that end in __p and a number belong to partitions; give it another name, or "
            f"declare app.queue({partition[0]!r}, partitions=…), which makes them"
        )


def width_of(queue: str, partitions: object, by: Collection[str], per_partition: Collection[Limit]) -> int:
    """The number of partitions that a queue is declared with. Other options about partitions need it."""
    for given, value in (("partition_by", by), ("per_partition", per_partition)):
        if partitions is None and value:
            raise ConfigurationError(
                f"queue {queue!r}: {given}={value!r} is about partitions, and it has none; give partitions=… too "
                "(with partitions=1 it is one queue, which can be divided later), or leave it out"
            )
    return 1 if partitions is None else checked_width(partitions)


def check_keys(policy: Policy, tasks: Iterable[Task[..., Any]]) -> None:
    """Refuse a policy that uses a key which no task of its queue can provide."""
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
    """Refuse to divide a queue by a key that its jobs do not carry, and none of its tasks can provide."""
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
    """The source of keys in one form: names, a function, or `None`."""
    if keys is None or callable(keys):
        return keys
    try:
        return normalize_by("task", names(keys), "keys")
    except InvalidPolicy:
        raise ConfigurationError(
            f"task: keys={shown(keys)} is neither names nor a function; give keys=['account'], or a function of the "
            "task's arguments that returns a mapping"
        ) from None


def names(given: object) -> Any:
    """One name or several, from any iterable. Whether they are names is checked elsewhere."""
    is_listed = isinstance(given, Iterable) and not isinstance(given, str | bytes | Mapping)
    return tuple(given) if is_listed else given  # type: ignore[arg-type]


def check_task_place(name: object, queue: object) -> None:
    """Refuse invalid names of a task or of its queue."""
    is_text = isinstance(name, str) and bool(name.strip()) and is_storable(name)
    if name is not None and not (is_text and len(str(name).encode()) <= MAX_KEY_BYTES):
        raise ConfigurationError(
            f"task: name={shown(name)} is no name; give text of 1 to {MAX_KEY_BYTES} bytes, such as 'shop.deliver', or "
            "leave it out"
        )
    if not isinstance(queue, str) or _QUEUE_NAME.match(queue) is None:
        raise ConfigurationError(
            f"task: queue={shown(queue)} is not the name of a queue; give that of one, such as queue='webhooks'"
        )


def check_function(function: Any, name: str | None) -> None:
    """Refuse what a worker could not call: a task is a plain function."""
    what = f"task: {shown(function)}"
    place = getattr(function, "__qualname__", None)
    if inspect.isclass(function):
        raise ConfigurationError(f"{what} is a class; a task is a function: write one that makes what it needs")
    if isinstance(function, staticmethod | classmethod):
        kind = type(function).__name__
        raise ConfigurationError(f"{what} is a {kind}; define the function at a module's top, outside of the class")
    if inspect.ismethod(function):
        raise ConfigurationError(
            f"{what} is bound to an object, which no worker has; write a function that makes or finds the object"
        )
    if not callable(function):
        raise ConfigurationError(f"{what} is not a function; write @app.task above one")
    if place is None:
        raise ConfigurationError(f"{what} is not a plain function; write one that calls it: def work(…): return …")
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise ConfigurationError(f"task: {place} is a generator; a task returns one value: return a list, or enqueue")
    if place.endswith("<lambda>") and name is None:
        raise ConfigurationError(f"task: function {place} has no name of its own; write a def, or give name=")
    if _is_method(function, place):
        raise ConfigurationError(
            f"task: {place} is a method, and a worker has no object to call it on; define the function at a module's "
            "top, and give it what it needs as arguments"
        )


def _is_method(function: Any, place: str) -> bool:
    """Whether it is defined in a class and takes an object of it."""
    owner = place.rpartition(".")[0]
    if not owner or owner.endswith("<locals>"):
        return False
    code = getattr(inspect.unwrap(function), "__code__", None)
    return code is not None and code.co_varnames[: code.co_argcount][:1] in (("self",), ("cls",))


def is_async(function: Callable[..., Any]) -> bool:
    """Whether calling it returns a coroutine."""
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


def name_of(function: Callable[..., Any]) -> str:
    """`module.qualname`. For a script that runs as `__main__`, the name that it would be imported by."""
    module = function.__module__
    if module == "__main__":
        main = sys.modules["__main__"]
        spec = getattr(main, "__spec__", None)
        module = spec.name if spec else Path(getattr(main, "__file__", None) or "__main__").stem
    return f"{module}.{function.__qualname__}"


def checked_time(name: str, duration: Duration) -> int:
    """A time of at least 0, in microseconds."""
    amount = duration_of(name, duration)
    if amount < 0:
        raise ConfigurationError(f"{name}={duration!r} is not a time of at least 0; give one, such as '24h'")
    return amount


def folder_of(frame: FrameType | None) -> Path:
    """The folder of the file whose code called this frame."""
    caller = frame.f_back if frame else None
    while caller and caller.f_globals.get("__name__") == parameters.__name__:  # it checks what the call was given
        caller = caller.f_back
    file = caller.f_globals.get("__file__") if caller else None
    return Path(file).resolve().parent if file else Path.cwd()
