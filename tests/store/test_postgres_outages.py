"""Lost connections on PostgreSQL: what was committed is recognised, what was not is done again."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator
from urllib.parse import urlsplit, urlunsplit

import asyncpg
import msgspec
import pytest

from fairlane.errors import DuplicateJob, StoreUnavailable
from fairlane.job import BuiltEffects, Claim, OnDead, State
from fairlane.policy import Policy
from fairlane.scheduler.settlement import SEEN, Died, Done, Failed, Lost, Released, settle
from fairlane.store import records, schedules
from fairlane.store.audit import Note
from fairlane.store.faults import Fault
from fairlane.store.postgres import PostgresStore, connections
from fairlane.store.postgres.connections import POOL_SIZE, fault_of
from fairlane.store.postgres.jobs import COPIED_FROM
from fairlane.store.protocol import Listener
from tests.store.harness import LEASE, WORKER, claim, claim_once, finish, given_jobs, new_jobs, soon, worker_named
from tests.waiting import until_found

PLAIN = Policy("webhooks")


class Proxy:
    """A network between a store and its server that can be cut at the worst moment."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        assert parts.hostname
        assert parts.port
        self._server = (parts.hostname, parts.port)
        self._parts = parts
        self._listening: asyncio.Server | None = None
        self._links: set[asyncio.StreamWriter] = set()
        self._cut_after_answer_to = b""
        self._steps_left = 0
        self.cuts = 0
        self.is_down = False

    async def start(self) -> str:
        self._listening = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        port = self._listening.sockets[0].getsockname()[1]
        return urlunsplit(self._parts._replace(netloc=f"{self._parts.username}@127.0.0.1:{port}"))

    def swallow_the_answer_to(self, statement: bytes) -> None:
        """The next request that holds these bytes reaches the server; its answer does not come back."""
        self._cut_after_answer_to = statement

    def cut_at(self, step: int) -> None:
        """The so-manieth message from now on, to the server or from it, is lost, and its connection with it."""
        self._steps_left = step

    def cut(self) -> None:
        for link in list(self._links):
            link.transport.abort()

    async def close(self) -> None:
        self.cut()
        if self._listening is not None:
            self._listening.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.is_down:
            writer.transport.abort()
            return
        server_reader, server_writer = await asyncio.open_connection(*self._server)
        self._links |= {writer, server_writer}
        swallowing = asyncio.Event()
        await asyncio.gather(
            self._pump(reader, server_writer, watch=swallowing),
            self._pump(server_reader, writer, swallow=swallowing),
            return_exceptions=True,
        )
        self._links -= {writer, server_writer}

    async def _pump(
        self,
        source: asyncio.StreamReader,
        target: asyncio.StreamWriter,
        *,
        watch: asyncio.Event | None = None,
        swallow: asyncio.Event | None = None,
    ) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await source.read(65_536):
                if watch is not None and self._cut_after_answer_to and self._cut_after_answer_to in data:
                    self._cut_after_answer_to = b""
                    watch.set()
                if swallow is not None and swallow.is_set():
                    # The server has answered, so it has done what it was asked; nobody will hear of it.
                    self.cuts += 1
                    break
                if self._steps_left:
                    self._steps_left -= 1
                    if not self._steps_left:
                        self.cuts += 1
                        break
                target.write(data)
                await target.drain()
        target.transport.abort()


@pytest.fixture
async def proxy(postgres_url: str) -> AsyncIterator[Proxy]:
    proxy = Proxy(postgres_url)
    yield proxy
    await proxy.close()


@pytest.fixture
async def store(proxy: Proxy) -> AsyncIterator[PostgresStore]:
    """A store whose connections go through the proxy."""
    store = PostgresStore(await proxy.start())
    await store.open()
    await store.declare(PLAIN)
    yield store
    await store.close()


@pytest.fixture
async def other(postgres_url: str) -> AsyncIterator[PostgresStore]:
    store = PostgresStore(postgres_url)
    await store.open()
    yield store
    await store.close()


# L08
@pytest.mark.parametrize("outcome", [Done(b"1"), Failed("boom", 3_600_000_000), Released("drain")])
async def test_a_settlement_whose_commit_was_not_heard_of_is_not_reported_lost(
    store: PostgresStore, proxy: Proxy, outcome: Done | Failed | Released
) -> None:
    await given_jobs(store, PLAIN, count=3)
    await finish(
        store, await claim(store, "webhooks", 1), outcome
    )  # the statement is prepared now, and its bytes known
    held = await claim(store, "webhooks", 2)
    settlements = [settle(each, outcome, 1_000) for each in held]
    proxy.swallow_the_answer_to(held[0].lease.bytes)
    assert await store.settle(settlements) == []
    assert proxy.cuts == 1
    for each in held:
        record = await store.job(each.id)
        assert record.state is settlements[0].to
        assert [past.claimed_at for past in await store.run(records.attempts(each.id))].count(each.claimed_at) == 1


