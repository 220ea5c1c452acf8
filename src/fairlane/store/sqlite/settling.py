"""Ending claims on SQLite: fenced by their lease, with their bells in the same transaction."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from uuid import UUID

import msgspec

from fairlane.clock import Instant
from fairlane.job import Claim, Outcome, StampedEffects, State
from fairlane.scheduler.settlement import Lost, Settlement
from fairlane.scheduler.settlement import settle as decide
from fairlane.store.protocol import Reaped
from fairlane.store.sqlite import jobs, rows, values
from fairlane.store.sqlite.database import Transaction

__all__ = ["reap", "settle"]


class _Tally:
    """The bells of one settlement, added up per lane, and what each lease still holds."""

    def __init__(self) -> None:
        self.releases: dict[tuple[int, bytes], list[float]] = {}
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
        if not _settle_one(tx, each, now, tally):
            lost.append(each.job)
        elif each.effects is not None:
            _apply(tx, each.effects, now, tally)
    tx.run_many(
        "insert_release",
        [
            (queue, lane, int(ended), int(ran), charged, int(unstarted), refund, int(since))
            for (queue, lane), (ended, ran, charged, unstarted, refund, since) in tally.releases.items()
        ],
    )
    tx.run_many("insert_arrival", tally.arrivals)
    for lease, count in tally.ended.items():
        if tx.value("drop_claims", count, lease.bytes) == 0:
            tx.run("delete_lease", lease.bytes)
            tx.run("delete_cancellations", lease.bytes)
    for queue in {queue for queue, _ in tally.releases}:
        # A freed slot makes a waiting job claimable, and whoever settles may not be there to claim it.
        if queue not in tally.woken and tx.value("has_waiting_work", queue):
            tally.woken[queue] = 1
    return lost, tally.woken, tally.replaced


def _apply(tx: Transaction, effects: StampedEffects, now: Instant, tally: _Tally) -> None:
    if effects.jobs:
        ready, conflicts = jobs.insert(tx, effects.jobs, now)
        tally.replaced += [each.holder for each in conflicts.values() if each.outcome is Outcome.REPLACED]
        for queue, count in ready.items():
            tally.woken[queue] = tally.woken.get(queue, 0) + count
    values.write(tx, effects.puts, effects.deletes)


def _settle_one(tx: Transaction, settlement: Settlement, now: Instant, tally: _Tally) -> bool:
    row = tx.one("select_running", settlement.job.bytes, settlement.lease.bytes)
    if row is None:
        return False
    position, job, queue, lane, priority, lane_keys, attempt, _, ready_at, claimed_at, worker, charge, cancel = row
    if cancel:
        settlement = settlement.if_asked_to_cancel()
    to, outcome = settlement.to, settlement.outcome
    counted = attempt if settlement.counts_attempt else attempt - 1
    due_at = now + (settlement.delay or 0) if to is State.SCHEDULED else None
    finished_at = now if to.is_final else None
    if not to.is_final:
        tx.run("insert_attempt", job, attempt, claimed_at, now, worker, outcome, settlement.error)
    tx.run("finish_job", to, counted, finished_at, due_at, settlement.error, outcome, settlement.result, position)
    release = tally.releases.setdefault((queue, lane), [0, 0, 0.0, 0, 0.0, now])
    if settlement.unstarted:
        release[3] += 1
        release[4] += charge
        release[5] = min(release[5], claimed_at)
    else:
        release[0] += 1
        release[1] += settlement.ran
        release[2] += charge
    if to is State.READY:
        tally.arrivals.append((queue, lane, priority, lane_keys, 1, position, ready_at))
        tally.woken[queue] = tally.woken.get(queue, 0) + 1
    tally.ended[settlement.lease] = tally.ended.get(settlement.lease, 0) + 1
    return True


def reap(tx: Transaction, now: Instant, limit: int) -> tuple[Reaped, dict[int, int]]:
    """End the claims of leases that ran out."""
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
    _, woken, _ = settle(tx, settlements, now)
    return Reaped(settlements, tx.value("next_lease_end")), woken


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
