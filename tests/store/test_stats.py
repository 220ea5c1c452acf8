"""Figures: what claims did, added up by upkeep, for people who look. The same on every store."""

from __future__ import annotations

import asyncio
import random
import sqlite3
from collections import Counter, defaultdict
from collections.abc import Sequence
from functools import partial
from itertools import product
from uuid import UUID

import asyncpg
import msgspec
import pytest

from fairlane.clock import Instant, ManualClock
from fairlane.errors import ConfigurationError
from fairlane.job import Claim, JobRecord, State
from fairlane.policy import Concurrency, Fair, Policy, Rate
from fairlane.policy.keys import By, select
from fairlane.policy.overrides import Kind, Override
from fairlane.scheduler.settlement import Died, Done, Failed, Released, RunOutcome, Snoozed
from fairlane.stats.gates import gauges
from fairlane.stats.keys import Held, KeyStats
from fairlane.store import operators, policies, records
from fairlane.store.audit import Note
from fairlane.store.operators import JobFilter
from fairlane.store.protocol import Store
from fairlane.store.sqlite import SqliteStore
from fairlane.store.stats import Moment
from fairlane.store.stats_values import KeySort, WorkerReport
from tests.store.harness import (
    MINUTE,
    SECOND,
    Database,
    checkpointed,
    claim,
    finish,
    given_jobs,
    new_jobs,
    worker_named,
)

ACCOUNT: By = ("account",)
POLICY = Policy(
    "webhooks",
    fair=Fair(by="account"),
    limits=(Concurrency(2, by="account"), Rate(100, per="1m", by="endpoint"), Concurrency(50)),
)


OUTCOMES: list[RunOutcome] = [
    Done(None),
    Done(None),
    Failed("no", SECOND),
    Snoozed("later", SECOND),
    Died("never"),
    Released("not now"),
]


def keys(account: object, endpoint: object = "e") -> dict[str, object]:
    return {"account": account, "endpoint": endpoint}


async def add_all_up(store: Store, queue: str = "webhooks") -> None:
    while (await store.add_up(queue)).more:
        pass


async def all_keys(
    store: Store, by: By = ACCOUNT, queues: Sequence[str] = ("webhooks",), sort: KeySort = KeySort.NAME, limit: int = 50
) -> list[KeyStats]:
    found: list[KeyStats] = []
    after: str | None = None
    while True:
        page = await store.ask(partial(Moment.list_keys, queues=queues, by=by, sort=sort, after=after, limit=limit))
        found += [stats for _, stats in page.keys]
        after = page.after
        if after is None:
            return found


async def stats_of(store: Store, key: str, by: By = ACCOUNT, queue: str = "webhooks") -> KeyStats:
    found = await store.ask(lambda moment: moment.keys_named([queue], [(by, (key,))]))
    return found[0][1] if found else KeyStats(by=by, key=(key,))


async def every_job(store: Store, queue: str = "webhooks") -> list[JobRecord]:
    found: list[JobRecord] = []
    after: str | None = None
    while True:
        page = await store.run(operators.find_jobs(JobFilter(queue=queue), after, 1_000))
        found += page.jobs
        after = page.after
        if after is None:
            return found


def is_due(job: JobRecord, now: Instant) -> bool:
    """Its time has come, and no claim has let it join its lane."""
    return job.state is State.SCHEDULED and job.due_at is not None and job.due_at <= now


async def truth(store: Store, by: By, queue: str = "webhooks") -> dict[tuple[str | None, ...], tuple[int, int]]:
    """Who waits (what is due does) and who runs by key, counted from the jobs."""
    now = await store.now()
    waiting: Counter[tuple[str | None, ...]] = Counter()
    running: Counter[tuple[str | None, ...]] = Counter()
    for job in await every_job(store, queue):
        key = select(by, {**job.keys, "task": job.task}, job.priority)
        waiting[key] += job.state is State.READY or is_due(job, now)
        running[key] += job.state is State.RUNNING
    return {key: (waiting[key], running[key]) for key in waiting if waiting[key] or running[key]}


async def shown(store: Store, by: By, queue: str = "webhooks") -> dict[tuple[str | None, ...], tuple[int, int]]:
    found = await all_keys(store, by, [queue])
    return {each.key: (each.waiting, each.running) for each in found if each.waiting or each.running}


async def test_figures_say_who_waits_and_runs_once_they_are_added_up(store: Store) -> None:
    await store.declare(POLICY)
    await given_jobs(store, POLICY, keys("acme"), 5)
    await given_jobs(store, POLICY, keys("globex"), 1)
    await claim(store, "webhooks", 10)
    await add_all_up(store)
    acme, globex = await stats_of(store, "acme"), await stats_of(store, "globex")
    assert (acme.waiting, acme.running) == (3, 2)
    assert (globex.waiting, globex.running) == (0, 1)


