"""Stats are sums, and adding twice is wrong: whoever is killed in the middle of adding up has added nothing."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
from collections import Counter
from typing import get_args

import pytest

from fairlane.policy import Concurrency, Fair, Policy
from fairlane.scheduler.settlement import Died, Done
from fairlane.store import stats_sums as sums
from fairlane.store.procedures import Procedure, Work
from fairlane.store.protocol import Store
from fairlane.store.stats_values import AddedUp
from tests.store.harness import Database, Kind, claim, finish, given_jobs
from tests.store.nursery import Nursery
from tests.waiting import until_found

QUEUE = "webhooks"
POLICY = Policy(QUEUE, fair=Fair(by="account"), limits=(Concurrency(4, by="account"),))
ACCOUNTS = ("acme", "event", "corp")
ALL = 500
FEWEST_PLACES = 6
"""It reads and writes at least so often."""


def add_up_and_die(kind: str, url: str, nth: str) -> None:
    """Be killed once so many statements have been answered, the last of all included; before the commit."""
    (chosen,) = (each for each in get_args(Kind) if each == kind)
    true_add_up = sums.add_up

    def add_up(work: sums.Work, limit: int) -> Work[AddedUp]:
        adding = true_add_up(work, limit)

        def killed() -> Procedure[AddedUp]:
            asking, answered = adding.make(), 0
            try:
                asked = next(asking)
                while True:
                    answer = yield asked
                    answered += 1
                    if answered == int(nth):
                        os.kill(os.getpid(), signal.SIGKILL)
                    asked = asking.send(answer)
            except StopIteration as stop:
                result: AddedUp = stop.value
                return result

        return Work(adding.name, killed, adding.terms)

    sums.add_up = add_up
    asyncio.run(_tally(Database(chosen, url)))


async def _tally(database: Database) -> None:
    await (await database.open()).add_up(QUEUE, ALL)
    await database.close()


class Book:
    """What has ended, outside the queue."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.ended: Counter[str] = Counter()
        self.failed: Counter[str] = Counter()

    async def something_happens(self) -> None:
        for account in ACCOUNTS:
            await given_jobs(self.store, POLICY, {"account": account}, 3)
        held = await claim(self.store, QUEUE, 3 * len(ACCOUNTS))
        assert len(held) == 3 * len(ACCOUNTS)
        for number, each in enumerate(held):
            account, fails = str(each.keys["account"]), number % 4 == 0
            await finish(self.store, [each], Died("never") if fails else Done(None))
            self.ended[account] += 1
            self.failed[account] += fails
        assert await claim(self.store, QUEUE) == [], "their ends are folded with it"

    async def shown(self) -> tuple[Counter[str], Counter[str], int, int]:
        """Ended and failed as the stats have them: by account, and over all minutes."""
        page = await self.store.ask(lambda moment: moment.list_keys([QUEUE], ("account",)))
        keys = {str(stats.key[0]): stats for _, stats in page.keys}
        minutes = (await self.store.ask(lambda moment: moment.minutes([QUEUE], 0)))[QUEUE]
        return (
            Counter({key: each.ended for key, each in keys.items()}),
            Counter({key: each.failed for key, each in keys.items()}),
            sum(each.ended for each in minutes),
            sum(each.failed for each in minutes),
        )

    def expected(self) -> tuple[Counter[str], Counter[str], int, int]:
        return self.ended, self.failed, self.ended.total(), self.failed.total()

    async def add_up(self) -> None:
        async def has_added() -> bool:
            # Until the server has noticed that somebody is dead, it is still their turn.
            return (await self.store.add_up(QUEUE, ALL)).claims > 0

        await until_found(has_added)


@pytest.fixture
async def book(shared_database: Database) -> Book:
    store = await shared_database.open()
    await store.declare(POLICY)
    return Book(store)


async def test_who_is_killed_in_the_middle_of_adding_up_has_added_nothing_and_nothing_is_lost(
    shared_database: Database, book: Book
) -> None:
    with Nursery("tests.store.test_killed_sums", "add_up_and_die") as nursery:
        for nth in itertools.count(1):
            await book.something_happens()
            nursery.start(shared_database.kind, shared_database.url, str(nth))
            ((_, status),) = nursery.ended(waits=True).items()
            assert await book.shown() == book.expected(), "what waits to be added up is shown with the sums"
            if status == 0:
                break
            assert status == -signal.SIGKILL, "its error is on stderr"
            if nth % 2:  # else the next one has more to add up
                await book.add_up()
                assert await book.shown() == book.expected()
    assert nth > FEWEST_PLACES
    assert (await book.store.add_up(QUEUE, ALL)).claims == 0, "who came through has added everything"
