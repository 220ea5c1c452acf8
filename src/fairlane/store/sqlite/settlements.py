"""Ending claims on SQLite: fenced by their lease, with their lane events in the same transaction."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from itertools import groupby
from uuid import UUID

import msgspec

from fairlane.clock import Instant
from fairlane.errors import DuplicateJob
from fairlane.job import BuiltEffects, Claim, State
from fairlane.scheduler.settlement import Settlement, Verdict, abandoned_by
from fairlane.scheduler.settlement import settle as decide
from fairlane.store.faults import Fault, of_sqlite
from fairlane.store.protocol import Landings, Reaped
from fairlane.store.rows import claim_of, dying, encode, not_taken, refused, tell_of_conflicts
from fairlane.store.sqlite import caller_transactions, jobs, rows
from fairlane.store.sqlite.database import Transaction

NO_LIMIT = -1
OF_SHARED = ("ended", "ran", "unstarted", "since", "failed", "neutral", "latest")
"""What the release of a shared gate counts."""


class _Released(msgspec.Struct, array_like=True, gc=False):
    """A release event that is being added up. The figures are those of `scheduler.Release`, in the same order."""

    lane: str
    """In hexadecimal."""
    ended: int = 0
    ran: int = 0
    charged: float = 0.0
    unstarted: int = 0
    refund: float = 0.0
    since: Instant = 0
    failed: int = 0
    neutral: int = 0
    latest: Instant = 0
    kept: int = 0
    lost: int = 0
    signal: int | None = None


class _Ended:
    """The lane events of one settlement, added up per lane, and what each lease still holds."""

    def __init__(self, now: Instant, landed: Landings) -> None:
        self.now = now
        # Failed runs apart, by when they were claimed: whoever counts failures must know whether they are old news.
        self.releases: dict[tuple[int, bytes, int | None, bool], _Released] = {}
        self.shared: dict[tuple[bytes, int, str, int | None], _Released] = {}
        self.arrivals: list[tuple[object, ...]] = []
        self.landed = landed
        """By job that is done, what its follow-ups have met."""
        self.ended: Counter[bytes] = Counter()
        self.timed: set[int] = set()
        """Queues in which a job is due later, or was due just now: one waiter has to learn until when to sleep."""

    def release(
        self,
        settlement: Settlement,
        queue: int,
        lane: bytes,
        claimed_at: Instant,
        charge: float,
        task: str,
        shared: str | None,
    ) -> None:
        """Count the end of one claim."""
        verdict = settlement.verdict
        apart = claimed_at if verdict is Verdict.FAILED else None
        place = (queue, lane, apart, settlement.is_cut_short)
        event = self.releases.get(place)
        if event is None:
            event = self.releases[place] = _Released(lane=lane.hex(), since=self.now)
        events = [event]
        for gate in rows.split_shared(shared) if shared else ():
            passed = (gate, queue, task, apart)
            events.append(self.shared.setdefault(passed, _Released(lane="", since=self.now)))
        for each in events:
            if settlement.unstarted:
                each.unstarted += 1
                each.refund += charge
                each.since = min(each.since, 0 if settlement.is_spent else claimed_at)
            else:
                each.ended += 1
                each.ran += settlement.ran
                each.charged += charge
                each.failed += verdict is Verdict.FAILED
                each.neutral += verdict is Verdict.NEUTRAL
                each.latest = max(each.latest, claimed_at)
                if settlement.lag is not None or each.signal is not None:
                    before = each.ran - settlement.ran if each.signal is None else each.signal
                    each.signal = before + (settlement.ran if settlement.lag is None else settlement.lag)
        event.kept += not settlement.to.is_final
        event.lost += settlement.is_cut_short
        self.ended[settlement.lease.bytes] += 1


def settle(tx: Transaction, settlements: Sequence[Settlement], now: Instant, landed: Landings) -> list[UUID]:
    """Apply what still holds its lease; returns the jobs whose claim was lost."""
    stats = _Ended(now, landed)
    lost: list[UUID] = []
    # One after the other, as they are given; of those that are done, without effects, a whole stretch at once.
    for is_plain, stretch in groupby(settlements, lambda each: each.to is State.DONE and each.effects is None):
        lost += (_finish if is_plain else _settle_each)(tx, list(stretch), stats)
    _ring(tx, stats)
    tx.ended += [each.job for each in settlements]
    for lease, count in stats.ended.items():
        if tx.value("drop_claims", count, lease) == 0:
            tx.run("delete_lease", lease)
            tx.run("delete_cancellations", lease)
    behind = {queue for gate, *_ in stats.shared for (queue,) in tx.all("select_queues_behind", gate)}
    for queue in behind | {queue for queue, *_ in stats.releases}:
        # A freed slot makes a waiting job claimable, and whoever settles may not be there to claim it.
        if queue not in tx.woken and (queue in stats.timed or tx.value("has_waiting_work", queue)):
            tx.woken[queue] = 1
    return lost


def sign(tx: Transaction, settlements: Iterable[Settlement]) -> None:
    """Leave the lease on these jobs: whoever does not hear whether the transaction was committed finds its own work."""
    for each in settlements:
        tx.run("sign_settled", each.lease.bytes, each.job.bytes)


def truly_lost(tx: Transaction, settlements: Iterable[Settlement], lost: Iterable[UUID]) -> list[UUID]:
    """Of these, what is not our own work, done before in a caller's transaction."""
    leases = {each.job: each.lease for each in settlements}
    return [job for job in lost if not tx.value("is_settled", job.bytes, leases[job].bytes)]


