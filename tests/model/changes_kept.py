"""Changes that have shown a fault once, each named after it. They are lived again at every run, on every store."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

from tests.model.changes import Changes

__all__ = ["LIVES", "Kept"]

Kept = Callable[[Changes], Coroutine[Any, Any, None]]


async def a_job_that_ended_while_its_queue_began_to_share_kept_its_slot(life: Changes) -> None:
    await life.meet("shared_gates", [("apply", ("a", 5)), ("settle", ([(-1, "done")],))])


async def a_job_that_ended_while_its_queue_was_divided_kept_its_slot(life: Changes) -> None:
    await life.apply("a", 1)
    await life.meet("shared_gates", [("divide", ("a", 2)), ("settle", ([(-1, "done")],))])


async def a_job_that_ended_under_another_scope_of_its_limit_kept_its_slot(life: Changes) -> None:
    await life.apply("a", 5)
    await life.enqueue("a", [("x", "1")])
    await life.claim("a", 1)
    await life.apply("a", 7)
    await life.settle([(0, "done")])
    await life.apply("a", 5)


LIVES: list[Kept] = [
    a_job_that_ended_while_its_queue_began_to_share_kept_its_slot,
    a_job_that_ended_while_its_queue_was_divided_kept_its_slot,
    a_job_that_ended_under_another_scope_of_its_limit_kept_its_slot,
]
