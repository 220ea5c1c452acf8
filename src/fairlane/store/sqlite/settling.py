"""Ending claims on SQLite: fenced by their lease, with their bells in the same transaction."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Sequence
from uuid import UUID

import msgspec

from fairlane.clock import Instant
from fairlane.errors import DuplicateJob
from fairlane.job import Claim, NewJob, Outcome, StampedEffects, State
from fairlane.policy.unique import Conflict
from fairlane.scheduler.settlement import Lost, Settlement, Verdict
from fairlane.scheduler.settlement import settle as decide
from fairlane.store.dying import dying, not_taken, refused, tell_of_conflicts
from fairlane.store.protocol import Reaped
from fairlane.store.sqlite import jobs, rows, values
from fairlane.store.sqlite.database import Transaction

__all__ = ["reap", "settle"]

FRACTIONS = (2, 4)
"""The figures of a release bell that are no whole numbers: what was charged, and what is given back of it."""


class _Tally:
    """The bells of one settlement, added up per lane, and what each lease still holds."""

    def __init__(self) -> None:
        # Failed runs apart, by when they were claimed: whoever counts failures must know whether they are old news.
        self.releases: dict[tuple[int, bytes, int | None], list[float]] = {}
        self.shared: dict[tuple[bytes, int, str, int | None], list[float]] = {}
        self.arrivals: list[tuple[object, ...]] = []
        self.ended: dict[UUID, int] = {}
        self.woken: dict[int, int] = {}
        self.replaced: list[UUID] = []


def settle(
    tx: Transaction, settlements: Iterable[Settlement], now: Instant
) -> tuple[list[UUID], dict[int, int], list[UUID]]:
    """Apply what still holds its lease.

    Returns the jobs whose claim was lost, how many may start now by queue, and the jobs that follow-ups replaced.
    """
    tally = _Tally()
    lost = []
    for each in settlements:
        settlement = _with_on_dead(tx, each, now)
        if not _settle_one(tx, settlement, now, tally):
            lost.append(each.job)
        elif settlement.effects is not None:
            _land(tx, settlement, settlement.effects, now, tally)
    tx.run_many(
        "insert_release",
        [
            (queue, lane, *(figure if n in FRACTIONS else int(figure) for n, figure in enumerate(figures)))
            for (queue, lane, _), figures in tally.releases.items()
        ],
    )
    tx.run_many(
        "insert_shared_release",
        [
            (queue, task, *(int(figure) for n, figure in enumerate(figures) if n not in FRACTIONS), gate)
            for (gate, queue, task, _), figures in tally.shared.items()
        ],
    )
    tx.run_many("insert_arrival", tally.arrivals)
    for lease, count in tally.ended.items():
        if tx.value("drop_claims", count, lease.bytes) == 0:
            tx.run("delete_lease", lease.bytes)
            tx.run("delete_cancellations", lease.bytes)
    behind = {queue for gate, *_ in tally.shared for (queue,) in tx.all("select_queues_behind", gate)}
    for queue in behind | {queue for queue, _, _ in tally.releases}:
        # A freed slot makes a waiting job claimable, and whoever settles may not be there to claim it.
        if queue not in tally.woken and tx.value("has_waiting_work", queue):
            tally.woken[queue] = 1
    return lost, tally.woken, tally.replaced


def _with_on_dead(tx: Transaction, settlement: Settlement, now: Instant) -> Settlement:
    stored = tx.value("select_on_dead", settlement.job.bytes) if settlement.is_death else None
    return settlement if stored is None else dying(settlement, stored, now)


def _land(tx: Transaction, settlement: Settlement, effects: StampedEffects, now: Instant, tally: _Tally) -> None:
    if not settlement.is_death:
        if effects.jobs:
            _enqueue(tx, effects.jobs, now, tally)
        values.write(tx, effects.puts, effects.deletes)
        return
    tx.run("begin_effects")
    try:
        _enqueue_what_can_be(tx, settlement, effects.jobs, now, tally)
        values.write(tx, effects.puts, effects.deletes)
    except sqlite3.OperationalError:
        raise  # a full disk, say: no fault of theirs
    except Exception as error:
        tx.run("undo_effects")
        tx.run("note_error", refused(settlement, error).error, settlement.job.bytes)
    tx.run("keep_effects")


def _enqueue_what_can_be(
    tx: Transaction, settlement: Settlement, follow_ups: tuple[NewJob, ...], now: Instant, tally: _Tally
) -> None:
    """Store follow-ups, except for those that are there already."""
    while follow_ups:
        try:
            tell_of_conflicts(settlement, _enqueue(tx, follow_ups, now, tally))
            return
        except DuplicateJob as error:
            follow_ups = not_taken(settlement, follow_ups, error.job)


def _enqueue(tx: Transaction, follow_ups: Sequence[NewJob], now: Instant, tally: _Tally) -> dict[UUID, Conflict]:
    ready, conflicts = jobs.insert(tx, follow_ups, now)
    tally.replaced += [each.holder for each in conflicts.values() if each.outcome is Outcome.REPLACED]
    for queue, count in ready.items():
        tally.woken[queue] = tally.woken.get(queue, 0) + count
    return conflicts


def _settle_one(tx: Transaction, settlement: Settlement, now: Instant, tally: _Tally) -> bool:
    row = tx.one("select_running", settlement.job.bytes, settlement.lease.bytes)
    if row is None:
        return False
    (
        position,
        job,
        queue,
        lane,
        priority,
        lane_keys,
        attempt,
        _,
        ready_at,
        claimed_at,
        worker,
        charge,
        cancel,
        task,
        shared,
    ) = row
    if cancel:
        settlement = settlement.if_asked_to_cancel()
    to, outcome = settlement.to, settlement.outcome
    counted = attempt if settlement.counts_attempt else attempt - 1
    due_at = now + (settlement.delay or 0) if to is State.SCHEDULED else None
    finished_at = now if to.is_final else None
    if not to.is_final:
        tx.run("insert_attempt", job, attempt, claimed_at, now, worker, outcome, settlement.error)
    tx.run(
        "finish_job",
        to,
        counted,
        finished_at,
        due_at,
        settlement.error,
        outcome,
        settlement.result,
        to is State.SCHEDULED,
        position,
    )
    is_failed = settlement.verdict is Verdict.FAILED
    apart = claimed_at if is_failed else None
    bells = [tally.releases.setdefault((queue, lane, apart), [0, 0, 0.0, 0, 0.0, now, 0, 0, 0, 0])]
    bells += [
        tally.shared.setdefault((gate, queue, task, apart), [0, 0, 0.0, 0, 0.0, now, 0, 0, 0])
        for gate in rows.split_shared(shared)
    ]
    for release in bells:
        if settlement.unstarted:
            release[3] += 1
            release[4] += charge
            release[5] = min(release[5], claimed_at)
        else:
            release[0] += 1
            release[1] += settlement.ran
            release[2] += charge
            release[6] += is_failed
            release[7] += settlement.verdict is Verdict.NEUTRAL
            release[8] = max(release[8], claimed_at)
    bells[0][9] += not to.is_final
    if to is State.READY:
        tally.arrivals.append((queue, lane, priority, lane_keys, 1, position, ready_at, None, 1))
        tally.woken[queue] = tally.woken.get(queue, 0) + 1
    tally.ended[settlement.lease] = tally.ended.get(settlement.lease, 0) + 1
    return True


def reap(tx: Transaction, now: Instant, limit: int) -> tuple[Reaped, dict[int, int], list[UUID]]:
    """End the claims of leases that ran out. Returns also how many may start now by queue, and who was replaced."""
    settlements: list[Settlement] = []
    for lease, renewed_at, positions in tx.all("select_expired_leases", now, limit):
        claims = _claims(tx, lease, msgspec.json.decode(positions, type=list[int]))
        if not claims:
            tx.run("delete_lease", lease)
        for claim in claims:
            ran = max(0, renewed_at - claim.claimed_at)
            settlements.append(decide(claim, Lost("its worker stopped renewing the lease"), ran))
        if len(settlements) >= limit:
            break
    _, woken, replaced = settle(tx, settlements, now)
    return Reaped(settlements, tx.value("next_lease_end")), woken, replaced


def _claims(tx: Transaction, lease: bytes, positions: Sequence[int]) -> list[Claim]:
    found = (tx.one("select_claim_at", position, lease) for position in positions)
    return [
        Claim(
            UUID(bytes=job),
            UUID(bytes=lease),
            "",
            task,
            priority,
            rows.decode_keys(keys),
            payload,
            attempt,
            most,
            enqueued_at,
            claimed_at,
            bool(cancel),
        )
        for job, task, priority, keys, payload, attempt, most, enqueued_at, cancel, claimed_at in (
            row for row in found if row is not None
        )
    ]