# L01
async def test_a_settlement_that_was_reaped_while_its_connection_was_lost_is_reported_lost(
    store: PostgresStore, other: PostgresStore, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "TRIES", 12)  # 40 seconds: it must not give up before the reaper has come
    monkeypatch.setattr(connections, "PATIENCE", 60.0)
    await given_jobs(store, PLAIN)
    (held,) = (await store.claim("webhooks", lambda: 1, worker=WORKER, lease=LEASE * 0)).claims
    proxy.is_down = True
    proxy.cut()
    settling = asyncio.ensure_future(store.settle([settle(held, Done(None), 1_000)]))
    assert [each.job for each in (await other.reap()).settled] == [held.id]
    proxy.is_down = False
    assert await soon(settling) == [held.id]
    assert (await other.job(held.id)).state is State.READY


@pytest.mark.parametrize("count", [1, 5])
async def test_an_enqueue_whose_commit_was_not_heard_of_stores_its_jobs_once(
    store: PostgresStore, proxy: Proxy, count: int
) -> None:
    await given_jobs(store, PLAIN)
    jobs = new_jobs(PLAIN, count=count)
    proxy.swallow_the_answer_to(jobs[0].id.bytes)
    await store.enqueue(jobs)
    assert proxy.cuts == 1
    assert len(await claim(store, "webhooks", 10)) == 1 + count
    assert (await store.counts("webhooks")).ready == 0


async def test_a_bulk_is_copied_in_once_or_not_at_all_wherever_the_connection_is_cut(
    store: PostgresStore, proxy: Proxy, other: PostgresStore
) -> None:
    await given_jobs(store, PLAIN, count=COPIED_FROM)
    await claim(other, "webhooks", 2 * COPIED_FROM)
    # Begin, lane events, the rows in several pieces, commit: each asked and answered, and tried again over a new
    # connection.
    for turn in range(ROUNDS):
        jobs = new_jobs(PLAIN, count=COPIED_FROM)
        proxy.cut_at(1 + turn % 10)
        await soon(store.enqueue(jobs))
        proxy.cut_at(0)
        assert [each.id for each in await claim(other, "webhooks", 2 * COPIED_FROM)] == [job.id for job in jobs]
    assert proxy.cuts > ROUNDS * 3 // 4


async def test_producers_that_were_stored_together_and_did_not_hear_of_it_are_stored_once(
    store: PostgresStore, proxy: Proxy
) -> None:
    await given_jobs(store, PLAIN, count=2)
    jobs = new_jobs(PLAIN, count=5)
    proxy.swallow_the_answer_to(jobs[3].id.bytes)
    await asyncio.gather(*(store.enqueue([job]) for job in jobs))
    assert proxy.cuts == 1
    assert len(await claim(store, "webhooks", 10)) == 2 + 5


@pytest.mark.parametrize("count", [1, 3])
async def test_an_enqueue_that_is_tried_again_knows_the_jobs_of_others_under_its_ids(
    store: PostgresStore, other: PostgresStore, proxy: Proxy, count: int
) -> None:
    jobs = new_jobs(PLAIN, count=count)
    await other.enqueue([msgspec.structs.replace(job, payload=b"another's") for job in jobs])
    proxy.swallow_the_answer_to(jobs[0].id.bytes)
    with pytest.raises(DuplicateJob, match=str(jobs[0].id)):
        await store.enqueue(jobs)
    assert proxy.cuts == 1
    assert {(await other.job(job.id)).payload for job in jobs} == {b"another's"}
    assert len(await claim(other, "webhooks", 10)) == count


async def test_an_enqueue_that_is_tried_again_takes_a_part_of_its_jobs_for_those_of_another(
    store: PostgresStore, other: PostgresStore, proxy: Proxy
) -> None:
    # Its own statement stores all or nothing.
    jobs = new_jobs(PLAIN, count=3)
    await other.enqueue(jobs[1:])
    proxy.swallow_the_answer_to(jobs[0].id.bytes)
    with pytest.raises(DuplicateJob, match=str(jobs[1].id)):
        await store.enqueue(jobs)
    assert proxy.cuts == 1
    assert len(await claim(other, "webhooks", 10)) == 2


