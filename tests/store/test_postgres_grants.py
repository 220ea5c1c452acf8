"""Roles by least privilege: each can do all of its work, and nothing else (S3)."""

from __future__ import annotations

import asyncio
import re
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, cast
from urllib.parse import urlsplit, urlunsplit

import asyncpg
import httpx
import pytest
from click.testing import CliRunner

from fairlane import App, Backlog, Concurrency, Effects, Fair, Queue, Rate, State, Unique, context
from fairlane.cli.database import Looking, existing_store
from fairlane.cli.program import program
from fairlane.clock import SystemClock
from fairlane.dashboard.pages import PAGES
from fairlane.operations import JobFilter, Operations
from fairlane.operations.metrics import limits_waited_for
from fairlane.operations.requests import find_jobs
from fairlane.policy import Policy
from fairlane.policy.partitions import Phase, begun, phase_of
from fairlane.store import health, operators, policies, records, repartition, schedules, stats, stats_sums, upkeep
from fairlane.store.audit import Note
from fairlane.store.postgres.grants import ROLES, grants
from fairlane.store.procedures import Work
from fairlane.store.protocol import Store, WorkerIdentity
from fairlane.store.statements import load_statements
from tests.dashboard.harness import ROOT, TOKEN, VIEWER_TOKEN, Site, csrf_of
from tests.forward.paper import PaperForwarder, dispatching
from tests.waiting import until, until_found
from tests.worker.harness import working

NEEDS = {
    "producer": """
        ask attempts cancel compare_and_set_value count_ready declare delete_value enqueue foresee get_value job
        policy_versions put_value scan_values wait_until_ended
    """,
    "worker": """
        adopt ask attempts cancel claim claims_beside collect compare_and_set_value conclude contexts count_gates
        count_ready counts declare delete_value divide enqueue find_jobs fire_schedule foresee
        gates_that_move get_value held job keep_schedules keep_time listen look now policy policy_versions
        prune put_schedule put_value queues reap recount move_misrouted renew report report_progress retries scan_values
        add_up schedules settle time traces wait_until_ended wake_another
    """,
    "viewer": """
        ask attempts audit counts end_session find_jobs given health is_session_ended job
        now policy policy_versions queues schedules standstills time traces
    """,
    "operator": """
        change_overrides change_schedule apply ask attempts audit cancel cancel_jobs check_waiting divide end_session
        find_jobs force gates_that_move is_session_ended job lanes now policy purge queues reap move_misrouted replay
        retry_now schedules time
    """,
}
"""Of each role, the operations of a store that it needs: each is used below, under its rights."""
WITHIN_OTHERS = {"end_expired", "fold", "foresee_replay", "in_force", "insert", "of_one_moment", "replace", "work_of"}
"""What is done within `apply`, `ask`, `conclude`, `claim`, `declare`, `policy`, `replay` and `add_up`."""


class NotedStore:
    """A store that notes which of its operations were used."""

    def __init__(self, real: Store, used: set[str]) -> None:
        self._real = real
        self._used = used

    def __getattr__(self, name: str) -> Any:
        if name != "run":
            self._used.add(name)
        return getattr(self._real, name)

    async def run(self, work: Work[Any], tx: Any = None) -> Any:
        self._used.add(work.name)
        return await self._real.run(work, tx)


