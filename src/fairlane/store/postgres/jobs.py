"""Jobs on PostgreSQL: storing them, looking at them, cancelling them."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from functools import lru_cache
from struct import Struct as Layout
from typing import Any
from uuid import UUID

import asyncpg
from msgspec import Struct
from msgspec.structs import replace

from fairlane.clock import Instant
from fairlane.errors import DuplicateJob, InvalidJob
from fairlane.job import NewJob, State, Until
from fairlane.policy.keys import KEYS_REMEMBERED
from fairlane.policy.unique import Admission, Conflict, Holder, admit
from fairlane.store.postgres.connections import STATEMENTS, Connection, Connections, StoreClock
from fairlane.store.rows import encode, no_such_job
from fairlane.store.rows import record_of as record_of

AT_ONCE = 5_000
"""Jobs that one statement stores; more of them go in several, in one transaction."""
COPIED_FROM = 250
COPIED_PER_LANE = 3
"""So many jobs at least, and so many a lane, are copied in: below, round trips and lane events cost more than is
gained."""


async def insert(
    connection: Connection,
    jobs: Sequence[NewJob],
    queues: Mapping[str, int],
    now: Instant | None,
    *,
    is_callers: bool,
    is_repeated: bool = False,
    progress: Callable[[int], None] = lambda _: None,
) -> dict[UUID, Conflict]:
    """Store jobs, append the events of their lanes and wake whoever waits for them; `DuplicateJob` if an id is taken.

    Returns what met a unique key that another job holds.
    """
    is_unique = any(job.unique is not None for job in jobs)
    if not is_unique and len(jobs) <= AT_ONCE:
        await _store(connection, jobs, queues, now, is_callers=is_callers, is_repeated=is_repeated)
        progress(len(jobs))
        return {}
    async with contextlib.nullcontext() if is_callers else connection.transaction():
        admission = await admitted(connection, jobs, now)
        stored = admission.stored
        if admission.own and not is_repeated:
            raise DuplicateJob(min(admission.own))
        # All were stored together, or none: looking at one of them is enough.
        if admission.own or (is_repeated and await _are_stored(connection, stored[:1], queues)):
            return admission.conflicts
        for old, new in admission.replaced.items():
            _, found = await cancel(connection, old, now, only_waiting=True, reason=f"replaced by job {new}")
            if found is not State.CANCELLED:
                del admission.conflicts[new]  # it has started since we looked, and goes on beside the new one
        await take(connection, admission)
        for first in range(0, len(stored), AT_ONCE):
            some = stored[first : first + AT_ONCE]
            # They are enqueued at the instant at which their keys were decided on: windows are counted from it.
            at = admission.now if is_unique else now
            await _store(connection, some, queues, at, is_callers=is_callers, is_repeated=False)
            progress(first + len(some))
    if len(stored) < len(jobs):
        progress(len(jobs))  # those that were not stored have been decided on too
    return admission.conflicts


async def _store(
    connection: Connection,
    jobs: Sequence[NewJob],
    queues: Mapping[str, int],
    now: Instant | None,
    *,
    is_callers: bool,
    is_repeated: bool,
) -> None:
    try:
        if len(jobs) == 1:
            await connection.execute(STATEMENTS["store_job"], now, is_callers, *_columns(jobs[0], queues))
        elif _are_copied(jobs):
            async with contextlib.nullcontext() if connection.is_in_transaction() else connection.transaction():
                await copy_in(connection, jobs, queues, now, is_callers=is_callers)
        else:
            await connection.execute(STATEMENTS["enqueue"], now, is_callers, [_columns(job, queues) for job in jobs])
    except (asyncpg.DataError, UnicodeEncodeError) as error:
        raise InvalidJob(f"a job cannot be stored as it was given: {error}") from error
    except asyncpg.UniqueViolationError as error:
        # One statement stores all or nothing. If the answer to an earlier try was not heard and all are there as they
        # were given, it was we who stored them.
        if not (is_repeated and await _are_stored(connection, jobs, queues)):
            raise DuplicateJob(_taken(jobs, error)) from error


def _are_copied(jobs: Sequence[NewJob]) -> bool:
    return len(jobs) >= COPIED_FROM and len(jobs) >= COPIED_PER_LANE * len({job.lane for job in jobs})


async def _are_stored(connection: Connection, jobs: Sequence[NewJob], queues: Mapping[str, int]) -> bool:
    """Whether all of these are stored exactly as given. False for an empty batch, which would show nothing."""
    found: bool = await connection.fetchval(STATEMENTS["are_stored"], [_columns(job, queues) for job in jobs])
    return bool(jobs) and found


def _taken(jobs: Sequence[NewJob], error: asyncpg.UniqueViolationError) -> UUID:
    """The id that the server complains of. Asking for it is no choice: the caller's transaction has failed."""
    complaint = error.detail or ""
    return next((job.id for job in jobs if str(job.id) in complaint), jobs[0].id)