async def test_a_claim_says_that_the_database_is_gone_and_the_next_one_connects_again(
    store: PostgresStore, proxy: Proxy
) -> None:
    await given_jobs(store, PLAIN, count=2)
    assert len(await claim(store, "webhooks", 1)) == 1
    proxy.is_down = True
    proxy.cut()
    with pytest.raises(StoreUnavailable):
        await claim(store, "webhooks", 1)
    with pytest.raises(StoreUnavailable):
        await store.job(new_jobs(PLAIN)[0].id)
    proxy.is_down = False
    assert len(await claim(store, "webhooks", 1)) == 1


async def test_a_claimer_that_is_cancelled_holds_no_lock(store: PostgresStore, other: PostgresStore) -> None:
    await given_jobs(store, PLAIN, count=2)
    started = asyncio.Event()

    def want() -> int:
        started.set()
        return 1

    claiming = asyncio.ensure_future(store.claim("webhooks", want, worker=WORKER, lease=LEASE))
    await started.wait()
    claiming.cancel()
    with pytest.raises(asyncio.CancelledError):
        await claiming
    found = await soon(claim(other, "webhooks", 2, worker=worker_named("other")))
    assert len(found) >= 1


async def test_a_listener_that_lost_its_connection_listens_again_and_is_nudged(
    store: PostgresStore, other: PostgresStore, proxy: Proxy
) -> None:
    listener = await store.listen(WORKER)
    while (await claim_once(store, "webhooks", 1, listener=listener)).look_again:
        pass
    proxy.cut()
    (missed,) = await given_jobs(other, PLAIN)
    assert await soon(listener.wait(None)) is True
    brought = await soon(_claim_with_patience(store, listener))
    assert [each.id for each in brought] == [missed]
    while (await claim_once(store, "webhooks", 1, listener=listener)).look_again:
        pass
    await given_jobs(other, PLAIN)
    assert await soon(listener.wait(None)) is True
    await listener.close()


async def _claim_with_patience(store: PostgresStore, listener: Listener) -> list[Claim]:
    """The claims' own connection may have been cut as well: the first use finds out."""
    try:
        return (await claim_once(store, "webhooks", 1, listener=listener)).claims
    except StoreUnavailable:
        return (await claim_once(store, "webhooks", 1, listener=listener)).claims


# L08
async def test_sessions_that_the_server_ends_are_ridden_out_by_everyone(postgres_url: str) -> None:
    store = PostgresStore(postgres_url, application_name="ended")
    await store.open()
    await store.declare(PLAIN)
    admin = await asyncpg.connect(postgres_url)
    stored = []
    for _ in range(40):
        await admin.execute("select pg_terminate_backend(pid) from pg_stat_activity where application_name = 'ended'")
        (job,) = new_jobs(PLAIN)
        await store.enqueue([job])
        stored.append(job.id)
    assert len(stored) == await admin.fetchval("select count(*) from fairlane.jobs")
    await admin.close()
    await store.close()


def test_a_driver_that_is_confused_by_the_end_of_a_session_has_lost_it() -> None:
    confused = asyncpg.InternalClientError("cannot switch to state 12; another operation (2) is in progress")
    assert fault_of(confused) is Fault.AWAY


ROUNDS = int(os.environ.get("FAIRLANE_FAULT_ROUNDS", "120"))
STEPS = 12  # begin, settle, enqueue, values, commit: each asked and answered, and then some
DEATH_STEPS = {"a settlement": 24, "the reaper": 50}  # and the looking up, the savepoints, the reaper's own transaction


# L16
async def test_effects_land_with_their_ack_or_not_at_all_wherever_the_connection_is_cut(
    store: PostgresStore, proxy: Proxy, other: PostgresStore
) -> None:
    for turn in range(ROUNDS):
        await given_jobs(store, PLAIN)
        (held,) = await claim(store, "webhooks")
        (follow_up,) = new_jobs(PLAIN, task="follow-up")
        effects = BuiltEffects((follow_up,), {f"turn {turn}": b"1"})
        proxy.cut_at(1 + turn % STEPS)
        assert await store.settle([settle(held, Done(b"1", effects), 1_000)]) == []
        proxy.cut_at(0)
        assert (await other.job(held.id)).state is State.DONE
        assert (await other.job(follow_up.id)).state is State.READY
        assert await other.run(records.get_value(f"turn {turn}")) == b"1"
        assert (await other.counts("webhooks")).ready <= 1
        (next_one,) = await claim(other, "webhooks", 5)
        assert next_one.id == follow_up.id
        await finish(other, [next_one])
    assert proxy.cuts > ROUNDS * 3 // 4