class Roles:
    """A migrated database, and its roles."""

    def __init__(self, url: str) -> None:
        self.owner_url = url
        suffix = uuid.uuid4().hex[:8]
        self.names = {purpose: f'{purpose} "{suffix}"' for purpose in ROLES}
        self.used: dict[str, set[str]] = {purpose: set() for purpose in ROLES}
        self.webhooks: dict[str, Queue] = {}

    def url(self, purpose: str) -> str:
        place = urlsplit(self.owner_url)
        name = self.names[purpose].replace(" ", "%20").replace('"', "%22")
        return urlunsplit(place._replace(netloc=f"{name}@{place.netloc.rpartition('@')[2]}"))

    def plain_app(self, purpose: str) -> App:
        """An app without queues, as commands and the dashboard have it."""
        app = App(self.url(purpose))
        make_store = app._make_store
        app._make_store = lambda: cast("Store", NotedStore(make_store(), self.used[purpose]))
        return app

    @asynccontextmanager
    async def operations(self, purpose: str) -> AsyncIterator[tuple[App, Store, Operations]]:
        app = self.plain_app(purpose)
        async with existing_store(app) as store:  # as `fairlane dashboard` and every command do
            yield app, store, Operations(Looking(app, store))

    def app(self, purpose: str) -> App:
        app = self.plain_app(purpose)
        self.webhooks[purpose] = app.queue(
            "webhooks",
            fair=Fair(by="account"),
            limits=[
                Concurrency(5, by="account"),
                Rate(1000, per="1s"),
                Backlog(10_000, by="account"),
                Concurrency(90, name="all"),
            ],
        )
        app.queue("email", partitions=2, partition_by="account", limits=[Concurrency(50), Concurrency(90, name="all")])
        app.queue("engine", limits=[Concurrency(2)])

        @app.task(name="deliver", queue="webhooks", max_attempts=1)
        async def deliver(account: str, fails: bool = False) -> str:
            if fails:
                raise ValueError(account)
            await context().progress(0.5)
            context().enqueue(send.call(account))
            context().put(f"seen/{account}", 1)
            return account

        @app.task(name="send", queue="email")
        async def send(account: str) -> None: ...

        @app.task(name="dies", queue="webhooks", max_attempts=1)
        async def dies(account: str) -> None: ...

        app.schedule("0 * * * *", send, "acme", name="hourly")
        return app


@pytest.fixture
async def roles(postgres_url: str) -> AsyncIterator[Roles]:
    roles = Roles(postgres_url)
    connection = await asyncpg.connect(postgres_url)
    for name in roles.names.values():
        quoted = name.replace('"', '""')
        await connection.execute(f'create role "{quoted}" login')
    named = [word for purpose, name in roles.names.items() for word in (f"--{purpose}", name)]
    printed = CliRunner().invoke(program, ["grants", "--print", *named], catch_exceptions=False)
    await connection.execute(printed.output)
    yield roles
    for name in roles.names.values():
        quoted = name.replace('"', '""')
        await connection.execute(f'drop owned by "{quoted}"; drop role "{quoted}"')
    await connection.close()


async def produce(app: App, webhooks: Queue) -> list[Any]:
    """Jobs, in every way that a producer enqueues."""
    deliver = app.registry["deliver"]
    connection = await asyncpg.connect(app.url)
    try:
        async with connection.transaction():
            in_transaction = await deliver.using(tx=connection).enqueue("tx")
            await app.values.put("in a transaction", 1, tx=connection)
        by_sql = await connection.fetchval(
            """select fairlane.enqueue('send', '["sql"]', queue => 'email', keys => '{"account": "sql"}')"""
        )
    finally:
        await connection.close()
    several = list(await deliver.producer.enqueue_many([deliver.call(f"a{n}") for n in range(300)]))
    for conflict in ("return", "replace"):
        for _ in range(2):
            await deliver.using(unique=Unique(key="once", on_conflict=conflict)).enqueue("unique")
    cancelled = await deliver.using(delay="1h").enqueue("later")
    await cancelled.explain()
    await cancelled.record()
    await in_transaction.explain()
    await webhooks.explain(account="acme")
    await webhooks.explain()
    await (await app.opened()).run(records.policy_versions(["webhooks"]))
    await cancelled.attempts()
    await cancelled.cancel()
    await deliver.dry_run("acme")
    assert await webhooks.pace(account="acme")
    assert await app.values.get("nothing", None) is None
    await app.values.put("mine", 1)
    assert await app.values.compare_and_set("mine", 1, 2)
    assert (await app.values.scan("mine")).items
    await app.values.delete("mine")
    return [in_transaction, await deliver.enqueue("one"), await deliver.enqueue("dead", fails=True), by_sql, *several]