def _ring(tx: Transaction, stats: _Ended) -> None:
    together: dict[int, list[_Released]] = {}
    for (queue, *_), event in stats.releases.items():
        together.setdefault(queue, []).append(event)
    for queue, events in together.items():
        tx.run("insert_releases", queue, len(events), encode(events))
    tx.run_many(
        "insert_shared_release",
        [
            (queue, task, *(getattr(event, figure) for figure in OF_SHARED), gate)
            for (gate, queue, task, _), event in stats.shared.items()
        ],
    )
    tx.run_many("insert_arrival", stats.arrivals)


def _finish(tx: Transaction, done: Sequence[Settlement], stats: _Ended) -> list[UUID]:
    """Settle jobs that are done, in as few statements as can be. Returns those whose claim was lost."""
    jobs = b"".join([each.job.bytes for each in done])
    leases = b"".join([each.lease.bytes for each in done])
    without_result, with_result = [], []
    lost = dict(enumerate(done))
    seen: set[int] = set()
    for number, position, queue, lane, claimed_at, charge, task, shared in tx.all(
        "select_claims", len(done), jobs, leases
    ):
        if position in seen:
            continue  # settled twice in one call: the second comes too late
        seen.add(position)
        settlement = lost.pop(number)
        if settlement.result is None:
            without_result.append(position)
        else:
            with_result.append((stats.now, settlement.result, position))
        stats.release(settlement, queue, lane, claimed_at, charge, task, shared)
    if without_result:
        tx.run("finish_jobs", stats.now, encode(without_result))
    if with_result:
        tx.run_many("finish_with_result", with_result)
    return [each.job for each in lost.values()]


def _settle_each(tx: Transaction, settlements: Iterable[Settlement], stats: _Ended) -> list[UUID]:
    lost = []
    for each in settlements:
        on_dead = tx.value("select_on_dead", each.job.bytes) if each.is_death else None
        settlement = each if on_dead is None else dying(each, on_dead, stats.now)
        if not _settle_one(tx, settlement, stats):
            lost.append(each.job)
        elif settlement.effects is not None:
            _land(tx, settlement, settlement.effects, stats)
    return lost