def _columns(job: NewJob, queues: Mapping[str, int]) -> tuple[object, ...]:
    return (
        job.id,
        queues[job.queue],
        job.task,
        job.priority,
        job.lane,
        None if job.lane_keys == {**job.keys, "task": job.task} else encode(job.lane_keys),
        encode(job.keys),
        job.payload,
        job.max_attempts,
        job.delay,
        job.run_at,
        job.on_dead,
        None if job.given is None else encode(job.given),
        job.context,
    )


async def cancel(
    connection: Connection, job: UUID, now: Instant | None, *, only_waiting: bool = False, reason: str | None = None
) -> tuple[State, State]:
    """Cancel what waits; what runs is asked to stop, or left alone. Returns its state before and now."""
    row = await connection.fetchrow(STATEMENTS["cancel_job"], job, now, only_waiting, reason)
    if row is None:
        raise no_such_job(job)
    return State(row[0]), State(row[1])


async def admitted(connection: Connection, jobs: Sequence[NewJob], now: Instant | None) -> Admission:
    """What may be stored of these jobs. Their keys stay locked until the transaction ends."""
    if keys := _keys(jobs):
        await connection.execute(STATEMENTS["lock_uniques"], keys)
    return await foreseen(connection, jobs, now)


async def foreseen(connection: Connection, jobs: Sequence[NewJob], now: Instant | None) -> Admission:
    """The same as things stand, without taking anything."""
    keys = _keys(jobs)
    found = await connection.fetch(STATEMENTS["select_holders"], keys, now) if keys else []
    holders = {key: _holder(*taken) for _, key, *taken in found if taken[0] is not None}
    return admit(jobs, holders, found[0][0] if found else now or 0)


async def take(connection: Connection, admission: Admission) -> None:
    """Write down who has the keys now."""
    taken = [
        (key, job.id, unique.digest, unique.until, unique.expires_at(admission.now))
        for key, job in admission.taken.items()
        if (unique := job.unique) is not None
    ]
    if taken:
        # Lists: psycopg writes a tuple as a row.
        columns = [list(column) for column in zip(*taken, strict=True)]
        await connection.execute(STATEMENTS["take_uniques"], *columns, True)


def _keys(jobs: Sequence[NewJob]) -> list[bytes]:
    return sorted({job.unique.id for job in jobs if job.unique is not None})


def _holder(
    job: UUID, digest: bytes, until: int, expires_at: Instant | None, state: int | None, has_started: bool
) -> Holder:
    return Holder(job, digest, Until(until), expires_at, None if state is None else State(state), has_started)


COLUMNS = tuple(re.findall(r"\w+", STATEMENTS["copy_jobs"].partition("fairlane.jobs (")[2].partition(")")[0]))
"""What is copied in, as the statement names it."""
HEADER = b"PGCOPY\n\xff\r\n\x00" + bytes(8)
TRAILER = b"\xff\xff"
NULL = b"\xff\xff\xff\xff"
JSONB = b"\x01"
"""The version of the form in which the server takes `jsonb`: its text."""
READY, SCHEDULED = int(State.READY), int(State.SCHEDULED)
ROWS_AT_ONCE = 250
BYTES_AT_ONCE = 1 << 18
"""Rows, and bytes of payload, that are sent in one piece."""

_start_of_row = Layout(">hi16siqii").pack
_start_of_giving_row = Layout(">hi16siqiqi").pack
_int16 = Layout(">ih").pack
_int32 = Layout(">ii").pack
_int64 = Layout(">iq").pack
_length = Layout(">i").pack


