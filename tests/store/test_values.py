"""The key-value store: durable, ordered by bytes, exact under contention."""

from __future__ import annotations

import asyncio
import copy
import pickle
import random
from collections.abc import Coroutine
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, TypeVar

import asyncpg
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fairlane.codec import LONGEST_KEY
from fairlane.effects import ABSENT, Page, Values, key_range
from fairlane.errors import ConfigurationError, InvalidValue
from fairlane.store import records
from fairlane.store.postgres import PostgresStore
from fairlane.store.postgres import settlements as postgres_values
from fairlane.store.protocol import Store
from fairlane.store.sqlite import caller_transactions as sqlite_values
from fairlane.store.sqlite.database import Transaction
from tests.store.harness import Database, soon

R = TypeVar("R")


@dataclass
class Opened:
    """As much of an app as values need."""

    store: Store
    max_payload: int = 1_000

    async def opened(self) -> Store:
        return self.store

    def run_blocking(self, work: Coroutine[Any, Any, R]) -> R:
        raise NotImplementedError


@pytest.fixture
def values(store: Store) -> Values:
    return Values(Opened(store))


async def keys_of(values: Values, prefix: str = "", limit: int = 100) -> list[str]:
    """Every key, a page at a time."""
    page = await values.scan(prefix, limit=limit)
    found = [key for key, _ in page.items]
    while page.next is not None:
        page = await values.scan(prefix, page.next, limit)
        assert page.items, "a page that was announced is empty"
        found += [key for key, _ in page.items]
    return found


async def test_what_was_put_comes_back_until_it_is_deleted(values: Values) -> None:
    assert await values.get("token") is None
    assert await values.get("token", "none yet") == "none yet"
    await values.put("token", {"secret": "s3", "uses": [1, 2.5, None, True]})
    assert await values.get("token") == {"secret": "s3", "uses": [1, 2.5, None, True]}
    await values.put("token", None)
    assert await values.get("token", "absent") is None
    assert await values.delete("token") is True
    assert await values.delete("token") is False
    assert await values.get("token", "absent") == "absent"


async def test_another_process_finds_what_was_put(shared_database: Database) -> None:
    await Values(Opened(await shared_database.open())).put("cursor", 42)
    await shared_database.close()
    assert await Values(Opened(await shared_database.open())).get("cursor") == 42


@pytest.mark.parametrize("key", ["", "x" * 513, "é" * 257, "a\0b", "\ud800", 7, None, b"bytes"])
async def test_a_key_that_cannot_be_one_is_refused_by_every_verb(values: Values, key: Any) -> None:
    for refused in (
        values.get(key),
        values.put(key, 1),
        values.delete(key),
        values.compare_and_set(key, ABSENT, 1),
        values.compare_and_set(key, ABSENT, ABSENT),
    ):
        with pytest.raises(InvalidValue, match="the key"):
            await refused


@pytest.mark.parametrize("key", ["x", "x" * 512, "é" * 256, "\U0010ffff" * 128, "a b/c:%_\\'\"\n\x01"])
async def test_any_other_key_is_kept_as_it_is(values: Values, key: str) -> None:
    await values.put(key, "here")
    assert await values.get(key) == "here"
    assert (await values.scan()).items == [(key, "here")]
    assert (await values.scan(key)).items == [(key, "here")]


@pytest.mark.parametrize("value", [object(), ABSENT, {"inside": [ABSENT]}, float("nan"), [float("inf")], b"\xff" * 900])
async def test_a_value_without_a_json_form_or_beyond_the_limit_is_refused(values: Values, value: Any) -> None:
    await values.put("kept", 1)
    with pytest.raises(InvalidValue, match="'kept'"):
        await values.put("kept", value)
    assert await values.get("kept") == 1


async def test_a_value_of_exactly_the_limit_is_kept(values: Values) -> None:
    await values.put("edge", "x" * 998)
    assert await values.get("edge") == "x" * 998
    with pytest.raises(InvalidValue, match=r"takes 1,001 bytes, more than the 1,000 allowed; .* App\(max_payload=…\)"):
        await values.put("edge", "x" * 999)