@pytest.mark.parametrize("first", ["producer", "worker"])
async def test_each_role_does_all_of_its_work(
    roles: Roles,
    first: str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    producers_know_at_once: None,
) -> None:
    monkeypatch.setattr("fairlane.store.records.UNFOLDED_AT_MOST", 0)  # producers fold at once
    async with roles.app(first):  # it declares the queues
        pass
    async with roles.app("worker") as worker, roles.app("producer") as producer:
        jobs = await produce(producer, roles.webhooks["producer"])
        await produce(worker, roles.webhooks["worker"])
        waiting = asyncio.create_task(jobs[1].result())
        async with working(worker):
            assert await waiting == "one"
            await until_found(lambda: _is_drained(worker))
        await dispatch(worker)
        await keep_up(worker, roles.webhooks["worker"])
        await look(roles)
        await act(roles, producer)
        await pause_for_a_moment(roles)
        async with working(worker):
            await worker.registry["deliver"].enqueue("soon")
            await until_found(lambda: _is_drained(worker))
        await divide(roles, worker)
    async with roles.operations("operator") as (_, _, operations):
        entries = (await operations.audit.list()).entries
    assert {"expiry", "upkeep"} <= {each.actor for each in entries}, "a worker records what it ends and finishes"
    assert "permission denied" not in caplog.text
    missing = {purpose: set(needed.split()) - roles.used[purpose] for purpose, needed in NEEDS.items()}
    assert not any(missing.values()), missing


def test_every_operation_of_a_store_is_somebodys() -> None:
    declared = {name for name in dir(Store) if not name.startswith("_")} - {"open", "close", "migrate", "run"}
    declared |= {
        name
        for module in (health, operators, policies, records, schedules, stats, stats_sums, upkeep)
        for name, each in vars(module).items()
        if hasattr(each, "__wrapped__") and each.__module__ == module.__name__ and not name.startswith("_")
    } | {"compare_and_set_value", "change_schedule", "lanes"}
    assert declared >= WITHIN_OTHERS
    assert WITHIN_OTHERS | {name for needed in NEEDS.values() for name in needed.split()} == declared


async def dispatch(worker: App) -> None:
    """As `fairlane forward` does, and as the engine's worker does then."""
    forwarder = PaperForwarder(worker)
    task = forwarder.task(paper, queue="engine")
    jobs = [await task.enqueue(number) for number in range(2)]
    async with dispatching(forwarder):
        await until(lambda: len(forwarder.messages) == 2)
        for message in forwarder.messages:
            await forwarder.deliver(message)
        assert [await job.result() for job in jobs] == [0, 1]


def paper(number: int) -> int:
    return number


async def keep_up(worker: App, queue: Queue) -> None:
    """What workers do by themselves, at times of their own; and what they do by hand, and after a lost connection."""
    store = await worker.opened()
    await worker.fire_schedules()
    await worker.upkeep()
    identity = WorkerIdentity(uuid.uuid4(), "by hand")
    await worker.registry["deliver"].enqueue("by hand")
    (claim,) = await queue.claim(1)
    await queue.renew([claim])
    await store.run(records.held([(claim.id, uuid.uuid4())]))
    await store.claims_beside(identity.id, [])
    await find_jobs(store, JobFilter(state=State.READY), None, 1)
    await limits_waited_for(store, [claim._claim])
    await store.wake_another(claim.queue, identity.id)
    await queue.ack([claim])
    for name in await store.run(records.queues()):
        await store.run(upkeep.count_gates(name))
        await store.run(upkeep.recount(name))
        await store.collect(name)
        await store.add_up(name)
        await store.counts(name)
        await store.run(health.traces(name, [], []))
    await store.reap()
    await store.run(records.report(identity.id, None))
    await store.run(records.contexts([claim.id]))
    await store.run(records.retries([claim.id]))
    listener = await store.listen(identity)
    await store.look("webhooks", 1, worker=identity, listener=listener)
    await store.look("webhooks", 0, worker=identity, listener=listener)
    await listener.close()


async def divide(roles: Roles, worker: App) -> None:
    """Operators change the number of partitions; a worker finishes what one has begun."""
    who: dict[str, Any] = {"actor": "ann", "reason": "a test"}
    store = await worker.opened()
    async with roles.operations("operator") as (_, own, operations):
        await operations.queues.pause("email", keys={"account": "paused"}, **who)
        await operations.partitions.change("email", 3, **who)
        # On the way it ends the claims of dead workers, whose jobs may leave effects.
        effects = Effects(enqueue=[worker.registry["send"].call("acme")], put={"dead": 1}, delete=["in a transaction"])
        job = await worker.registry["dies"].using(on_dead=effects).enqueue("acme")
        while await job.status() is not State.DEAD:
            await roles.webhooks["worker"].claim(1, lease="1ms")
            await until_found(lambda: _is_reaped(own))
        assert await worker.values.get("dead") == 1
        first = await own.policy("email")
        assert first is not None
        note = Note(actor="ann", action="partition")
        await repartition.divide(own, begun(first.policy, 4, ("account",)), first.version, (), note)
    await until_found(lambda: _is_divided(worker, store))
    found = await store.policy("email__p3")
    assert found is not None
    assert len(found.policy.overrides.all) == 1, "what operators have set holds in the new partition too"