class _Kind(Struct, eq=False):
    """Jobs of a batch that differ in their ids and payloads only."""

    job: NewJob
    is_ready: bool
    first: int
    """The place of the first of them in the batch, counted from 1."""
    last: int = 0
    count: int = 0
    rest: bytes = b""
    """What follows the payload in their rows."""


async def copy_in(
    connection: Connection, jobs: Sequence[NewJob], queues: Mapping[str, int], now: Instant | None, *, is_callers: bool
) -> None:
    """Store jobs, append the events of their lanes and wake whoever waits for them, inside a transaction."""
    if any(job.run_at is not None for job in jobs):
        # Whether they are ready is to be known before their lane events are written. A time of day goes by the wall
        # clock.
        found = await connection.fetchrow(STATEMENTS["select_time"], now)
        assert found is not None
        now, ahead = found
        jobs = [job if job.run_at is None else replace(job, run_at=job.run_at + ahead) for job in jobs]
    kinds = _kinds_of(jobs, now)
    distinct = list(dict.fromkeys(kinds))
    counted = [
        [queues[kind.job.queue] for kind in distinct],
        [kind.job.lane for kind in distinct],
        [kind.job.priority for kind in distinct],
        [encode(kind.job.lane_keys) for kind in distinct],
        [kind.is_ready for kind in distinct],
        [kind.count for kind in distinct],
        [kind.first for kind in distinct],
        [kind.last for kind in distinct],
        [None if kind.job.given is None else encode(kind.job.given) for kind in distinct],
    ]
    row = await connection.fetchrow(STATEMENTS["append_events"], now, is_callers, len(jobs), *counted)
    assert row is not None
    at, positions, _ = row
    for kind in distinct:
        kind.rest = _rest_of_row(kind.job, queues[kind.job.queue], at, is_ready=kind.is_ready)
    stream = _stream(jobs, positions, kinds)
    await connection.copy_to_table("jobs", schema_name="fairlane", columns=COLUMNS, source=stream, format="binary")


def _kinds_of(jobs: Sequence[NewJob], now: Instant | None) -> list[_Kind]:
    """The kind of each job; each kind has counted its jobs."""
    kinds: dict[tuple[Any, ...], _Kind] = {}
    found = []
    for place, job in enumerate(jobs, start=1):
        # A lane stands for its queue, its priority and the keys that it is made of.
        alike = (
            job.lane,
            job.task,
            job.max_attempts,
            job.delay,
            job.run_at,
            job.on_dead,
            None if job.given is None else tuple(job.given.items()),
            job.context,
            *job.keys.items(),
        )
        kind = kinds.get(alike)
        if kind is None:
            kind = kinds[alike] = _Kind(job, _is_ready(job, now), place)
        kind.count += 1
        kind.last = place
        found.append(kind)
    return found


def _is_ready(job: NewJob, now: Instant | None) -> bool:
    if job.run_at is not None:
        return now is not None and job.run_at <= now
    return job.delay is None or job.delay <= 0


def _rest_of_row(job: NewJob, queue: int, now: Instant, *, is_ready: bool) -> bytes:
    """All that follows the payload."""
    due_at = job.run_at if job.run_at is not None else now + (job.delay or 0)
    return b"".join(
        (
            _int64(8, now),
            _int64(8, now),
            _int16(2, READY if is_ready else SCHEDULED),
            NULL if is_ready else _int64(8, due_at),
            _bytes(job.on_dead),
            _text(None if job.given is None else encode(job.given)),
            _text(job.context),
            _int32(4, queue),
            _int16(2, job.priority),
            _int32(4, job.max_attempts),
            _lane_of_row(job.lane, job.task, tuple(job.lane_keys.items()), *job.keys.items()),
        )
    )


@lru_cache(maxsize=KEYS_REMEMBERED)
def _lane_of_row(
    lane: bytes, task: str, lane_keys: tuple[tuple[str, str | None], ...], *keys: tuple[str, str | None]
) -> bytes:
    of_lane = dict(lane_keys)
    is_usual = of_lane == {**dict(keys), "task": task}
    stored = None if is_usual else JSONB + encode(of_lane).encode()
    return _bytes(lane) + _text(task) + _bytes(JSONB + encode(dict(keys)).encode()) + _bytes(stored)


def _bytes(value: bytes | None) -> bytes:
    return NULL if value is None else _length(len(value)) + value


