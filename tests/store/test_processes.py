"""Real processes on one database."""

from __future__ import annotations

from collections import Counter, defaultdict

import msgspec
import pytest

from fairlane.job import State
from fairlane.policy import Concurrency, Fair, Policy
from fairlane.store import records
from tests.store.harness import Database, claim, given_jobs, ids, state_of
from tests.store.processes import FOLLOW_UPS, Run, follow_up_of, killed_while_it_acks, run_together


def most_at_once(runs: list[Run]) -> int:
    """The highest number of runs that overlap."""
    # An end at the very instant of a start does not overlap with it.
    events = sorted([(run.start, 1) for run in runs] + [(run.end, -1) for run in runs])
    running = highest = 0
    for _, change in events:
        running += change
        highest = max(highest, running)
    return highest


# A09
@pytest.mark.slow
@pytest.mark.parametrize(
    "policy",
    [
        Policy("webhooks", limits=(Concurrency(3, by="account"),)),
        Policy("webhooks", fair=Fair(by="account"), limits=(Concurrency(3, by="account"), Concurrency(12))),
    ],
    ids=["fifo", "fair"],
)
async def test_no_key_ever_has_more_in_flight_than_its_limit_among_processes(
    shared_database: Database, policy: Policy
) -> None:
    store = await shared_database.open()
    await store.declare(policy)
    jobs = [job for n in range(8) for job in await given_jobs(store, policy, {"account": n}, 60)]
    told = await run_together("work", shared_database, 4)
    runs = [run for each in told for run in msgspec.json.decode(each, type=list[Run])]
    assert Counter(run.job for run in runs) == Counter(map(str, jobs))
    by_account: defaultdict[str, list[Run]] = defaultdict(list)
    for run in runs:
        by_account[run.account].append(run)
    assert {account: most_at_once(own) for account, own in by_account.items() if most_at_once(own) > 3} == {}
    assert await claim(store, "webhooks", 10) == []
    assert (await store.counts("webhooks")).running == 0


# L16, L18
@pytest.mark.slow
async def test_a_process_that_is_killed_while_it_acks_leaves_all_or_nothing_of_each_ack(
    shared_database: Database,
) -> None:
    policy = Policy("webhooks")
    store = await shared_database.open()
    await store.declare(policy)
    await store.declare(FOLLOW_UPS)
    jobs = await given_jobs(store, policy, count=200)
    for acks in (1, 7, 20, 3):
        await killed_while_it_acks(shared_database, acks)
    landed = []
    for job in jobs:
        is_done = await state_of(store, job) is State.DONE
        assert (await store.run(records.get_value(str(job))) is not None) is is_done
        if is_done:
            landed.append(follow_up_of(job))
    assert len(landed) >= 31
    assert sorted(ids(await claim(store, "follow-ups", 200))) == sorted(landed)


# A09, E09
@pytest.mark.slow
@pytest.mark.parametrize("by", [None, "account"], ids=["keyless", "keyed"])
async def test_shared_limits_hold_among_processes_and_never_deadlock(shared_database: Database, by: str | None) -> None:
    small, large = Concurrency(5, by=by, name="a"), Concurrency(7, name="b")
    train = Policy("train", fair=Fair(by="account"), limits=(small, large))
    serve = Policy("serve", limits=(large, small), keys=("account",))
    store = await shared_database.open()
    jobs = []
    for policy in (train, serve):
        await store.declare(policy)
        for account in range(6):
            jobs += await given_jobs(store, policy, {"account": account}, 30)
    told = await run_together("share", shared_database, 4)
    runs = [run for each in told for run in msgspec.json.decode(each, type=list[Run])]
    assert Counter(run.job for run in runs) == Counter(map(str, jobs))
    assert most_at_once(runs) <= (5 if by is None else 7)
    for queue in ("train", "serve"):
        assert await claim(store, queue, 10) == []
        assert (await store.counts(queue)).running == 0