async def test_what_ends_is_counted_for_a_day(store: Store, clock: ManualClock) -> None:
    await store.declare(POLICY)
    await given_jobs(store, POLICY, keys("acme"), 2)
    await finish(store, await claim(store, "webhooks", 10), ran=2 * SECOND)
    await claim(store, "webhooks", 1)
    await add_all_up(store)
    acme = await stats_of(store, "acme")
    assert (acme.ended, acme.failed, acme.ran) == (2, 0, 4 * SECOND)
    assert acme.run_time == pytest.approx(2.0)
    assert acme.started_at == clock.now()
    clock.advance("25h")
    await add_all_up(store)
    assert await all_keys(store) == []


async def test_a_queue_forgets_what_ended_more_than_a_day_ago(store: Store, clock: ManualClock) -> None:
    await store.declare(POLICY)
    await given_jobs(store, POLICY, keys("acme"), 2)
    await finish(store, await claim(store, "webhooks", 10))
    await claim(store, "webhooks", 1)
    await add_all_up(store)
    (before,) = await store.ask(lambda moment: moment.survey(["webhooks"]))
    clock.advance("25h")
    (after,) = await store.ask(lambda moment: moment.survey(["webhooks"]))
    assert (sum(each.ended for each in before.hours), after.hours) == (2, ())


async def test_a_forged_place_is_refused(store: Store) -> None:
    await store.declare(POLICY)
    for forged in ("", "x", "!!!", "bm90aGluZw", "W10", "😀"):
        with pytest.raises(ConfigurationError, match="after="):
            await store.ask(partial(Moment.list_keys, queues=["webhooks"], by=ACCOUNT, after=forged))


async def test_figures_equal_the_truth_after_random_lives(store: Store, clock: ManualClock) -> None:
    dice = random.Random(7)
    await store.declare(POLICY)
    held = []
    for _ in range(60):
        clock.advance("1s")
        await given_jobs(store, POLICY, keys(dice.randrange(4), dice.randrange(3)), dice.randrange(1, 4))
        held += await claim(store, "webhooks", dice.randrange(1, 6))
        dice.shuffle(held)
        await finish(store, held[:2])
        held = held[2:]
        if dice.random() < 0.3:
            await add_all_up(store)
    await claim(store, "webhooks", 1)
    await add_all_up(store)
    for by in POLICY.scopes:
        assert await shown(store, by) == await truth(store, by)


