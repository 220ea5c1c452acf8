"""Hot statements on PostgreSQL keep to the indexes they were written for, whatever the tables hold."""

from __future__ import annotations

import asyncio
import itertools
import json
import re
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from functools import cache
from typing import Any

import asyncpg
import pytest

from fairlane.clock import ManualClock
from fairlane.job import NewJob
from fairlane.policy import Concurrency, Fair, Policy, Rate
from fairlane.scheduler.snapshot import Plan
from fairlane.store import boards, schedules
from fairlane.store.postgres import PostgresStore
from fairlane.store.postgres.claims import Loaded, Scheduling
from fairlane.store.postgres.connections import STATEMENTS, Connections
from fairlane.store.protocol import FOLD_AT_MOST
from fairlane.testing.postgres import ThrowawayPostgres
from tests.store.harness import claim, claim_once, finish, given_jobs, new_jobs, soon

POLICY = Policy(
    "webhooks",
    fair=Fair(by="account"),
    limits=(Concurrency(5, by="account"), Rate(100, per="1m", by="endpoint")),
)

SETTLING = {
    "cancellations_pkey",
    "jobs_pkey",
    "leases_pkey",
    "queue_states_newest",
    "queues_of_shared_limit",
    "result_listeners_pkey",
    "waiters_pkey",
}
INDEXES = {
    "open_claim": {
        "arrivals_in_order",
        "forced_of_queue",
        "jobs_due",
        "journal_in_order",
        "releases_in_order",
        "waiters_pkey",
    },
    "select_heads": {"jobs_in_lane"},
    "ask_tables": {
        "flows_parked",
        "flows_pkey",
        "flows_ready",
        "gates_pkey",
        "gates_to_wake",
        "jobs_in_lane",
        "lanes_parked",
        "lanes_pkey",
        "lanes_ready",
    },
    "select_all_flows": {"flows_pkey"},
    "select_all_lanes": {"lanes_pkey"},
    "select_all_gates": {"gates_pkey"},
    "write_claim": {"arrivals_in_order", "leases_by_end", "queue_states_newest", "releases_in_order"},
    "put_flows": set(),
    "put_lanes": set(),
    "put_gates": set(),
    "select_journal": {"journal_in_order", "queue_states_newest"},
    "store_journal": {"queue_states_newest"},
    "delete_deltas": {"journal_in_order", "queue_stats_pkey", "queue_states_newest"},
    "seal_journal": {"queue_states_newest"},
    "note_stats": {"queue_states_newest"},
    "note_removed": {"queue_states_newest"},
    "promote": {"jobs_due", "jobs_pkey"},
    "enqueue": {"waiters_pkey"},
    "store_job": {"waiters_pkey"},
    "append_events": {"waiters_pkey"},
    "adopt": {"jobs_pkey", "leases_pkey", "queues_pkey"},
    "are_stored": {"jobs_pkey"},
    "settle_done": SETTLING,
    "settle": SETTLING,
    "select_settled": {"attempts_pkey", "jobs_pkey"},
    "renew": {"cancellations_pkey", "leases_pkey"},
    "select_held": {"jobs_pkey"},
    "select_contexts": {"jobs_pkey"},
    "select_given": {"jobs_pkey"},
    "select_retries": {"attempts_pkey"},
    "lock_expired_leases": {"leases_by_end"},
    "select_abandoned": {"jobs_pkey", "leases_pkey"},
    "cancel_job": {"jobs_pkey", "leases_pkey", "waiters_pkey"},
    "count_kept_places": {"arrivals_in_order", "jobs_keeping_place", "releases_in_order"},
    "select_kept_places": {"jobs_keeping_place"},
    "count_ready": {"arrivals_in_order", "gates_pkey", "queue_states_newest"},
    "prune": {"finished_by_end", "finished_pkey", "jobs_pkey"},
    "walk_jobs": {"jobs_pkey"},
    "walk_jobs_of_queue": {"jobs_in_queue"},
    "walk_running_jobs": {"leases_by_end"},
    "walk_finished": {"finished_by_end"},
    "select_fitting": {"jobs_pkey", "queues_pkey"},
    "lock_entries": {"finished_by_end", "jobs_pkey"},
    "replay": {"jobs_pkey", "waiters_pkey"},
    "purge": {"jobs_pkey"},
    "unfile_jobs": {"finished_pkey"},
    "forget_jobs": {"attempts_pkey", "unique_jobs_pkey", "uniques_of_job", "uniques_pkey"},
    "retry_now": {"jobs_pkey", "waiters_pkey"},
    "count_beyond": {"finished_pkey"},
    "collect_idle": {"flows_pkey", "gates_pkey", "lanes_of_flow", "lanes_pkey", "queue_states_newest"},
    "await_results": set(),
    "withdraw_results": {"result_waiters_pkey"},
    "select_ended": {"jobs_pkey"},
    "select_traces": {"flows_pkey", "gates_pkey", "waiters_pkey"},
    "select_standstills": {"flows_ready", "gates_to_wake", "queue_states_newest", "queues_name_key"},
    "select_on_dead": {"jobs_pkey"},
    "lock_expired_lease": {"leases_pkey"},
    "inherit_claims": {"jobs_pkey", "leases_pkey"},
    "note_error": {"jobs_pkey"},
    "select_value": {"stored_values_pkey"},
    "replace_value": {"stored_values_pkey"},
    "delete_value": {"stored_values_pkey"},
    "delete_value_if_equal": {"stored_values_pkey"},
    "scan_values": {"stored_values_pkey"},
    "lock_shared_limits": {"shared_limit_queues_pkey", "shared_limits_name_key"},
    "load_shared": {
        "queues_pkey",
        "gate_wakeups_pkey",
        "shared_gates_newest",
        "shared_limit_queues_pkey",
        "shared_limits_pkey",
        "shared_releases_in_order",
        "shared_states_newest",
    },
    "select_shared_gates": {"shared_gates_newest"},
    "write_shared": {"queues_name_key", "waiters_pkey"},
    "collect_shared_gates": {"shared_gates_newest", "shared_limit_queues_pkey"},
    "look_before_adding_up": {
        "journal_in_order",
        "key_stats_to_refresh",
        "minutes_pkey",
        "queue_stats_pkey",
        "queues_name_key",
    },
    "select_stats": {"journal_in_order"},
    "delete_stats": {"journal_in_order", "queue_states_newest"},
    "select_queue_stats": {"queue_stats_pkey"},
    "put_queue_stats": set(),
    "put_keys": set(),
    "delete_keys": {"key_stats_pkey"},
    "walk_lanes_in_use": {"lanes_pkey"},
    "walk_gates_in_use": {"gates_pkey"},
    "forget_scopes": {"key_stats_pkey"},
    "reset_keys": {"key_stats_pkey"},
    "delete_idle_keys": {"key_stats_pkey"},
    "select_keys_to_refresh": {"key_stats_to_refresh"},
    "select_minutes_at": {"minutes_pkey"},
    "put_minutes": set(),
    "delete_old_minutes": {"minutes_pkey"},
    "survey": {"jobs_due", "queue_stats_pkey", "queue_states_newest", "queues_name_key"},
    "count_newest_dead": {"finished_pkey", "jobs_pkey", "queues_pkey"},
    "select_minutes": {"minutes_pkey", "queues_name_key"},
    "select_keys": {"key_stats_pkey", "queues_name_key"},
    "find_keys": {"key_stats_pkey", "queues_name_key"},
    "list_keys_by_waiting": {"key_stats_by_waiting", "queues_name_key"},
    "list_keys_by_running": {"key_stats_by_running", "queues_name_key"},
    "list_keys_by_ended": {"key_stats_by_ended", "queues_name_key"},
    "list_keys_by_started": {"key_stats_by_start", "queues_name_key"},
    "list_keys_by_name": {"key_stats_pkey", "queues_name_key"},
    "select_scheduled_by_lane": {"jobs_due", "queues_name_key"},
    "select_stats_of": {"journal_in_order", "queue_stats_pkey", "queues_name_key"},
    "select_tails": {"journal_in_order", "queue_states_newest", "queues_name_key"},
    "select_unseen": {"arrivals_in_order", "jobs_due", "queue_states_newest", "queues_name_key"},
    "select_unseen_given": {"arrivals_in_order", "jobs_due", "queue_states_newest", "queues_name_key"},
    "select_resumed": {"arrivals_in_order", "jobs_keeping_place", "queue_states_newest", "queues_name_key"},
    "select_unseen_lanes": {"arrivals_in_order", "jobs_due", "queue_states_newest", "queues_name_key"},
    "select_key_sums": {"key_stats_pkey", "queues_name_key"},
    "select_held_sums": {"key_figures_held", "queues_name_key"},
    "select_woken_gates": {"queues_name_key", "gate_wakeups_pkey"},
    "select_shared_in_use": {"shared_gates_of_limit", "shared_limits_name_key"},
    "select_shared_ends": {"queues_pkey", "shared_limits_name_key", "shared_releases_in_order"},
    "select_pending_releases": {"queue_states_newest", "queues_name_key", "releases_in_order"},
    "select_keys_of_lanes": {"lanes_pkey", "queues_name_key"},
    "select_gates_named": {"gates_pkey", "queues_name_key"},
    "select_weights_named": {"flows_pkey", "queues_name_key"},
    "select_gates_in_doubt": {"gates_pkey", "gates_to_wake", "key_stats_pkey", "queues_name_key"},
    "select_oldest_lanes": {"lanes_pkey", "queues_name_key"},
    "select_all_lanes_of_flow": {"lanes_of_flow"},
    "select_lanes_of_flows": {"lanes_of_flow"},
    "select_lanes_of_flow": {"lanes_of_flow", "lanes_ready"},
    "select_jobs_at": {"queues_pkey"},
    "put_worker": {"workers_pkey"},
    "delete_worker": {"workers_pkey"},
    "select_workers": {"workers_pkey"},
    "select_schedules_named": {"schedules_pkey"},
    "lock_schedule": {"schedules_pkey"},
    "insert_schedule": set(),
    "replace_schedule": {"schedules_pkey"},
    "keep_schedules": {"schedules_pkey"},
    "fire_schedule": {"schedules_pkey"},
    "name_last_job": {"schedules_pkey"},
    "change_schedule": {"schedules_pkey"},
}