async def _is_reaped(store: Store) -> bool:
    return bool((await store.reap()).settled)


async def _is_divided(worker: App, store: Store) -> bool:
    await worker.upkeep()
    found = await store.policy("email")
    return found is not None and phase_of(found.policy) is Phase.RESTING


async def pause_for_a_moment(roles: Roles) -> None:
    who: dict[str, Any] = {"actor": "ann", "reason": "a test"}
    async with roles.operations("operator") as (_, _, operations):
        await operations.queues.pause("webhooks", keys={"account": "soon"}, expires_in="100ms", **who)


async def _is_drained(app: App) -> bool:
    return all(not each.ready and not each.running for each in await app.operations.queues.list())


async def look(roles: Roles) -> None:
    async with roles.operations("viewer") as (app, store, operations):
        await look_at(app, operations)
        names = await store.run(records.queues())
        await store.counts("webhooks")
        await store.run(health.traces("webhooks", [], []))
        await store.run(records.given([]))
        await store.run(records.policy_versions(names))
    for command in (
        "status",
        "queues",
        "keys webhooks",
        "workers",
        "jobs list",
        "dead list",
        "audit",
        "overrides",
        "schedules list",
        "doctor",
    ):
        told = await asyncio.to_thread(CliRunner().invoke, program, [*command.split(), "--url", roles.url("viewer")])
        assert "permission denied" not in f"{told.output}{told.exception}", command


async def look_at(app: App, operations: Operations) -> None:
    dead = (await operations.jobs.list(JobFilter(), 1)).jobs[0]
    async with Site.of(app, SystemClock(), token=TOKEN, viewer_token=VIEWER_TOKEN, operations=operations) as site:  # type: ignore[arg-type]
        visitor = await site.visitor("vic", VIEWER_TOKEN)
        values = {"queue": "webhooks", "job": str(dead.id), "key": "acme"}
        for page in PAGES:
            path = page.path
            for name, value in values.items():
                path = path.replace(f"{{{name}}}", value).replace(f"{{{name}:path}}", value)
            answer = await visitor.get(f"{ROOT}{path}", params={"key.account": "a1", "by": "account"})
            assert answer.status_code in (200, 400), (path, answer.text)
            assert "permission denied" not in answer.text
        csrf = csrf_of((await visitor.get(f"{ROOT}/")).text)
        assert (await visitor.post(f"{ROOT}/logout", data={"csrf": csrf})).status_code == 303
        await _api(site.program(VIEWER_TOKEN), dead.id)
    await operations.diagnose()
    await operations.queues.explain("webhooks")


async def _api(client: httpx.AsyncClient, job: object) -> None:
    for path in (
        "overview",
        "queues",
        "queues/webhooks",
        "queues/webhooks/keys?by=account",
        "queues/webhooks/explain",
        "jobs",
        f"jobs/{job}",
        "dead",
        "workers",
        "schedules",
        "audit",
    ):
        answer = await client.get(f"{ROOT}/api/{path}")
        assert answer.status_code == 200, (path, answer.text)


async def act(roles: Roles, producer: App) -> None:
    async with roles.operations("operator") as (app, store, operations):
        await look_at(app, operations)
        await act_on(app, operations, producer)
        later = await producer.registry["deliver"].using(delay="1h").enqueue("acme")
        await store.cancel(later.id, Note(actor="ann", action="cancel"))
        found = await store.policy("engine")
        assert found is not None
        await store.run(policies.check_waiting(found.policy))
        await store.apply(Policy("engine", limits=(Concurrency(3),)), Note(actor="ann", action="apply"))