@pytest.mark.parametrize(
    ("stored", "expected", "value", "left", "done"),
    [
        (ABSENT, ABSENT, 1, 1, True),
        (1, ABSENT, 2, 1, False),
        (1, 1, 2, 2, True),
        (1, 2, 3, 1, False),
        (ABSENT, 1, 2, ABSENT, False),
        (1, 1, ABSENT, ABSENT, True),
        (1, 2, ABSENT, 1, False),
        (ABSENT, ABSENT, ABSENT, ABSENT, True),
        (1, ABSENT, ABSENT, 1, False),
        (None, ABSENT, 1, None, False),
        (ABSENT, None, 1, ABSENT, False),
        (None, None, 1, 1, True),
    ],
)
async def test_compare_and_set_changes_what_is_as_expected_and_nothing_else(
    values: Values, stored: Any, expected: Any, value: Any, left: Any, done: bool
) -> None:
    if stored is not ABSENT:
        await values.put("key", stored)
    await values.put("another", "untouched")
    assert await values.compare_and_set("key", expected, value) is done
    assert await values.get("key", ABSENT) == left
    assert await values.get("another") == "untouched"


async def test_what_says_the_same_is_the_same_whatever_order_it_was_written_in(values: Values) -> None:
    @dataclass
    class Account:
        name: str
        joined: datetime
        balance: float

    await values.put("acme", Account("acme", datetime(2030, 1, 1, tzinfo=UTC), 1.0))
    plain = await values.get("acme")
    assert plain == {"name": "acme", "joined": "2030-01-01T00:00:00Z", "balance": 1.0}
    assert await values.compare_and_set("acme", plain, {"b": 1, "a": 2}) is True
    assert await values.compare_and_set("acme", {"a": 2, "b": 1}, "last") is True


def test_absent_is_one_thing_however_it_is_copied() -> None:
    assert copy.deepcopy(ABSENT) is ABSENT
    assert pickle.loads(pickle.dumps(ABSENT)) is ABSENT
    assert repr(ABSENT) == "ABSENT"


async def test_a_scan_goes_page_by_page_in_the_order_of_bytes(values: Values) -> None:
    keys = ["B", "a", "a/1", "a/10", "a/2", "a/é", "a/\ud7ff", "a/\ue000", "a/\U0001f600", "a0", "b", "é", "\U0010ffff"]
    for key in random.Random(1).sample(keys, len(keys)):
        await values.put(key, key.upper())
    in_order = sorted(keys, key=str.encode)
    for limit in (1, 2, 3, 100):
        assert await keys_of(values, limit=limit) == in_order
        assert await keys_of(values, "a/", limit) == [key for key in in_order if key.startswith("a/")]
    assert await keys_of(values, "\U0010ffff") == ["\U0010ffff"]
    assert await keys_of(values, "nothing") == []
    assert (await values.scan("a/", "a/10", 2)) == Page([("a/2", "A/2"), ("a/é", "A/É")], "a/é")
    assert (await values.scan("a/", "z", 2)) == Page([], None)
    assert [key for key, _ in (await values.scan("a/", "A", 2)).items] == ["a/1", "a/10"]


@pytest.mark.parametrize("limit", [0, -1, True, 1.5, "5", 10_001])
async def test_a_scan_with_a_limit_that_makes_no_sense_is_refused(values: Values, limit: Any) -> None:
    with pytest.raises(InvalidValue, match="limit="):
        await values.scan(limit=limit)


KEYS = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=4)


@given(prefix=KEYS, after=st.none() | KEYS.filter(bool), key=KEYS.filter(bool))
def test_a_range_holds_the_keys_of_a_prefix_that_come_after_another(prefix: str, after: str | None, key: str) -> None:
    low, end = key_range(prefix, after)
    is_meant = key.startswith(prefix) and (after is None or key.encode() > after.encode())
    assert (low.encode() <= key.encode() < end.encode()) is is_meant


