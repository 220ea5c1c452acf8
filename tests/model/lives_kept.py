"""Lives that have shown a fault once, each named after it. They are lived again at every run, on every store."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from tests.model.life import Life
from tests.model.steps import Call, End, Key

__all__ = ["LIVES", "Kept"]


@dataclass(frozen=True)
class Kept:
    family: str
    live: Callable[[Life], Coroutine[Any, Any, None]]

    def __str__(self) -> str:
        return self.live.__name__


async def an_id_given_twice_beside_a_unique_key_was_stored_once(life: Life) -> None:
    await life.enqueue([Call()])
    await life.cancel(0)
    await life.purge([0])
    await life.enqueue([Call(known=0), Call(known=0), Call(unique=Key(0))])


async def a_job_was_replaced_by_one_that_was_never_stored(life: Life) -> None:
    newest = Call(unique=Key(0, on_conflict="replace"))
    await life.enqueue([newest])
    await life.enqueue([newest, newest])


async def the_id_of_a_job_that_was_purged_counted_as_taken_by_its_unique_key(life: Life) -> None:
    for until in ("done", "window"):
        await life.enqueue([Call(unique=Key(0, until=until))])
        await life.claim(want=1)
        await life.settle([End(0)])
        await life.purge([0])
        await life.enqueue([Call(known=0, unique=Key(0))])
        await life.cancel(0)
        await life.purge([0])


async def a_purged_job_left_its_unique_key_behind(life: Life) -> None:
    await life.enqueue([Call(unique=Key(0))])
    await life.cancel(0)
    await life.purge([0])


async def a_job_with_the_id_of_one_that_its_batch_replaces_was_taken_by_the_model_for_that_one(life: Life) -> None:
    # The fault was the model's: the stores say that the id is taken, and store nothing.
    await life.enqueue([Call(unique=Key(0))])
    await life.enqueue([Call(known=0), Call(unique=Key(0, on_conflict="replace"))])


LIVES = [
    Kept("plain", an_id_given_twice_beside_a_unique_key_was_stored_once),
    Kept("plain", a_job_was_replaced_by_one_that_was_never_stored),
    Kept("plain", the_id_of_a_job_that_was_purged_counted_as_taken_by_its_unique_key),
    Kept("plain", a_purged_job_left_its_unique_key_behind),
    Kept("plain", a_job_with_the_id_of_one_that_its_batch_replaces_was_taken_by_the_model_for_that_one),
]