async def act_on(app: App, operations: Operations, producer: App) -> None:
    who: dict[str, Any] = {"actor": "ann", "reason": "a test"}
    acme = {"account": "acme"}
    await operations.queues.pause("webhooks", keys=acme, **who)
    await operations.queues.resume("webhooks", keys=acme, **who)
    await operations.queues.pause("email", **who)
    await operations.queues.resume("email", **who)
    await operations.limits.set("webhooks", "concurrency:account", 2, keys=acme, **who)
    await operations.limits.clear("webhooks", "concurrency:account", keys=acme, **who)
    await operations.weights.set("webhooks", 2, keys=acme, **who)
    await operations.weights.boost("webhooks", 2, keys=acme, **who)
    await operations.weights.clear("webhooks", keys=acme, **who)
    await operations.queues.suspend("webhooks", **who)
    await operations.queues.unsuspend("webhooks", **who)
    deliver = producer.registry["deliver"]
    later = [await deliver.using(delay="1h").enqueue("acme") for _ in range(4)]
    await operations.jobs.force([later[0].id], **who)
    await operations.jobs.retry([later[1].id], **who)
    await operations.jobs.cancel([later[2].id, later[3].id], **who)
    await operations.jobs.replay([later[2].id], **who)
    await operations.jobs.purge([later[3].id], **who)
    assert (await operations.jobs.replay(JobFilter(queue="webhooks"), **who)).done
    await operations.schedules.pause("hourly", **who)
    await operations.schedules.resume("hourly", **who)
    await operations.schedules.trigger("hourly", **who)
    assert {each.actor for each in (await operations.audit.list()).entries} >= {"ann"}
    async with Site.of(app, SystemClock(), token=TOKEN, operations=operations) as site:  # type: ignore[arg-type]
        visitor = await site.visitor("ann")
        csrf = csrf_of((await visitor.get(f"{ROOT}/")).text)
        assert (await visitor.post(f"{ROOT}/logout", data={"csrf": csrf})).status_code == 303


CHANGES_THE_AUDIT = [
    "delete from fairlane.audit",
    "update fairlane.audit set actor = 'eve'",
    "truncate fairlane.audit",
    "drop table fairlane.audit",
    "alter table fairlane.audit disable trigger all",
]
FORGES = [
    "insert into fairlane.migrations (number, name, checksum) values (99, 'x', 'x')",
    "delete from fairlane.migrations",
    "create table fairlane.mine (id int)",
    "drop table fairlane.jobs",
    "truncate fairlane.jobs",
    "alter function fairlane.enqueue owner to current_user",
]
ENTRY = "insert into fairlane.audit (at, actor, action, target, reason) values (0, 'eve', 'pause', '', '')"
REVIVES = "delete from fairlane.ended_sessions"
FORBIDDEN = {
    "producer": [
        ENTRY,
        REVIVES,
        "select * from fairlane.audit",
        "delete from fairlane.jobs",
        "insert into fairlane.overrides (queue_id, id, document) values (1, 'x', '{}')",
        "delete from fairlane.overrides",
        "delete from fairlane.queues",
        "update fairlane.queues set policy = '{}'",
        "update fairlane.queues set amended = 'x', overrides_end_at = 0",
        "update fairlane.shared_limits set document = '{}'",
        "delete from fairlane.shared_limits",
        "delete from fairlane.finished",
        "update fairlane.attempts set outcome = 'done'",
        "delete from fairlane.schedules",
    ],
    "worker": [
        "select * from fairlane.audit",
        "delete from fairlane.queues",
        "delete from fairlane.schedules",
        "insert into fairlane.ended_sessions (id, expires_at) values ('x', 0)",
    ],
    "viewer": [
        ENTRY,
        REVIVES,
        "select * from fairlane.stored_values",
        "delete from fairlane.jobs",
        "update fairlane.jobs set state = 4",
        "insert into fairlane.arrivals default values",
        "update fairlane.queues set amended = 'x'",
        "select fairlane.enqueue('send', '[]'::json)",
        "select fairlane.cancel(gen_random_uuid())",
        "select nextval('fairlane.positions')",
        "select setval('fairlane.time_ahead', 1)",
    ],
    "operator": [REVIVES, "select * from fairlane.stored_values", "select fairlane.enqueue('send', '[]'::json)"],
}