# L17
@pytest.mark.parametrize("killer", ["a settlement", "the reaper"])
async def test_effects_for_death_land_once_wherever_the_connection_is_cut(
    store: PostgresStore, proxy: Proxy, other: PostgresStore, killer: str
) -> None:
    for turn in range(ROUNDS):
        (follow_up,), (job,) = new_jobs(PLAIN, task="follow-up"), new_jobs(PLAIN, max_attempts=1)
        declared = OnDead(BuiltEffects((follow_up,), {f"turn {turn}": b"1"})).encode()
        await store.enqueue([msgspec.structs.replace(job, on_dead=declared)])
        if killer == "the reaper":  # only a suspect dies of being lost
            await finish(store, await claim(store, "webhooks"), Lost("its process died", SEEN))
        (held,) = await claim(store, "webhooks", lease=LEASE if killer == "a settlement" else LEASE * 0)
        proxy.cut_at(1 + turn % DEATH_STEPS[killer])
        if killer == "a settlement":
            assert await store.settle([settle(held, Died("no use"), 1_000)]) == []
        else:
            await store.reap()
        proxy.cut_at(0)
        assert (await other.job(held.id)).state is State.DEAD
        assert await other.run(records.get_value(f"turn {turn}")) == b"1"
        (next_one,) = await claim(other, "webhooks", 5)
        assert next_one.task == "follow-up"
        await finish(other, [next_one])
    assert (await other.reap()).next_due is None
    assert proxy.cuts > ROUNDS * 3 // 4


async def test_many_who_ask_at_once_share_a_bounded_number_of_connections(postgres_url: str) -> None:
    store = PostgresStore(postgres_url, application_name="sharing")
    await store.open()
    await store.declare(PLAIN)
    told = await soon(asyncio.gather(*(store.policy("webhooks") for _ in range(200))))
    assert len(told) == 200
    asked = [asyncio.ensure_future(store.policy("webhooks")) for _ in range(50)]
    await asyncio.sleep(0)
    for task in asked[::2]:
        task.cancel()
    kept = await soon(asyncio.gather(*asked, return_exceptions=True))
    assert all(isinstance(each, asyncio.CancelledError) == (n % 2 == 0) for n, each in enumerate(kept))
    admin = await asyncpg.connect(postgres_url)

    async def few_are_open() -> bool:
        # Whoever was cancelled hung up, which the server may not have noticed yet.
        open_now: int = await admin.fetchval("select count(*) from pg_stat_activity where application_name = 'sharing'")
        return 1 <= open_now <= POOL_SIZE

    await until_found(few_are_open)
    await admin.close()
    await store.close()


@pytest.mark.parametrize("is_paused", [None, True], ids=["trigger", "pause"])
async def test_an_operators_word_about_a_schedule_counts_once_though_its_commit_was_not_heard_of(
    store: PostgresStore, other: PostgresStore, proxy: Proxy, is_paused: bool | None
) -> None:
    await store.run(schedules.put_schedule("nightly", b"digest", "{}", 1, instead_of=None))
    proxy.swallow_the_answer_to(b"COMMIT;")
    changed = await store.run(
        schedules.change_schedule("nightly", Note(actor="ada", action="act"), is_paused=is_paused)
    )
    assert proxy.cuts == 1
    assert changed is not None
    assert (changed.triggers, changed.is_paused) == ((1, False) if is_paused is None else (0, True))
    assert await other.run(schedules.schedules()) == [changed]
    assert [entry.actor for entry in await other.run(records.audit())] == ["ada"]


async def test_an_operators_trigger_whose_transaction_was_lost_is_made_once(
    store: PostgresStore, other: PostgresStore, proxy: Proxy
) -> None:
    await store.run(schedules.put_schedule("nightly", b"digest", "{}", 1, instead_of=None))
    step = 0
    while step < 11:
        step += 1
        proxy.cut_at(step)
        changed = await store.run(schedules.change_schedule("nightly", Note(actor="ada", action="act")))
        assert changed is not None
        assert changed.triggers == step
    assert proxy.cuts > 5
    assert [row.triggers for row in await other.run(schedules.schedules())] == [step]