FUNCTIONS = {"open_claim", "settle_done", "write_claim"}
VARIABLES: dict[str, dict[str, str]] = {
    "open_claim": {
        "queue": "integer",
        "state": "fairlane.queue_states",
        "digest": "text",
        "applied_at": "bigint",
        "overrides_end_at": "bigint",
        "now": "bigint",
        "from_seq": "bigint",
        "forgets": "boolean",
    },
    "write_claim": {},
}
"""Functions in PL/pgSQL that name what they are given, and what their last statement knows besides."""


@pytest.fixture
async def store(postgres_url: str) -> AsyncIterator[PostgresStore]:
    store = PostgresStore(postgres_url, clock=ManualClock())
    await store.open()
    yield store
    await store.close()


@pytest.fixture
async def pinned(store: PostgresStore, postgres_url: str) -> AsyncIterator[asyncpg.Connection[Any]]:
    """A connection as the store makes them."""
    connection = await Connections(postgres_url, "a test").connect()
    yield connection
    await connection.close()


@pytest.fixture(scope="session")
def used_databases(postgres: ThrowawayPostgres, postgres_template: str) -> Callable[[int], str]:
    """By how many accounts, a database that they have used: made once, as nobody does more than look at it."""

    @cache
    def used_by(accounts: int) -> str:
        url = asyncio.run(postgres.create_database(f"used_by_{accounts}", template=postgres_template))
        if accounts:
            asyncio.run(_use(url, accounts))
        return url

    return used_by