@pytest.mark.parametrize("purpose", ROLES)
async def test_each_role_is_refused_what_is_not_its_work(roles: Roles, purpose: str) -> None:
    connection = await asyncpg.connect(roles.url(purpose))
    try:
        for statement in [*CHANGES_THE_AUDIT, *FORGES, *FORBIDDEN[purpose]]:
            with pytest.raises(asyncpg.InsufficientPrivilegeError):
                await connection.execute(statement)
    finally:
        await connection.close()


async def test_rights_that_a_role_had_before_are_taken_back(roles: Roles) -> None:
    """Also those to functions, to the schema and to single columns, and those that new tables would bring."""
    owner = await asyncpg.connect(roles.owner_url)
    viewer = '"' + roles.names["viewer"].replace('"', '""') + '"'
    await owner.execute(f"grant all on all tables in schema fairlane to {viewer}")
    await owner.execute(f"grant update (actor) on fairlane.audit to {viewer}")
    await owner.execute(f"grant all on all sequences in schema fairlane to {viewer}")
    await owner.execute(f"grant execute on function fairlane.enqueue, fairlane.cancel to {viewer}")
    await owner.execute(f"grant create on schema fairlane to {viewer}")
    await owner.execute(f"alter default privileges in schema fairlane grant all on tables to {viewer}")
    await owner.execute(grants({"viewer": roles.names["viewer"]}))
    await owner.execute("create table fairlane.new (id integer)")
    await owner.close()
    await test_each_role_is_refused_what_is_not_its_work(roles, "viewer")
    connection = await asyncpg.connect(roles.url("viewer"))
    with pytest.raises(asyncpg.InsufficientPrivilegeError):
        await connection.execute("select * from fairlane.new")
    await connection.close()


def test_the_command_prints_what_the_owner_runs() -> None:
    told = CliRunner().invoke(program, ["grants", "--print", "--worker", 'a"b', "--viewer", "v"])
    assert told.exit_code == 0
    assert told.output.startswith("begin;\n")
    assert told.output.rstrip().endswith("commit;")
    assert 'to "a""b";' in told.output
    assert "producer" not in told.output
    for wrong in (["--print"], ["--print", "--worker", "x", "--viewer", "x"], ["--print", "--worker", "x" * 64]):
        assert CliRunner().invoke(program, ["grants", *wrong]).exit_code != 0


WITHHELD = {
    "producer": "audit ended_sessions minutes",
    "worker": "",
    "viewer": "stored_values",
    "operator": "",
}
"""What a role has no right to, of any kind."""


@pytest.mark.parametrize("purpose", ROLES)
async def test_every_table_is_granted_to_a_role_or_withheld_from_it(roles: Roles, purpose: str) -> None:
    """A table that a migration adds fails here, until somebody has decided which roles need it."""
    connection = await asyncpg.connect(roles.owner_url)
    tables = {name for (name,) in await connection.fetch(TABLES)}
    held = {name for (name,) in await connection.fetch(HELD_TABLES, roles.names[purpose])}
    await connection.close()
    assert tables - held == set(WITHHELD[purpose].split())


async def test_the_grants_name_every_table_and_sequence_one_by_one() -> None:
    for purpose, statement in load_statements("fairlane.store.postgres", "grants.sql").items():
        assert not re.search(r"^grant .* on all ", statement, re.MULTILINE), purpose


async def test_no_function_that_acts_for_its_owner_is_for_everybody(roles: Roles) -> None:
    connection = await asyncpg.connect(roles.url("viewer"))
    assert await connection.fetch(OWNERS_FUNCTIONS) == []
    await connection.close()


TABLES = (
    "select relname from pg_class where relnamespace = 'fairlane'::regnamespace and relkind in ('r', 'p', 'v', 'm')"
)
HELD_TABLES = f"""
    select relname from ({TABLES}) t
    where has_any_column_privilege($1, format('fairlane.%I', relname), 'select, insert, update, references')
       or has_table_privilege($1, format('fairlane.%I', relname), 'delete, truncate, trigger')
"""
OWNERS_FUNCTIONS = """
    select proname from pg_proc
    where pronamespace = 'fairlane'::regnamespace and prosecdef and has_function_privilege(oid, 'execute')
"""
