"""What the database itself saw of claims: every start and end of one, in the transaction in which it happened.

Triggers write it down, so that it is committed, undone and lost in a crash together with what it tells. After that, it
is exactly what the database holds to have happened, in an order in which it can have: whoever starts a job because
another has ended began after that end was committed.
"""

from __future__ import annotations

import sqlite3
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from tests.store.harness import Database

__all__ = ["REAPED", "Move", "attend", "ended_in", "read_moves", "set_fault"]

REAPED = "its worker stopped renewing the lease"

POSTGRES = """
create schema witness;
create table witness.moves (
    id bigserial primary key,
    job uuid, was smallint, was_lease uuid, state smallint, lease uuid, error text,
    policy text
);
insert into witness.moves (policy) select policy from fairlane.queues;
create table witness.faults (id bigint);

create function witness.move() returns trigger language plpgsql as $$ begin
    insert into witness.moves (job, was, was_lease, state, lease, error)
    values (new.id, old.state, old.lease, new.state, new.lease, new.error);
    return null;
end $$;
create trigger witnessed after update on fairlane.jobs for each row
    when ((old.state = 2) <> (new.state = 2) or (new.state = 2 and old.lease is distinct from new.lease))
    execute function witness.move();

create function witness.declare() returns trigger language plpgsql as $$ begin
    insert into witness.moves (policy) values (new.policy);
    return null;
end $$;
create trigger witnessed after update of policy on fairlane.queues for each row execute function witness.declare();

create function witness.fail() returns trigger language plpgsql as $$ begin
    if exists (select from witness.faults) then
        raise exception 'no space left on device, says the test' using errcode = '53100';
    end if;
    return new;
end $$;
create trigger failing before update on fairlane.jobs for each row when (old.state <> 2 and new.state = 2)
    execute function witness.fail();
"""
SQLITE = """
create table witness_moves (
    id integer primary key,
    job blob, was integer, was_lease blob, state integer, lease blob, error text,
    policy text
);
insert into witness_moves (policy) select policy from queues;
create table witness_faults (id integer);

create trigger witnessed after update of state, lease on jobs
when (old.state = 2) <> (new.state = 2) or (new.state = 2 and old.lease is not new.lease)
begin
    insert into witness_moves (job, was, was_lease, state, lease, error)
    values (new.id, old.state, old.lease, new.state, new.lease, new.error);
end;
create trigger declared after update of policy on queues
begin
    insert into witness_moves (policy) values (new.policy);
end;
create trigger failing before update of state on jobs
when old.state <> 2 and new.state = 2 and exists (select 1 from witness_faults where id = 1)
begin
    select raise(abort, 'no space left on device, says the test');
end;
create trigger failing_later before insert on journal when exists (select 1 from witness_faults where id = 2)
begin
    select raise(abort, 'no space left on device, says the test');
end;
"""
MOVES = "select id, job, was, was_lease, state, lease, error, policy from {} order by id"
RUNNING = 2


@dataclass(frozen=True, slots=True)
class Move:
    """A claim has begun, or ended, or another policy is in force. `id` rises; after a crash it may be used again."""

    id: int
    job: UUID | None
    ended: UUID | None
    """The lease of the claim that has ended."""
    state: int | None
    """How its job is from then on."""
    began: UUID | None
    is_reaped: bool
    policy: str | None


async def attend(database: Database) -> None:
    """From now on. There is to be one queue."""
    if database.kind == "sqlite-file":
        with sqlite3.connect(database.url) as file:
            file.executescript(SQLITE)
        file.close()
        return
    async with database.transaction(begin=False) as mine:
        await mine.tx.execute(POSTGRES)


async def read_moves(database: Database) -> list[Move]:
    async with database.transaction(begin=False) as mine:
        if database.kind == "sqlite-file":
            return [_move(*row) for row in mine.tx.execute(MOVES.format("witness_moves"))]
        return [_move(*row) for row in await mine.tx.fetch(MOVES.format("witness.moves"))]


def _move(
    number: int, job: Any, was: int, was_lease: Any, state: int, lease: Any, error: str | None, policy: str | None
) -> Move:
    return Move(
        number,
        None if job is None else uuid_of(job),
        uuid_of(was_lease) if was == RUNNING else None,
        state,
        uuid_of(lease) if state == RUNNING else None,
        was == RUNNING and error == REAPED,
        policy,
    )


def uuid_of(value: Any) -> UUID:
    """Of what a driver brings."""
    return value if isinstance(value, UUID) else UUID(bytes=value)


def ended_in(file: sqlite3.Connection) -> set[tuple[UUID, UUID]]:
    """The claims that have ended, as a file says."""
    found = file.execute("select job, was_lease from witness_moves where was = 2")
    return {(UUID(bytes=job), UUID(bytes=lease)) for job, lease in found}


async def set_fault(database: Database, where: int | None) -> None:
    """While it is set, every claim that would start something fails: after its plan, and before its commit. At 1 when
    jobs start, at 2 when the journal is written: on PostgreSQL that is one statement."""
    word = "delete from {}" if where is None else f"insert into {{}} values ({where})"
    async with database.transaction(begin=False) as mine:
        if database.kind == "sqlite-file":
            mine.tx.execute(word.format("witness_faults"))
        else:
            await mine.tx.execute(word.format("witness.faults"))