@given(prefix=st.sampled_from(["", "\U0010ffff", "\ud7ff", "a\U0010ffff"]), rest=KEYS.filter(bool))
def test_a_range_holds_whatever_begins_with_the_last_of_characters(prefix: str, rest: str) -> None:
    low, end = key_range(prefix, None)
    assert low.encode() <= (prefix + rest).encode() < end.encode()
    assert ("\U0010ffff" * (LONGEST_KEY // 4)).encode() < key_range("", None)[1].encode()


async def test_values_change_with_the_callers_transaction(shared_database: Database) -> None:
    values = Values(Opened(await shared_database.open()))
    await values.put("kept", "before")
    for ending, left in (("rollback", ("before", None)), ("commit", ("after", "new"))):
        async with shared_database.transaction() as caller:
            await values.put("kept", "within", tx=caller.tx)
            assert await values.compare_and_set("kept", "within", "after", tx=caller.tx) is True
            assert await values.compare_and_set("fresh", ABSENT, "new", tx=caller.tx) is True
            await values.put("short-lived", 1, tx=caller.tx)
            assert await values.delete("short-lived", tx=caller.tx) is True
            assert await values.get("fresh", tx=caller.tx) == "new"
            assert [key for key, _ in (await values.scan(tx=caller.tx)).items] == ["fresh", "kept"]
            assert await values.get("kept") == "before", "nobody sees it before it is committed"
            await (caller.rollback() if ending == "rollback" else caller.commit())
        assert (await values.get("kept"), await values.get("fresh")) == left


async def test_a_connection_without_a_transaction_is_refused(shared_database: Database) -> None:
    values = Values(Opened(await shared_database.open()))
    async with shared_database.transaction(begin=False) as caller:
        with pytest.raises(ConfigurationError, match="not in a transaction"):
            await values.put("key", 1, tx=caller.tx)
    with pytest.raises(ConfigurationError, match="tx=str"):
        await values.get("key", tx="connection")


async def test_of_many_who_count_at_once_no_step_is_lost(shared_database: Database) -> None:
    counters = [Values(Opened(await shared_database.open())) for _ in range(6)]
    refused = 0

    async def count(values: Values, steps: int) -> None:
        nonlocal refused
        while steps:
            seen = await values.get("counter", ABSENT)
            if await values.compare_and_set("counter", seen, 1 if seen is ABSENT else seen + 1):
                steps -= 1
            else:
                refused += 1

    await soon(asyncio.gather(*(count(values, 25) for values in counters for _ in range(2))))
    assert await counters[0].get("counter") == 6 * 2 * 25
    assert refused > 0, "nobody was in anybody's way: this has shown nothing"


async def write(database: Database, tx: Any, puts: dict[str, bytes], deletes: list[str]) -> None:
    """What a settlement does inside its own transaction."""
    if database.kind == "postgres":
        await postgres_values.write(tx, puts, deletes)
    else:
        sqlite_values.write(Transaction(tx), puts, deletes)


async def test_many_are_written_with_one_settlement_or_none_of_them(shared_database: Database) -> None:
    values = Values(Opened(await shared_database.open()))
    await values.put("old", 1)
    await values.put("stays", 1)
    for ending, left in (("rollback", {"old": 1, "stays": 1}), ("commit", {"a": 2, "b": 3, "stays": 4})):
        async with shared_database.transaction() as caller:
            await write(shared_database, caller.tx, {"b": b"3", "a": b"2", "stays": b"4"}, ["old", "never", "stays"])
            await write(shared_database, caller.tx, {}, [])
            await (caller.rollback() if ending == "rollback" else caller.commit())
        assert dict((await values.scan()).items) == left


async def test_writers_of_the_same_keys_never_deadlock(postgres_url: str) -> None:
    store = PostgresStore(postgres_url)
    await store.open()
    keys = [f"key-{number}" for number in range(12)]

    async def write_at_random(seed: int) -> None:
        chance = random.Random(seed)
        connection = await asyncpg.connect(postgres_url)
        try:
            for _ in range(60):
                chosen = chance.sample(keys, 8)
                puts = {key: str(seed).encode() for key in chosen[:5]}
                async with connection.transaction():
                    await postgres_values.write(connection, puts, chosen[5:])
        finally:
            await connection.close()

    await soon(asyncio.gather(*(write_at_random(seed) for seed in range(6))))
    assert {await store.run(records.get_value(key)) for key in keys} <= {
        None,
        *(str(seed).encode() for seed in range(6)),
    }
    await store.close()
