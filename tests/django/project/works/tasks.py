"""Tasks of both kinds: Fairlane's own, and those of Django's framework."""

from __future__ import annotations

import os
from typing import Any

from django.db import connection, transaction

from fairlane import Concurrency, Fair
from fairlane.integrations.django import app
from works.framework import framework
from works.models import Note

app.queue("notes", fair=Fair(by="author"), limits=[Concurrency(5, by="author")])


@app.task(queue="notes")
def write(text: str, author: str = "ada") -> int:
    found: int = Note.objects.create(text=text).pk
    return found


@app.task(queue="notes")
async def write_async(text: str, author: str = "ada") -> int:
    found: int = (await Note.objects.acreate(text=text)).pk
    return found


@app.task(queue="notes")
def write_and_go_on(text: str, fails: bool, author: str = "ada") -> None:
    with transaction.atomic():
        Note.objects.create(text=text)
        write.enqueue_sync(f"after {text}")
        if fails:
            transaction.set_rollback(True)


@app.task(queue="notes")
def is_connected_anew(author: str = "ada") -> bool:
    """Whether the connection of the thread's last job is gone."""
    was_closed = connection.connection is None
    Note.objects.exists()
    return was_closed


@app.task(queue="notes", executor="process")
def count_in_a_process(author: str = "ada") -> tuple[int, int]:
    return Note.objects.count(), os.getpid()


class Busy(Exception):
    """Worth another attempt."""


@framework.task
def double(number: int) -> int:
    return number * 2


@framework.task(queue_name="mail", priority=7)
async def greet(name: str) -> str:
    return f"hello {name}, {await Note.objects.acount()} notes"


@framework.task(takes_context=True)
def tell_attempt(context: Any, word: str) -> list[Any]:
    if context.attempt < 3:
        raise Busy(word)
    return [word, context.attempt, len(context.task_result.errors)]


@framework.task
def fail(number: int) -> None:
    raise ValueError(f"not {number}")


@framework.task
def note_down(text: str) -> None:
    Note.objects.create(text=text)