@pytest.mark.parametrize("seed", range(3))
async def test_what_ended_by_key_and_minute_equals_a_ledger(store: Store, clock: ManualClock, seed: int) -> None:
    """Of keys for an hour by minute, of their queue by hour: at every pause, whatever was added up before."""
    dice = random.Random(seed)
    await store.declare(POLICY)
    ledger: dict[tuple[str, int], Counter[str]] = defaultdict(Counter)
    ready: dict[UUID, Instant] = {}
    for n in range(90):
        clock.advance(f"{dice.randrange(1, 90)}s")
        minute = clock.now() // MINUTE
        for job in await given_jobs(store, POLICY, keys(dice.randrange(3), dice.randrange(2)), dice.randrange(1, 4)):
            ready[job] = clock.now()
        outcome: RunOutcome = Died("never") if dice.random() < 0.3 else Done(None)
        for one in await claim(store, "webhooks", dice.randrange(1, 6)):
            of = ledger[str(one.keys["account"]), minute]
            of.update(started=1, waited=clock.now() - ready[one.id])
            of.update(done=1, failed=isinstance(outcome, Died), ran=3 * SECOND)
            await finish(store, [one], outcome, ran=3 * SECOND)
        await store.run(
            policies.lanes("webhooks", keeps=True)
        )  # An end is counted in the minute in which it is folded.
        if dice.random() < 0.2:
            await add_all_up(store)
        if n % 15 == 14:
            oldest = minute - 60
            for account in "012":
                assert {
                    each.number: (each.started, each.waited, each.ended, each.failed, each.ran)
                    for each in (await stats_of(store, account)).at(clock.now()).minutes
                } == {
                    at: (of["started"], of["waited"], of["done"], of["failed"], of["ran"])
                    for (key, at), of in ledger.items()
                    if key == account and at > oldest
                }
            (queue,) = await store.ask(lambda moment: moment.survey(["webhooks"]))
            by_hour: dict[int, Counter[str]] = defaultdict(Counter)
            for (_, at), of in ledger.items():
                by_hour[at // 60].update(of)
            assert {each.number: (each.started, each.ended, each.failed, each.ran) for each in queue.hours} == {
                hour: (of["started"], of["done"], of["failed"], of["ran"]) for hour, of in by_hour.items()
            }


async def test_the_next_jobs_of_a_flow_are_shown_in_the_order_in_which_they_start(
    store: Store, clock: ManualClock
) -> None:
    """O06"""
    policy = Policy("webhooks", fair=Fair(by="account"), limits=(Concurrency(1, by="endpoint"),))
    await store.declare(policy)
    dice = random.Random(11)
    for n in range(40):
        clock.advance("1s")
        for account in ("acme", "globex"):
            await given_jobs(store, policy, keys(account, dice.randrange(3)), priority=dice.randrange(-2, 3))
        if n % 13 == 5:
            await claim(store, "webhooks", 3)
    shown = [job.id for job in await store.ask(lambda moment: moment.next_jobs("webhooks", {"account": "acme"}, 30))]
    open_policy = Policy("webhooks", fair=Fair(by="account"), keys=("account", "endpoint"))
    await store.apply(open_policy)
    started = [each.id for each in await claim(store, "webhooks", 200) if each.keys["account"] == "acme"]
    assert shown == started[:30]


async def live(store: Store, clock: ManualClock, policy: Policy, dice: random.Random, held: list[Claim]) -> None:
    """Something happens to some jobs: whatever can."""
    clock.advance(f"{dice.randrange(1, 20_000)}ms")
    queue = policy.queue
    match dice.randrange(12):
        case 0 | 1 | 2:
            of = keys(dice.randrange(4), dice.randrange(3))
            delay = dice.choice([None, None, 5 * SECOND])
            await given_jobs(store, policy, of, dice.randrange(1, 6), priority=dice.randrange(2), delay=delay)
        case 3 | 4 | 5:
            held += await claim(store, queue, dice.randrange(1, 7))
        case 6 | 7:
            outcome = dice.choice(OUTCOMES)
            dice.shuffle(held)
            await finish(store, [held.pop() for _ in range(min(len(held), 3))], outcome)
        case 8:
            if jobs := await every_job(store, queue):
                job = dice.choice(jobs)
                if not job.state.is_final:
                    await store.cancel(job.id)
        case 9:
            dead = [job.id for job in await every_job(store, queue) if job.state in {State.DEAD, State.CANCELLED}]
            if dead:
                await store.replay(dead[:3])
        case 10:
            await store.collect(queue)
        case _:
            await store.add_up(queue, dice.choice([1, 3, 500]))


async def assert_true(store: Store, policy: Policy, *, is_new: bool = False) -> None:
    """The stats say what is so: now, and once everything is folded and added up. (By a new scope, from then on.)"""
    if not is_new:
        await assert_true_now(store, policy)
    await store.run(policies.lanes(policy.queue, keeps=True))
    if not is_new:
        await assert_true_now(store, policy)
    await add_all_up(store, policy.queue)
    await assert_true_now(store, policy)
    now = await store.now()
    due = sum(is_due(job, now) for job in await every_job(store, policy.queue))
    (queue,) = await store.ask(lambda moment: moment.survey([policy.queue]))
    assert (queue.unseen, queue.uncounted) == (due, 0)


async def assert_true_now(store: Store, policy: Policy) -> None:
    for by in policy.scopes:
        assert await shown(store, by, policy.queue) == await truth(store, by, policy.queue), f"by {by}"
    (queue,) = await store.ask(lambda moment: moment.survey([policy.queue]))
    now, jobs = await store.now(), await every_job(store, policy.queue)
    counted = Counter(State.READY if is_due(job, now) else job.state for job in jobs)
    assert (queue.ready, queue.running) == (counted[State.READY], counted[State.RUNNING])
    assert (queue.scheduled.count, queue.dead.count) == (counted[State.SCHEDULED], counted[State.DEAD])
    held = [each for by in policy.scopes for each in await all_keys(store, by, [policy.queue]) if each.held_by]
    by_limit: dict[str, list[KeyStats]] = {}
    for each in held:
        for name in each.held_by:
            by_limit.setdefault(name, []).append(each)
    assert queue.held == {name: Held(len(some), sum(each.waiting for each in some)) for name, some in by_limit.items()}


@pytest.mark.parametrize("seed", range(4))
async def test_figures_equal_the_truth_after_any_lives(store: Store, clock: ManualClock, seed: int) -> None:
    dice = random.Random(seed)
    await store.declare(POLICY)
    held: list[Claim] = []
    for _ in range(3):
        for _ in range(40):
            await live(store, clock, POLICY, dice, held)
        await assert_true(store, POLICY)


async def test_a_policy_with_other_scopes_has_its_keys_counted_from_the_lanes(store: Store, clock: ManualClock) -> None:
    dice = random.Random(3)
    await store.declare(POLICY)
    held: list[Claim] = []
    for _ in range(60):
        await live(store, clock, POLICY, dice, held)
    await assert_true(store, POLICY)
    other = Policy("webhooks", keys=("account", "endpoint"), limits=(Concurrency(3, by=("endpoint", "account")),))
    await store.apply(other)
    for _ in range(30):
        await live(store, clock, other, dice, held)
    await assert_true(store, other, is_new=True)
    assert await all_keys(store, ("endpoint", "account")) != []


async def test_keys_of_a_scope_that_is_no_more_are_forgotten(store: Store) -> None:
    await store.declare(POLICY)
    await given_jobs(store, POLICY, keys("acme"), 2)
    await claim(store, "webhooks", 1)
    await add_all_up(store)
    await store.apply(Policy("webhooks", keys=("account",)))
    await add_all_up(store)
    assert await all_keys(store, ("endpoint",)) == []
    assert [each.key for each in await all_keys(store)] == [("acme",)]


async def test_a_key_says_which_limit_holds_it_back_for_as_long_as_it_does(store: Store) -> None:
    await store.declare(POLICY)
    await given_jobs(store, POLICY, keys("acme"), 5)
    await given_jobs(store, POLICY, keys("globex"), 1)
    started = await claim(store, "webhooks", 10)
    await add_all_up(store)
    assert (await stats_of(store, "acme")).held_by == ("concurrency:account",)
    assert (await stats_of(store, "globex")).held_by == ()
    (queue,) = await store.ask(lambda moment: moment.survey(["webhooks"]))
    assert queue.held == {"concurrency:account": Held(1, 3)}
    await finish(store, [each for each in started if each.keys["account"] == "acme"])
    await finish(store, await claim(store, "webhooks", 10))
    await finish(store, await claim(store, "webhooks", 10))
    await claim(store, "webhooks", 1)
    await add_all_up(store)
    assert (await stats_of(store, "acme")).held_by == ()
    assert (await store.ask(lambda moment: moment.survey(["webhooks"])))[0].held == {}


async def test_a_key_that_is_paused_is_held_by_its_pause_until_it_is_resumed(store: Store) -> None:
    await store.declare(POLICY)
    pause = Override(kind=Kind.PAUSE, scope=(("account", "acme"),))
    await store.change_overrides(["webhooks"], [pause], [], Note(actor="a test", action="pause"))
    await given_jobs(store, POLICY, keys("acme"), 3)
    assert await claim(store, "webhooks", 5) == []
    await add_all_up(store)
    assert (await stats_of(store, "acme")).held_by == ("pause:account",)
    await store.change_overrides(["webhooks"], [], [pause.id], Note(actor="a test", action="resume"))
    await claim(store, "webhooks", 1)
    await add_all_up(store)
    assert "pause:account" not in (await stats_of(store, "acme")).held_by


async def test_a_limit_that_is_no_more_holds_nobody_back(store: Store) -> None:
    await store.declare(POLICY)
    await given_jobs(store, POLICY, keys("acme"), 5)
    await claim(store, "webhooks", 10)
    await add_all_up(store)
    assert (await stats_of(store, "acme")).held_by != ()
    await store.apply(Policy("webhooks", fair=Fair(by="account"), keys=("account", "endpoint")))
    await add_all_up(store)
    assert (await stats_of(store, "acme")).held_by == ()
    assert (await store.ask(lambda moment: moment.survey(["webhooks"])))[0].held == {}


async def test_minutes_say_what_happened_when(store: Store, clock: ManualClock) -> None:
    await store.declare(POLICY)
    first = clock.now() // MINUTE
    await given_jobs(store, POLICY, keys("acme"), 3)
    clock.advance("2s")
    started = await claim(store, "webhooks", 10)
    clock.advance("1m")
    await finish(store, started[:1], ran=SECOND)
    await finish(store, started[1:], Failed("no", SECOND), ran=SECOND)
    await claim(store, "webhooks", 10)
    await add_all_up(store)
    one, two = (await store.ask(lambda moment: moment.minutes(["webhooks"], 0)))["webhooks"]
    assert (one.number, one.arrived, one.started, one.ended) == (first, 3, 2, 0)
    assert (one.waited, one.waited_longest) == (4 * SECOND, 2 * SECOND)
    assert one.denied == {"concurrency:account": 1}
    assert (two.number, two.started, two.ended, two.failed, two.ran) == (first + 1, 1, 2, 1, 2 * SECOND)
    assert [
        each.number for each in (await store.ask(lambda moment: moment.minutes(["webhooks"], clock.now())))["webhooks"]
    ] == [first + 1]
    clock.advance("24h")
    await add_all_up(store)
    assert [each.number for each in (await store.ask(lambda moment: moment.minutes(["webhooks"], 0)))["webhooks"]] == [
        first + 1
    ]


async def test_jobs_that_no_claim_has_seen_are_counted(store: Store) -> None:
    await store.declare(POLICY)
    await given_jobs(store, POLICY, keys("acme"), 3)
    await given_jobs(store, POLICY, keys("acme", "f"), 2, priority=1)
    (queue,) = await store.ask(lambda moment: moment.survey(["webhooks"]))
    assert (queue.ready, queue.unseen, queue.events, queue.counted_at) == (5, 5, 2, None)
    assert {each.key: each.waiting for each in await all_keys(store, ("endpoint",))} == {("e",): 3, ("f",): 2}
    await claim(store, "webhooks", 1)
    assert (await store.ask(lambda moment: moment.survey(["webhooks"])))[0].unseen == 0


async def test_scheduled_jobs_are_counted_by_lane(store: Store, clock: ManualClock) -> None:
    await store.declare(POLICY)
    await given_jobs(store, POLICY, keys("acme"), 3, delay=5 * SECOND)
    await given_jobs(store, POLICY, keys("globex"), 1, delay=2 * SECOND)
    scheduled = await store.ask(lambda moment: moment.scheduled_by_lane(["webhooks"]))
    assert scheduled.is_all
    assert {each.keys["account"]: each.arrived for each in scheduled.lanes} == {"acme": 3, "globex": 1}
    (queue,) = await store.ask(lambda moment: moment.survey(["webhooks"]))
    assert queue.scheduled.count == 4


async def test_the_oldest_job_that_waits_is_known(store: Store, clock: ManualClock) -> None:
    await store.declare(POLICY)
    oldest = clock.now()
    for account in range(130):
        await given_jobs(store, POLICY, keys(account), priority=account % 3)
        clock.advance("1s")
    started = await claim(store, "webhooks", 50)
    await add_all_up(store)
    taken = {each.keys["account"] for each in started}
    first = next(account for account in range(130) if str(account) not in taken)
    assert (await store.ask(lambda moment: moment.survey(["webhooks"])))[0].oldest_ready_at == oldest + first * SECOND


async def test_the_oldest_job_is_known_where_nobody_adds_up(store: Store, clock: ManualClock) -> None:
    """N8: claims have seen it, and whoever claimed is gone."""
    await store.declare(POLICY)
    await add_all_up(store)
    began = clock.now()
    await given_jobs(store, POLICY, keys("acme"), 4)
    clock.advance("1m")
    await given_jobs(store, POLICY, keys("globex"), 4)
    await claim(store, "webhooks", 2)
    clock.advance("20m")
    (queue,) = await store.ask(lambda moment: moment.survey(["webhooks"]))
    assert (queue.unseen, queue.uncounted > 0, queue.oldest_ready_at) == (0, True, began)


async def test_a_survey_names_queues_in_the_order_asked_and_leaves_unknown_ones_out(store: Store) -> None:
    for name in ("b", "a"):
        await store.declare(Policy(name))
    assert [each.queue for each in await store.ask(lambda moment: moment.survey(["b", "nobody", "a"]))] == ["b", "a"]


async def test_a_board_has_the_gates_that_were_asked_for_as_they_are(store: Store) -> None:
    await store.declare(POLICY)
    await given_jobs(store, POLICY, keys("acme"), 3)
    first, _ = await claim(store, "webhooks", 5)
    assert await in_flight_of(store, POLICY, "acme", "nobody") == {"acme": 2, "nobody": 0}
    await finish(store, [first])
    assert await in_flight_of(store, POLICY, "acme") == {"acme": 1}, "although no claim has seen it"


async def in_flight_of(store: Store, policy: Policy, *accounts: str) -> dict[str, int]:
    bound = next(each for each in policy.bound if each.name == "concurrency:account")
    wanted = [(bound, (account,)) for account in accounts]
    boards = await store.ask(lambda moment: moment.boards({policy.queue: wanted}))
    gates = boards[policy.queue].gates
    return {account: gates[policy.gate_of(bound, (account,))].in_flight for account in accounts}


async def test_a_worker_is_seen_until_it_takes_its_report_back(store: Store, clock: ManualClock) -> None:
    one, other = worker_named("one"), worker_named("other")
    of = {"host": "h", "pid": 7, "version": "1", "queues": {"webhooks": 1.0}, "concurrency": 5, "started_at": 1}
    said = msgspec.convert({"name": "one", "every": 5 * SECOND, **of}, WorkerReport)
    await store.run(records.report(one.id, said))
    clock.advance("1s")
    await store.run(records.report(other.id, said))
    seen = await store.ask(Moment.workers)
    assert [each.id for each in seen] == [other.id.hex, one.id.hex]
    assert seen[0].report == said
    assert not seen[1].is_late(clock.now())
    clock.advance("20s")
    assert (await store.ask(Moment.workers))[1].is_late(clock.now())
    await store.run(records.report(other.id, None))
    assert [each.id for each in await store.ask(Moment.workers)] == [one.id.hex]
    clock.advance("24h")
    assert await store.ask(Moment.workers) == []


async def test_what_a_claim_did_is_not_lost_with_the_process_that_claimed(shared_database: Database) -> None:
    store = await shared_database.open()
    await store.declare(POLICY)
    await given_jobs(store, POLICY, keys("acme"), 3)
    gone = await shared_database.open()
    await claim(gone, "webhooks", 1)
    await gone.close()
    await add_all_up(store)
    acme = await stats_of(store, "acme")
    assert (acme.waiting, acme.running) == (2, 1)


async def test_several_who_add_up_at_once_count_everything_once(shared_database: Database) -> None:
    stores = [await shared_database.open() for _ in range(3)]
    await stores[0].declare(POLICY)
    for n in range(30):
        await given_jobs(stores[0], POLICY, keys(n % 5), 2)
        await finish(stores[n % 3], await claim(stores[n % 3], "webhooks", 3))
        await asyncio.gather(*(store.add_up("webhooks", 2) for store in stores))
    await assert_true(stores[0], POLICY)
    assert sum(each.ended for each in await all_keys(stores[0])) == sum(
        job.state is State.DONE for job in await every_job(stores[0])
    )


async def test_a_pass_is_left_to_others_for_a_while_unless_many_tallies_wait(store: Store, clock: ManualClock) -> None:
    await store.declare(POLICY)

    async def something_happens() -> None:
        await given_jobs(store, POLICY, keys("acme"))
        await finish(store, await claim(store, "webhooks", 1))

    await something_happens()
    await add_all_up(store)
    await something_happens()
    assert (await store.add_up("webhooks", 500, 5 * SECOND)).claims == 0
    await something_happens()
    assert (await store.add_up("webhooks", 1, 5 * SECOND)).claims == 1
    clock.advance("6s")
    await something_happens()
    assert (await store.add_up("webhooks", 500, 5 * SECOND)).claims > 0


async def test_looking_changes_nothing(database: Database, clock: ManualClock) -> None:
    """O13"""
    store = await database.open(clock)
    await store.declare(POLICY)
    await given_jobs(store, POLICY, keys("acme"), 5)
    await given_jobs(store, POLICY, keys("acme"), 2, delay=SECOND)
    await finish(store, (await claim(store, "webhooks", 2))[:1], Died("no"))
    await add_all_up(store)
    await given_jobs(store, POLICY, keys("globex"), 2)
    clock.advance("30h")
    await checkpointed(store)
    before = await dump(database, store)
    await store.ask(lambda moment: moment.survey(["webhooks"]))
    await store.ask(lambda moment: moment.minutes(["webhooks"], 0))
    for sort in KeySort:
        listed = partial(Moment.list_keys, queues=["webhooks"], by=ACCOUNT, sort=sort)
        await store.ask(listed)
        await store.ask(partial(listed, held_only=True, search="a"))
    await store.ask(lambda moment: moment.keys_named(["webhooks"], [(ACCOUNT, ("acme",))]))
    await store.ask(lambda moment: moment.scheduled_by_lane(["webhooks"]))
    await in_flight_of(store, POLICY, "acme")
    await store.ask(lambda moment: moment.next_jobs("webhooks", {"account": "acme"}))
    await store.ask(Moment.workers)
    assert await dump(database, store) == before


async def dump(database: Database, store: Store) -> dict[str, list[str]]:
    """Every row of every table."""
    if isinstance(store, SqliteStore):
        return await store._database.read(lambda tx: _dump_sqlite(tx.connection))
    connection = await asyncpg.connect(database.url)
    try:
        tables = await connection.fetch("select tablename from pg_tables where schemaname = 'fairlane'")
        return {
            name: sorted(str(row) for row in await connection.fetch(f"select xmin, * from fairlane.{name}"))
            for (name,) in tables
        }
    finally:
        await connection.close()


def _dump_sqlite(connection: sqlite3.Connection) -> dict[str, list[str]]:
    tables = connection.execute("select name from sqlite_schema where type = 'table'").fetchall()
    return {name: sorted(map(str, connection.execute(f'select * from "{name}"'))) for (name,) in tables}


LIMITED = Policy(
    "webhooks",
    limits=(Concurrency(2, by="account"), Rate(1, per="1m", by="endpoint")),
    keys=("account", "endpoint"),
)


async def held_of(store: Store) -> tuple[dict[str, Held], dict[tuple[str | None, ...], tuple[str, ...]]]:
    """Whom limits hold back, as the survey, the list of keys and the list of those that are held say it."""
    (queue,) = await store.ask(lambda moment: moment.survey(["webhooks"]))
    by_key = {
        each.key: each.held_by for by in (ACCOUNT, ("endpoint",)) for each in await all_keys(store, by) if each.held_by
    }
    assert {
        each.key: each.held_by for _, each in await store.ask(lambda moment: moment.list_held(["webhooks"]))
    } == by_key
    return queue.held, by_key


@pytest.mark.parametrize("is_added_up", [True, False])
async def test_a_rate_that_has_opened_holds_nobody_back_though_nobody_claims(
    store: Store, clock: ManualClock, is_added_up: bool
) -> None:
    await store.declare(LIMITED)
    for account in "abc":
        await given_jobs(store, LIMITED, keys(account), 1)
    assert len(await claim(store, "webhooks", 10)) == 1
    if is_added_up:
        await store.conclude("webhooks")
    assert await held_of(store) == ({"rate/60s:endpoint": Held(1, 2)}, {("e",): ("rate/60s:endpoint",)})
    clock.advance("59s")
    assert (await held_of(store))[0] == {"rate/60s:endpoint": Held(1, 2)}
    clock.advance("1s")
    assert await held_of(store) == ({}, {})


@pytest.mark.parametrize("is_added_up", [True, False])
async def test_a_slot_that_was_freed_holds_nobody_back_though_no_claim_has_seen_it(
    store: Store, is_added_up: bool
) -> None:
    await store.declare(POLICY)
    await given_jobs(store, POLICY, keys("acme"), 5)
    first, _ = await claim(store, "webhooks", 10)
    if is_added_up:
        await store.conclude("webhooks")
    assert (await held_of(store))[0] == {"concurrency:account": Held(1, 3)}
    await finish(store, [first])
    assert await held_of(store) == ({}, {})


@pytest.mark.parametrize("is_added_up", [True, False])
async def test_room_that_a_lane_was_woken_for_and_has_not_used_holds_nobody_back(
    store: Store, is_added_up: bool
) -> None:
    """The claim that wakes it starts another key's job, and leaves the gate alone for a while."""
    policy = Policy("webhooks", limits=(Concurrency(1, by="account"),), keys=("account", "endpoint"))
    await store.declare(policy)
    for endpoint in range(3):
        await given_jobs(store, policy, keys("acme", endpoint), 1)
    first = await claim(store, "webhooks", 10)
    assert len(first) == 1
    await finish(store, first)
    await given_jobs(store, policy, keys("globex"), 1, priority=5)
    (other,) = await claim(store, "webhooks", 1)
    assert other.keys["account"] == "globex"
    if is_added_up:
        await store.conclude("webhooks")
    assert await held_of(store) == ({}, {})
    assert len(await claim(store, "webhooks", 10)) == 1
    assert (await held_of(store))[0] == {"concurrency:account": Held(1, 1)}


@pytest.mark.parametrize("is_added_up", [True, False])
async def test_a_full_limit_holds_jobs_back_though_no_claim_has_come_to_them(store: Store, is_added_up: bool) -> None:
    """The claim that fills a limit has no slot left to find out that it is full: nothing is parked."""
    await store.declare(POLICY)
    await given_jobs(store, POLICY, keys("acme"), 5)
    first, _ = await claim(store, "webhooks", 2)
    await given_jobs(store, POLICY, keys("globex"), 1)
    if is_added_up:
        await store.conclude("webhooks")
    assert (await store.counts("webhooks")).parked_lanes == 0
    assert await held_of(store) == ({"concurrency:account": Held(1, 3)}, {("acme",): ("concurrency:account",)})
    await finish(store, [first])
    assert await held_of(store) == ({}, {})


@pytest.mark.parametrize("is_added_up", [True, False])
async def test_a_rate_without_tokens_holds_jobs_back_until_it_has_one_though_nobody_claims(
    store: Store, clock: ManualClock, is_added_up: bool
) -> None:
    await store.declare(LIMITED)
    for account in "abc":
        await given_jobs(store, LIMITED, keys(account), 1)
    assert len(await claim(store, "webhooks", 1)) == 1
    if is_added_up:
        await store.conclude("webhooks")
    assert await held_of(store) == ({"rate/60s:endpoint": Held(1, 2)}, {("e",): ("rate/60s:endpoint",)})
    clock.advance("1m")
    assert await held_of(store) == ({}, {})


async def test_a_limit_that_queues_share_holds_back_whoever_waits_for_it_now(store: Store) -> None:
    shared = Concurrency(2, by="account", name="gpu")
    train, serve = Policy("train", limits=(shared,)), Policy("serve", limits=(shared,))
    for policy in (train, serve):
        await store.declare(policy)
        await given_jobs(store, policy, {"account": "acme"}, 3)
    started = await claim(store, "train", 2)

    async def held_by_queue() -> dict[str, dict[str, Held]]:
        found = await store.ask(lambda moment: moment.survey(["train", "serve"]))
        return {each.queue: each.held for each in found}

    name = "concurrency:account@gpu"
    assert await held_by_queue() == {"train": {name: Held(1, 1)}, "serve": {name: Held(1, 3)}}
    assert await claim(store, "serve", 2) == []
    assert await held_by_queue() == {"train": {name: Held(1, 1)}, "serve": {name: Held(1, 3)}}
    await finish(store, started)
    assert await held_by_queue() == {"train": {}, "serve": {}}, "although no claim has folded it"


async def test_a_limit_that_queues_share_is_shown_without_slots_that_were_freed(store: Store) -> None:
    shared = Concurrency(2, name="gpu")
    train, serve = Policy("train", limits=(shared,)), Policy("serve", limits=(shared,))
    for policy in (train, serve):
        await store.declare(policy)
        await given_jobs(store, policy, {}, 2)
    first, _ = await claim(store, "train", 2)
    await finish(store, [first])
    for policy in (train, serve):
        wanted = [(bound, ()) for _, bound in policy.queue_gates]
        board = (await store.ask(partial(Moment.boards, wanted={policy.queue: wanted})))[policy.queue]
        (gauge,) = gauges(board, wanted)
        assert (gauge.used, gauge.bound) == (1, 2)


async def test_a_list_is_the_same_however_many_keys_no_claim_has_seen(
    store: Store, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where they are many, it is made from sums of all keys instead of key by key."""
    dice = random.Random(7)
    await store.declare(POLICY)
    held: list[Claim] = []
    for round_ in range(40):
        await live(store, clock, POLICY, dice, held)
        if round_ == 20:
            await store.conclude("webhooks")
    for account in range(12):
        await given_jobs(store, POLICY, keys(account), dice.randrange(4))
    await store.cancel((await given_jobs(store, POLICY, keys("cancelled"), 1))[0])

    async def lists() -> list[list[KeyStats]]:
        found = []
        for sort, held_only, search in product(KeySort, (False, True), ("", "1")):
            asked = partial(Moment.list_keys, queues=["webhooks"], by=ACCOUNT, sort=sort, held_only=held_only)
            after: str | None = None
            listed: list[KeyStats] = []
            while True:
                page = await store.ask(partial(asked, search=search, after=after, limit=3))
                listed += [stats for _, stats in page.keys]
                after = page.after
                if after is None:
                    break
            found.append(listed)
        return found

    one_by_one = await lists()
    assert any(each.waiting and not each.started_at for each in one_by_one[0]), "some are only unseen"
    monkeypatch.setattr("fairlane.store.stats.MANY", 0)
    assert await lists() == one_by_one
    assert await held_of(store) is not None


async def test_jobs_that_come_to_a_full_limit_are_held_before_any_claim_has_seen_them(store: Store) -> None:
    """O14: what a limit holds is never shown as lag."""
    await store.declare(POLICY)
    await given_jobs(store, POLICY, keys("acme"), 2)
    assert len(await claim(store, "webhooks", 10)) == 2
    await store.conclude("webhooks")
    await given_jobs(store, POLICY, keys("acme"), 40)
    await given_jobs(store, POLICY, keys("globex"), 1)
    assert await held_of(store) == (
        {"concurrency:account": Held(1, 40)},
        {("acme",): ("concurrency:account",)},
    )


@pytest.mark.parametrize("is_seen", [True, False])
async def test_a_pause_holds_jobs_until_it_ends_whether_a_claim_has_seen_them_or_not(
    store: Store, clock: ManualClock, is_seen: bool
) -> None:
    await store.declare(POLICY)
    until = clock.now() + 60 * SECOND
    pause = Override(kind=Kind.PAUSE, scope=(("account", "acme"),), expires_at=until)
    await store.change_overrides(["webhooks"], [pause], [], Note(actor="a test", action="pause"))
    await given_jobs(store, POLICY, keys("acme"), 3)
    if is_seen:
        assert await claim(store, "webhooks", 10) == []
    assert await held_of(store) == ({"pause:account": Held(1, 3)}, {("acme",): ("pause:account",)})
    clock.advance("1m")
    assert await held_of(store) == ({}, {})


async def test_a_key_of_a_scope_that_is_new_to_the_policy_is_listed_at_once(store: Store) -> None:
    await store.declare(POLICY)
    await given_jobs(store, POLICY, keys("acme"), 3)
    await claim(store, "webhooks", 1)
    await store.conclude("webhooks")
    other = Policy("webhooks", keys=("account", "endpoint"), limits=(Concurrency(3, by=("endpoint", "account")),))
    await store.apply(other)
    (stats,) = await all_keys(store, ("endpoint", "account"))
    assert (stats.waiting, stats.running) == (2, 1)


async def test_whoever_claims_without_a_worker_keeps_the_journal_short(
    store: Store, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fairlane.store.protocol.AT_CHECKPOINT", 10)
    await store.declare(POLICY)
    for round_ in range(1, 6):
        for _ in range(20):
            await given_jobs(store, POLICY, keys("acme"), 1)
            await finish(store, await claim(store, "webhooks", 1))
        await checkpointed(store)
        (queue,) = await store.ask(lambda moment: moment.survey(["webhooks"]))
        assert queue.uncounted <= 10
        assert (
            sum(each.started for each in (await store.ask(lambda moment: moment.minutes(["webhooks"], 0)))["webhooks"])
            == 20 * round_
        )


async def test_however_many_jobs_no_claim_has_seen_they_are_counted_by_key_and_limit(store: Store) -> None:
    """None are left out, however many events there are."""
    await store.declare(POLICY)
    await given_jobs(store, POLICY, keys("busy"), 2)
    assert len(await claim(store, "webhooks", 10)) == 2
    await store.conclude("webhooks")
    jobs = [job for n in range(12_000) for job in new_jobs(POLICY, keys(n % 3_000), 1)]
    await store.enqueue(jobs)
    for _ in range(3):
        await given_jobs(store, POLICY, keys("busy"), 5)
    (queue,) = await store.ask(lambda moment: moment.survey(["webhooks"]))
    assert (queue.ready, queue.unseen, queue.running) == (12_015, 12_015, 2)
    assert queue.held == {"concurrency:account": Held(1, 15)}
    found = await all_keys(store, sort=KeySort.WAITING, limit=500)
    assert found[0].key == ("busy",)
    assert (len(found), sum(each.waiting for each in found)) == (3_001, 12_015)


async def test_room_that_another_queue_has_left_at_a_shared_limit_holds_nobody_back(store: Store) -> None:
    """O14: the queue itself has not claimed since, and its lane is still parked."""
    seats = Concurrency(1, by="region", name="seats")
    first, second = (Policy(name, limits=(seats,)) for name in ("first", "second"))
    for policy in (first, second):
        await store.declare(policy)
    await given_jobs(store, first, {"region": "eu"}, 1)
    held = await claim(store, "first", 1)
    await given_jobs(store, second, {"region": "eu"}, 3)
    assert await claim(store, "second", 3) == []

    async def held_by() -> tuple[str, ...]:
        page = await store.ask(lambda moment: moment.list_keys(["second"], ("region",)))
        ((_, stats),) = page.keys
        return stats.held_by

    assert await held_by() == ("concurrency:region@seats",)
    await finish(store, held)
    assert await held_by() == ()
    assert await claim(store, "first", 1) == [], "it folds what has ended"
    assert await held_by() == ()
    assert len(await claim(store, "second", 3)) == 1