async def _use(url: str, accounts: int) -> None:
    store = PostgresStore(url, clock=ManualClock())
    await store.open()
    await fill(store, accounts)
    await store.close()
    connection = await asyncpg.connect(url)
    await connection.execute("analyze")
    await connection.close()


@pytest.fixture(params=[0, 1, 400], ids=["never used", "one account", "400 accounts"])
def used_url(request: pytest.FixtureRequest, used_databases: Callable[[int], str]) -> str:
    return used_databases(request.param)


@pytest.fixture
async def used(used_url: str) -> AsyncIterator[asyncpg.Connection[Any]]:
    """A connection to it, as the store makes them."""
    connection = await Connections(used_url, "a test").connect()
    yield connection
    await connection.close()


async def plan_of(connection: asyncpg.Connection[Any], statement: str) -> dict[str, Any]:
    """The generic plan: the one that is made once and used for every set of parameters."""
    text = await body_of(connection, statement) if statement in FUNCTIONS else STATEMENTS[statement]
    prepared = await connection.prepare(text)
    parameters = prepared.get_parameters()
    nothing = f"({', '.join(['null'] * len(parameters))})" if parameters else ""
    await connection.execute(f"prepare asked as {text}")
    try:
        found = await connection.fetchval(f"explain (format json, costs off) execute asked {nothing}")
    finally:
        await connection.execute("deallocate asked")
    plan: dict[str, Any] = json.loads(found)[0]["Plan"]
    return plan


