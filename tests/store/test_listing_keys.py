"""Keys are listed by what their figures say, page by page, and found by their names. The same on every store."""

from __future__ import annotations

import random
from functools import partial

import pytest

from fairlane.clock import ManualClock
from fairlane.policy import Concurrency, Fair, Policy
from fairlane.store import stats_rows as key_rows
from fairlane.store.protocol import Store
from fairlane.store.stats import Moment
from fairlane.store.stats_values import KeySort
from tests.store.harness import claim, finish, given_jobs
from tests.store.test_stats import ACCOUNT, POLICY, add_all_up, all_keys, keys


@pytest.mark.parametrize("sort", list(KeySort))
async def test_paging_brings_every_key_once_under_every_order(store: Store, clock: ManualClock, sort: KeySort) -> None:
    dice = random.Random(5)
    names = ("webhooks", "webhooks__p1")
    for name in names:
        policy = Policy(name, fair=Fair(by="account"), keys=("account", "endpoint"))
        await store.declare(policy)
        for account in range(12):
            clock.advance("1s")
            await given_jobs(store, policy, keys(account % 9), dice.randrange(1, 4))
        await finish(store, await claim(store, name, 5))
        await claim(store, name, 3)
        await add_all_up(store, name)
    whole = await all_keys(store, ACCOUNT, names, sort, limit=100)
    assert len(whole) == 18
    assert await all_keys(store, ACCOUNT, names, sort, limit=1) == whole
    assert await all_keys(store, ACCOUNT, names, sort, limit=7) == whole
    values = [
        {
            KeySort.WAITING: -each.waiting,
            KeySort.RUNNING: -each.running,
            KeySort.ENDED: -each.ended,
            KeySort.STARTED: -(each.started_at or 0),
            KeySort.NAME: 0,
        }[sort]
        for each in whole
    ]
    assert values == sorted(values)
    if sort is KeySort.NAME:
        assert [each.key for each in whole] == sorted(each.key for each in whole)


async def test_keys_are_found_by_a_part_of_their_name_whatever_the_case(store: Store) -> None:
    await store.declare(POLICY)
    for account in ("Acme", "acme_2", "50%", "Straße", 'quote"\\', None):
        await given_jobs(store, POLICY, keys(account))
    await claim(store, "webhooks", 1)
    await add_all_up(store)

    async def found(search: str) -> list[str | None]:
        page = await store.ask(lambda moment: moment.list_keys(["webhooks"], ACCOUNT, search=search, sort=KeySort.NAME))
        return [stats.key[0] for _, stats in page.keys]

    assert await found("ACME") == ["Acme", "acme_2"]
    assert await found("_") == ["acme_2"]
    assert await found("%") == ["50%"]
    assert await found("sTRASSE") == []
    assert await found("STRAß") == ["Straße"]
    assert await found('"\\') == ['quote"\\']
    assert await found("\x00") == await found("\ud800") == []
    assert len(await found("")) == 6


@pytest.mark.parametrize("sort", list(KeySort))
@pytest.mark.parametrize("few", [0, 100], ids=["many are found", "few are found"])
async def test_a_search_brings_what_the_list_has_of_it_page_by_page(
    store: Store, monkeypatch: pytest.MonkeyPatch, sort: KeySort, few: int
) -> None:
    monkeypatch.setattr(key_rows, "FEW", few)
    names = ("webhooks", "webhooks__p1")
    for nth, name in enumerate(names):
        policy = Policy(name, fair=Fair(by="account"), limits=(Concurrency(1, by="account"),))
        await store.declare(policy)
        for account in range(15):
            await given_jobs(store, policy, {"account": f"a{account}"}, 1 + account % (3 + nth))
        await finish(store, await claim(store, name, 4))
        await claim(store, name, 20)
        await add_all_up(store, name)
    listed = partial(Moment.list_keys, queues=names, by=ACCOUNT, sort=sort)
    for held_only in (False, True):
        whole = (await store.ask(partial(listed, held_only=held_only))).keys
        expected = [each for each in whole if "1" in str(each[1].key[0])]
        assert len(expected) < len(whole)
        for limit in (1, 3, 50):
            found, after = [], None
            while True:
                page = await store.ask(partial(listed, search="1", held_only=held_only, after=after, limit=limit))
                found += page.keys
                after = page.after
                if after is None:
                    break
            assert found == expected


async def test_only_held_keys_can_be_listed(store: Store) -> None:
    await store.declare(POLICY)
    await given_jobs(store, POLICY, keys("acme"), 5)
    await given_jobs(store, POLICY, keys("globex"), 1)
    await claim(store, "webhooks", 10)
    await add_all_up(store)
    for sort in KeySort:
        page = await store.ask(partial(Moment.list_keys, queues=["webhooks"], by=ACCOUNT, sort=sort, held_only=True))
        assert [stats.key for _, stats in page.keys] == [("acme",)]


async def test_a_key_that_has_changed_in_one_partition_is_still_listed_in_the_others(store: Store) -> None:
    names = ["webhooks", "webhooks__p1"]
    policies = [Policy(name, fair=POLICY.fair, limits=POLICY.limits) for name in names]
    for policy in policies:
        await store.declare(policy)
        await given_jobs(store, policy, keys("acme"), 2)
        await store.conclude(policy.queue)
    await given_jobs(store, policies[0], keys("acme"), 3)
    page = await store.ask(lambda moment: moment.list_keys(names, ACCOUNT))
    assert {queue: stats.waiting for queue, stats in page.keys} == {"webhooks": 5, "webhooks__p1": 2}