def _land(tx: Transaction, settlement: Settlement, effects: BuiltEffects, stats: _Ended) -> None:
    if not settlement.is_death:
        stats.landed[settlement.job] = jobs.insert(tx, effects.jobs, stats.now) if effects.jobs else {}
        caller_transactions.write(tx, effects.puts, effects.deletes)
        return
    tx.run("begin_effects")
    try:
        follow_ups = effects.jobs
        while follow_ups:
            try:
                tell_of_conflicts(settlement, follow_ups, jobs.insert(tx, follow_ups, stats.now))
                break
            except DuplicateJob as error:
                follow_ups = not_taken(settlement, follow_ups, error.job)
        caller_transactions.write(tx, effects.puts, effects.deletes)
    except Exception as error:
        if of_sqlite(error) not in (None, Fault.OURS):
            raise  # a full disk, say: no fault of theirs
        tx.run("undo_effects")
        tx.run("note_error", refused(settlement, error).error, settlement.job.bytes)
    tx.run("keep_effects")


def _settle_one(tx: Transaction, settlement: Settlement, stats: _Ended) -> bool:
    job, now = settlement.job.bytes, stats.now
    row = tx.one("select_running", job, settlement.lease.bytes)
    if row is None:
        return False
    position, queue, lane, priority, keys, attempt, ready_at, claimed_at, worker, charge, cancel, task, shared = row
    if cancel:
        settlement = settlement.if_asked_to_cancel()
    to, outcome, error, result = settlement.to, settlement.outcome, settlement.error, settlement.result
    counted = attempt if settlement.counts_attempt else attempt - 1
    waits = to is State.SCHEDULED
    due_at = now + (settlement.delay or 0) if waits else None
    finished_at = now if to.is_final else None
    if not to.is_final:
        tx.run("insert_attempt", job, attempt, claimed_at, now, worker, outcome, error)
    ended = (finished_at, due_at, error, outcome, result, waits)
    tx.run("finish_job", to, counted, settlement.suspicion, *ended, position)
    stats.release(settlement, queue, lane, claimed_at, charge, task, shared)
    if to is State.READY:
        stats.arrivals.append((queue, lane, priority, keys, 1, position, ready_at, None, 1, None))
        tx.woken[queue] += 1
    elif waits:
        stats.timed.add(queue)
    return True


def reap(tx: Transaction, now: Instant, limit: int, ended_by: Instant | None = None) -> Reaped:
    """End the claims of leases that ran out."""
    settlements: list[Settlement] = []
    tasks: dict[UUID, str] = {}
    leases = tx.all("select_expired_leases", now if ended_by is None else min(now, ended_by), limit)
    for lease, renewed_at, positions, worker in leases:
        claims = _claims(tx, lease, positions)
        if not claims:
            tx.run("delete_lease", lease)
        for claim in claims:
            ran = max(0, renewed_at - claim.claimed_at)
            settlements.append(decide(claim, abandoned_by(UUID(bytes=worker)), ran))
            tasks[claim.id] = claim.task
        if len(settlements) >= limit:
            break
    settle(tx, settlements, now, {})
    return Reaped(settlements, tx.value("next_lease_end"), tasks)


def claims_beside(tx: Transaction, worker: UUID, leases: Collection[UUID]) -> list[Claim]:
    """The claims of a worker under other leases than these."""
    found = tx.all("select_leases_of_worker", worker.bytes, NO_LIMIT)
    beside = [(lease, positions) for lease, _, positions, _ in found if UUID(bytes=lease) not in leases]
    return [claim for lease, positions in beside for claim in _claims(tx, lease, positions)]


def _claims(tx: Transaction, lease: bytes, positions: str) -> list[Claim]:
    """The claims that still stand under a lease, by the positions of its jobs, as JSON."""
    found = (tx.one("select_claim_at", position, lease) for position in msgspec.json.decode(positions, type=list[int]))
    return [claim_of(row[:-1], UUID(bytes=lease), "", row[-1]) for row in found if row is not None]