async def body_of(connection: asyncpg.Connection[Any], function: str) -> str:
    """The last statement of a function, with a number for each of its parameters and variables."""
    found = await connection.fetchrow(
        "select prosrc, proargnames, array(select format_type(t, null) from unnest(proargtypes) t) "
        "from pg_proc where oid = $1::text::regproc",
        f"fairlane.{function}",
    )
    assert found is not None
    source, names, types = found
    body: str = source.partition("begin\n")[2]
    if function not in VARIABLES:
        return body.partition(";\n")[0].replace("into settled\n", "")
    named = [*zip(names, types, strict=False), *VARIABLES[function].items()]
    text = body.rpartition("return query\n")[2].partition(";\n")[0]
    numbers = itertools.count(1)
    for name, type_ in named:
        # Not a column: those are named with their table, or set.
        pattern = rf"(?<![.\w]){name}(?![\w(]| =)"
        if re.search(pattern, text):
            text = re.sub(pattern, f"(${next(numbers)}::{type_})", text)
    return text


def nodes(plan: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield plan
    for child in plan.get("Plans", ()):
        yield from nodes(child)


def indexes_of(plan: dict[str, Any]) -> set[str]:
    return {node["Index Name"] for node in nodes(plan) if "Index Name" in node}


def walks(plan: dict[str, Any]) -> list[str]:
    """Nodes that read a table from end to end, or an index of it without knowing where to start."""
    return [
        f"{node['Node Type']} on {node.get('Relation Name')}"
        for node in nodes(plan)
        if node["Node Type"] in {"Seq Scan", "Bitmap Heap Scan", "Bitmap Index Scan", "Hash Join", "Merge Join"}
        or (node["Node Type"] in {"Index Scan", "Index Only Scan"} and "Index Cond" not in node)
    ]


def a_mix(count: int, accounts: int) -> list[NewJob]:
    return [
        job
        for n in range(count // 10)
        for job in new_jobs(POLICY, {"account": n % accounts, "endpoint": n % (2 * accounts)}, 10)
    ]


async def fill(store: PostgresStore, accounts: int) -> None:
    """Jobs waiting, running, done and due later; lanes and flows that are ready and parked."""
    await store.declare(POLICY)
    await store.enqueue(a_mix(4_000, accounts))
    await given_jobs(store, POLICY, {"account": 0, "endpoint": 0}, 200, delay=60_000_000)
    for _ in range(4):
        await finish(store, await claim(store, "webhooks", 100))
    await store.add_up("webhooks")
    await claim(store, "webhooks", 100)
    for number in range(accounts):
        await store.run(schedules.put_schedule(f"schedule-{number}", b"digest", "{}", number, instead_of=None))


@pytest.mark.parametrize("statement", sorted(INDEXES))
async def test_a_hot_statement_keeps_to_its_indexes(used: asyncpg.Connection[Any], statement: str) -> None:
    plan = await plan_of(used, statement)
    assert walks(plan) == []
    assert indexes_of(plan) == INDEXES[statement]


async def test_a_search_reads_labels_from_an_index_alone(
    used: asyncpg.Connection[Any],
) -> None:
    (scan,) = [node for node in nodes(await plan_of(used, "find_keys")) if node.get("Index Name") == "key_stats_pkey"]
    assert scan["Node Type"] == "Index Only Scan"


async def test_listing_schedules_reads_each_of_them_once_and_nothing_else(
    used: asyncpg.Connection[Any],
) -> None:
    # All are wanted, in an order that is not the database's own: there is no index to keep to.
    order, scan = nodes(await plan_of(used, "select_schedules"))
    assert order["Node Type"] == "Sort"
    assert scan["Relation Name"] == "schedules"
    assert "Filter" not in scan


async def test_pruning_looks_at_nothing_that_is_not_old_yet(
    store: PostgresStore, pinned: asyncpg.Connection[Any]
) -> None:
    await fill(store, 400)
    (entries,) = [node for node in nodes(await plan_of(pinned, "prune")) if node.get("Index Name") == "finished_by_end"]
    assert "is_dead" in entries["Index Cond"]
    assert "(at <= " in entries["Index Cond"]
    assert "Filter" not in entries


async def test_claiming_and_finishing_a_job_leaves_its_indexes_alone(
    store: PostgresStore, pinned: asyncpg.Connection[Any]
) -> None:
    await store.declare(POLICY)
    for account in range(20):
        await given_jobs(store, POLICY, {"account": account, "endpoint": 0}, 5)
    while claims := await claim(store, "webhooks", 50):
        await finish(store, claims)
    await store.close()  # sessions report what they did when they end
    updated, hot = await soon(_updates(pinned, "jobs", 200))
    assert updated == 200
    assert hot >= 0.95 * updated  # a claim makes a row longer, so that a page may be one version short


async def _updates(connection: asyncpg.Connection[Any], table: str, least: int) -> tuple[int, int]:
    while True:
        row = await connection.fetchrow(
            "select n_tup_upd, n_tup_hot_upd from pg_stat_user_tables where schemaname = 'fairlane' and relname = $1",
            table,
        )
        if row is not None and row[0] >= least:
            return row[0], row[1]


class Meter:
    """Counts the rows that claims read, from inside their transactions."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.rows = 0
        write = Scheduling.write

        async def metered(scheduling: Scheduling, loaded: Loaded, plan: Plan, *rest: Any) -> Any:
            claims = await write(scheduling, loaded, plan, *rest)
            self.rows = await scheduling.connection.fetchval(
                "select sum(seq_tup_read + coalesce(idx_tup_fetch, 0))::integer from pg_stat_xact_user_tables"
            )
            # What is not flushed would be counted again by the next claim.
            await scheduling.connection.execute("select pg_stat_force_next_flush()")
            return claims

        monkeypatch.setattr(Scheduling, "write", metered)


async def rows_per_claim(store: PostgresStore, meter: Meter, lanes: int, batch: int) -> Sequence[int]:
    """Fold the arrival of so many lanes, then let claims and settlements alternate; what each claim read."""
    policy = Policy(f"lanes-{lanes}", fair=Fair(by="account", charge="count"), limits=(Concurrency(5, by="account"),))
    await store.declare(policy)
    for first in range(0, lanes, 10_000):
        accounts = range(first, min(lanes, first + 10_000))
        await store.enqueue([job for account in accounts for job in new_jobs(policy, {"account": account}, 2)])
    for _ in range(0, lanes, FOLD_AT_MOST):
        await claim_once(store, policy.queue, 1)
    assert (await store.counts(policy.queue)).events == 0
    read = []
    for _ in range(6):
        claims = (await claim_once(store, policy.queue, batch)).claims
        assert len(claims) == batch
        read.append(meter.rows)
        await finish(store, claims)
    return read[1:]


@pytest.mark.slow
async def test_a_claim_reads_as_many_rows_at_a_hundred_thousand_lanes_as_at_a_hundred(
    store: PostgresStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(boards, "EVERY", 3_600.0)  # a checkpoint lets go of a part of the larger board
    meter = Meter(monkeypatch)
    batch = 20
    few = await rows_per_claim(store, meter, 100, batch)
    many = await rows_per_claim(store, meter, 100_000, batch)
    assert max(few) <= 12 * batch
    assert max(many) <= max(few)


@pytest.mark.parametrize("statement", ["select_holds", "select_shared_holds", "walk_gates", "walk_shared_gates"])
async def test_a_census_walks_over_leases_and_never_over_jobs(used: asyncpg.Connection[Any], statement: str) -> None:
    plan = await plan_of(used, statement)
    assert {each.partition(" on ")[2] for each in walks(plan)} <= {"leases"}
    of_jobs = [node["Index Cond"] for node in nodes(plan) if node.get("Relation Name") == "jobs"]
    assert all("(id = " in each for each in of_jobs), of_jobs