def _text(value: str | None) -> bytes:
    return NULL if value is None else _bytes(value.encode())


async def _stream(jobs: Sequence[NewJob], positions: Sequence[int], kinds: Sequence[_Kind]) -> AsyncIterator[bytes]:
    """The rows in pieces: while the server stores one, the next is written, and others get a turn."""
    columns, size = len(COLUMNS), 0
    written = [HEADER]
    for job, position, kind in zip(jobs, positions, kinds, strict=True):
        payload = job.payload
        if job.given is None:
            start = _start_of_row(columns, 16, job.id.bytes, 8, position, -1, len(payload))
        else:
            start = _start_of_giving_row(columns, 16, job.id.bytes, 8, position, 8, position, len(payload))
        written += (start, payload, kind.rest)
        size += len(payload)
        if size >= BYTES_AT_ONCE or len(written) >= 3 * ROWS_AT_ONCE:
            yield b"".join(written)
            await asyncio.sleep(0)
            written, size = [], 0
    yield b"".join((*written, TRAILER))


STATEMENTS_AT_ONCE = 2
"""While the server carries out one, the next is made."""
JOBS_AT_ONCE = 200
GATHERED_BYTES = 1 << 20

Waiter = asyncio.Future[None]


class InsertBatcher:
    """Where jobs meet on their way to the server."""

    def __init__(self, connections: Connections, clock: StoreClock, queues: Mapping[str, int]) -> None:
        self._connections = connections
        self._clock = clock
        self._queues = queues
        self._waiting: deque[tuple[NewJob, Waiter]] = deque()
        self._under_way = 0
        self._is_starting = False
        self._tasks: set[asyncio.Task[None]] = set()

    async def store(self, job: NewJob) -> None:
        """Store a job of a queue whose number is known; it is durable when this returns."""
        waiter: Waiter = asyncio.get_running_loop().create_future()
        self._waiting.append((job, waiter))
        if not self._is_starting and self._under_way < STATEMENTS_AT_ONCE:
            # It begins once every task that is ready has run: producers that were answered together enqueue together.
            self._is_starting = True
            self._under_way += 1
            started = asyncio.create_task(self._run())
            self._tasks.add(started)
            started.add_done_callback(self._tasks.discard)
        await waiter

    async def _run(self) -> None:
        self._is_starting = False
        together: list[tuple[NewJob, Waiter]] = []
        try:
            while together := self._take():
                await self._write(together)
        finally:
            self._under_way -= 1
            for _, waiter in together:
                waiter.cancel()  # we were cancelled, and they will hear nothing

    def _take(self) -> list[tuple[NewJob, Waiter]]:
        """Those who wait, as many as one statement may hold."""
        taken: list[tuple[NewJob, Waiter]] = []
        size = 0
        while self._waiting and len(taken) < JOBS_AT_ONCE and size < GATHERED_BYTES:
            job, waiter = self._waiting.popleft()
            if not waiter.done():  # else its producer was cancelled meanwhile
                taken.append((job, waiter))
                size += len(job.payload)
        return taken

    async def _write(self, together: Sequence[tuple[NewJob, Waiter]], *, was_tried: bool = False) -> None:
        """Store these jobs, in one transaction if none of them is refused, and answer their producers."""
        batch = [job for job, _ in together]

        async def attempt(connection: Connection, is_repeated: bool) -> None:
            nonlocal was_tried
            was_tried = was_tried or is_repeated
            now = self._clock.parameter()
            await insert(connection, batch, self._queues, now, is_callers=False, is_repeated=was_tried)

        try:
            await self._connections.again(attempt)
        except Exception as error:
            if len(together) > 1 and isinstance(error, DuplicateJob | InvalidJob):
                # The fault of one of them. Whether an earlier try of all has committed, each finds out by itself.
                for each in together:
                    await self._write([each], was_tried=was_tried)
            else:
                for _, waiter in together:
                    _answer(waiter, error)
        else:
            for _, waiter in together:
                _answer(waiter)


def _answer(waiter: Waiter, error: Exception | None = None) -> None:
    if waiter.done():
        return  # cancelled; its job is stored all the same, or not
    if error is None:
        waiter.set_result(None)
    else:
        waiter.set_exception(error)
