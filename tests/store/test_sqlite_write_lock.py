"""Processes that share a file write by turns: a claim is smaller while others wait."""

from __future__ import annotations

import fcntl
from pathlib import Path

import pytest

from fairlane.policy import Policy
from fairlane.store import records
from fairlane.store.sqlite import SqliteStore
from fairlane.store.sqlite.database import CROWDED_CLAIM, REMEMBERED, WriteLock
from tests.store.harness import claim_once, new_jobs

PLAIN = Policy("webhooks")


async def test_a_claim_is_bounded_while_others_wait_to_write_and_says_that_there_is_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = str(tmp_path / "jobs.db")
    store = SqliteStore(path)
    await store.open()
    await store.declare(PLAIN)
    await store.enqueue(new_jobs(PLAIN, count=4 * CROWDED_CLAIM))
    theirs, flock = WriteLock(path), fcntl.flock
    theirs.take()

    def flock_once_they_have_written(file: int, operation: int) -> None:
        if operation == fcntl.LOCK_EX:
            theirs.give()
        flock(file, operation)

    with monkeypatch.context() as patched:
        patched.setattr(fcntl, "flock", flock_once_they_have_written)
        claimed = await claim_once(store, "webhooks", 3 * CROWDED_CLAIM)
    assert len(claimed.claims) == CROWDED_CLAIM
    assert claimed.more
    for _ in range(REMEMBERED):
        await store.run(records.put_value("alone", b"again"))
    assert len((await claim_once(store, "webhooks", 3 * CROWDED_CLAIM)).claims) == 3 * CROWDED_CLAIM
    theirs.close()
    await store.close()


def test_others_are_forgotten_once_nobody_has_been_in_the_way_for_a_while(tmp_path: Path) -> None:
    lock = WriteLock(str(tmp_path / "jobs.db"))
    lock.take()
    assert not lock.is_crowded
    lock._crowd = 2
    for is_crowded in (True, False):
        lock.give()
        lock.take()
        assert lock.is_crowded is is_crowded
    lock.close()
