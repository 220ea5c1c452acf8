"""Policies as every store keeps them: declared, put in force, changed by operators, divided among partitions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any
from uuid import uuid4

import msgspec

from fairlane.clock import Instant
from fairlane.policy.overrides import Override, OverrideChange
from fairlane.policy.overrides import change_overrides as amended
from fairlane.policy.partitions import as_divided
from fairlane.policy.policy import Policy, check_alike
from fairlane.scheduler.board import wakeups_for_all
from fairlane.scheduler.journal import Delta
from fairlane.scheduler.rebuild import (
    MisroutedLane,
    WaitingLane,
    carried_gates,
    carried_over,
    counted_in,
    gates_of_misrouted,
    imported,
    misrouted_lanes,
    rebuild,
    refuse_to_strand,
    shared_tokens,
    tokens_of_its_own,
    tokens_to_share,
    uncounted,
    weights_of_misrouted,
)
from fairlane.scheduler.snapshot import Ask, GateRow, LaneRow
from fairlane.store.audit import EXPIRY, Note, describe_amendments, record
from fairlane.store.procedures import (
    EVERYONE,
    NOW,
    Procedure,
    Terms,
    Work,
    is_done,
    locked,
    locked_sweep,
    look,
    on_board,
    query,
    run_by,
    snapshot,
    transaction,
    value,
)
from fairlane.store.rows import (
    Declared,
    decode_keys,
    decode_limit,
    decode_policy,
    encode,
    encode_limit,
    queue_number,
    texts,
)


class Advanced(msgspec.Struct, frozen=True):
    """How far a change of the number of partitions has come, in one of them or in all, and what it waits for."""

    is_over: bool = False
    moved: int = 0
    waiting: int = 0
    """Jobs that still have to move, ready or scheduled."""
    running: int = 0
    """Jobs of keys that move: they end first, where they are."""
    until: Instant | None = None
    """Until producers have learned the new number."""


@look
def in_force(queue: str) -> Procedure[Declared | None]:
    """The policy in force, with what operators have changed."""
    return (yield from all_in_force([queue])).get(queue)


def all_in_force(queues: Sequence[str] | None = None) -> Procedure[dict[str, Declared]]:
    """The policies of these queues, or of all."""
    found = yield query("select_policies", None if queues is None else list(queues))
    return {
        name: Declared(decode_policy(text, texts(overrides), texts(shared)), version, is_drift=False)
        for name, text, version, overrides, shared in found
    }


@transaction
def insert(policy: Policy, note: Note | None = None) -> Procedure[bool]:
    """Make a queue known, unless it is; whether it was new. Refused if other queues do not agree on what it shares with
    them."""
    if policy.shared_limits:
        yield from _check_shared(policy)
    is_new = yield from is_done("insert_queue", policy.queue, policy.encoded, policy.digest)
    if is_new and policy.shared_limits:
        yield query("put_sharing", policy.queue, (yield from _insert_shared(policy)))
    if is_new and note is not None:
        yield from record(note, (yield NOW), policy.queue, "version 1", None, policy.encoded)
    return is_new


@locked
def replace(
    queue: str, policy: Policy, note: Note | None = None, *, accept_missing_keys: bool = False
) -> Procedure[Declared]:
    """Put another policy in force, divided as the queue is. Overrides stay."""
    found = yield from _known(queue)
    policy = as_divided(found.policy, policy)
    if found.policy.digest == policy.digest:
        return found  # somebody else was faster
    return (yield from _put_in_force(found, policy, note, accept_missing_keys=accept_missing_keys))


@locked
def divide(
    queue: str, policy: Policy, version: int, gates: Sequence[GateRow] = (), note: Note | None = None
) -> Procedure[bool]:
    """Put the policy of a partition in force, whatever number of partitions there was; with gates that come from other
    partitions. Whether waiting jobs lack a key is asked before, of all partitions: it refuses nothing.

    False, and nothing is changed, if another version is in force than the one given.
    """
    found = yield from _known(queue)
    if found.version != version:
        return False
    yield from _put_in_force(found, policy, note, accept_missing_keys=True, coming=gates)
    return True


def _known(queue: str) -> Procedure[Declared]:
    found = yield from in_force(queue)
    assert found is not None
    return found


def _put_in_force(
    found: Declared, policy: Policy, note: Note | None, *, accept_missing_keys: bool, coming: Sequence[GateRow] = ()
) -> Procedure[Declared]:
    """Flows and gates are made anew from the lanes, and every lane is woken."""
    queue = policy.queue
    number = yield on_board(queue, "number")
    # Under the queue's lock: the locks of all limits that it names or will name.
    yield from _check_shared(policy)
    yield query("lock_shared_limits", number, (yield from _insert_shared(policy)))
    loaded = yield on_board(queue, "fold_all")
    yield on_board(queue, "to_tables", loaded)
    flows, lanes, gates = yield on_board(queue, "select_all")
    if not accept_missing_keys:
        refuse_to_strand(policy, lanes)
    policy = policy.overridden(found.policy.overrides)
    kept = yield on_board(queue, "kept_places", policy)
    tokens = tokens_to_share(found.policy, policy, gates)
    gates = imported(queue, gates, coming)
    for name, bound in shared_tokens(found.policy, policy).items():
        gates += tokens_of_its_own(queue, name, (yield on_board(queue, "sharing.gates_of", bound.limit.name or "")))
    rebuilt = rebuild(policy, loaded.now, loaded.state, flows, lanes, gates, kept)
    yield on_board(queue, "replace", rebuilt, loaded.now)
    yield from _take_over_shared(policy, loaded.now)
    if tokens:
        yield on_board(queue, "sharing.select", [gate.id for gate in tokens])
        yield on_board(queue, "sharing.put", tokens, ())
    version = yield from value("update_policy", number, policy.encoded, policy.digest, loaded.now)
    if note is not None:
        yield from record(note, loaded.now, queue, f"version {version}", found.policy.encoded, policy.encoded)
    yield query("nudge", number, EVERYONE, None)
    yield query("nudge_sharers", number, EVERYONE)
    yield query("tell_holders", number)
    return Declared(policy, version, is_drift=False)


@snapshot
def check_waiting(policy: Policy) -> Procedure[None]:
    """Refuse what `replace` would refuse because of the jobs that wait, as far as claims have seen them."""
    board = (yield on_board(policy.queue, "load")).board
    found = yield query("select_lanes_in_use", (yield on_board(policy.queue, "number")))
    stored = [
        LaneRow(lane, b"", priority, decode_keys(keys), ready, 0, 0, 0, 0, None, 0.0)
        for lane, priority, keys, ready, _, _ in found
    ]
    refuse_to_strand(policy, board.over(Delta(lanes=stored)).lanes)


# Limits that queues share.


def _check_shared(policy: Policy) -> Procedure[None]:
    """Refuse a policy whose shared limits are of another kind or scope in another queue; none is declared meanwhile."""
    yield query("lock_declarations")
    for bound in policy.shared_limits:
        for _, document, other in (yield query("select_shared_limit", bound.limit.name, policy.queue)):
            if other is not None:
                check_alike(policy.queue, bound.limit, other, decode_limit(document))


def _insert_shared(policy: Policy) -> Procedure[list[str | None]]:
    """Store the limits that are new. Returns the names of all."""
    for bound in policy.shared_limits:
        yield query("insert_shared_limit", bound.limit.name, encode_limit(bound.limit))
    return [bound.limit.name for bound in policy.shared_limits]


def _take_over_shared(policy: Policy, now: Instant) -> Procedure[None]:
    """Once the queue's state is made anew: it names these limits, with these bounds, and they count what runs."""
    queue = policy.queue
    yield query("put_sharing", queue, [bound.limit.name for bound in policy.shared_limits])
    yield on_board(queue, "sharing.learn_numbers", policy)
    for bound in policy.shared_limits:
        limit, document = bound.limit, encode_limit(bound.limit)
        ((_, before, _),) = yield query("select_shared_limit", limit.name, queue)
        if before != document:
            # Every queue is to look at the new bound.
            yield query("update_shared_limit", limit.name, document)
            gates = yield on_board(queue, "sharing.gates_of", limit.name)
            gates = carried_over([gate for gate in gates if gate.limit == bound.name], limit, now)
            yield on_board(queue, "sharing.put", gates, wakeups_for_all(gates))
    if found := uncounted(policy, (yield on_board(queue, "sharing.running"))):
        known = yield on_board(queue, "sharing.select", sorted({gate.id for _, gates in found for gate in gates}))
        yield on_board(queue, "sharing.put", counted_in(queue, found, known), ())
        yield on_board(queue, "sharing.mark", found)


# Overrides.


@locked
def change_overrides(
    queues: Sequence[str], put: Sequence[Override], remove: Sequence[str], note: Note
) -> Procedure[list[OverrideChange]]:
    """Set and remove overrides of all partitions of a queue, in one transaction with one entry of the audit, under the
    first name; in force at every claimer's next claim. `InvalidOverride` where one has no place. One whose time has
    come ends by itself, and the jobs that it held back are looked at then."""
    found: list[tuple[Policy, Instant]] = []
    for queue in queues:
        yield from end_expired(queue)
        found.append((yield on_board(queue, "in_force")))
    # All are asked before any is changed: what one partition refuses is refused.
    amendments = [amended(policy, put, remove) for policy, _ in found]
    for (policy, now), override_change in zip(found, amendments, strict=True):
        if override_change.changes:
            yield from _store(policy, override_change, now)
    if any(each.changes for each in amendments):
        yield from record(note, found[0][1], queues[0], *describe_amendments(amendments))
    return amendments


@locked
def end_expired(queue: str) -> Procedure[None]:
    """End the overrides of a queue whose time has come."""
    policy, now = yield on_board(queue, "in_force")
    if not (ended := policy.overrides.expired(now)):
        return
    override_change = amended(policy, [], [each.id for each in ended])
    yield from _store(policy, override_change, now)
    if override_change.changes:
        note = Note(actor=EXPIRY, action="expire")
        yield from record(note, now, policy.queue, *describe_amendments([override_change]))


def _store(policy: Policy, override_change: OverrideChange, now: Instant) -> Procedure[None]:
    """Store overrides, and wake the lanes that may start now: where that may be every lane, the board is rebuilt."""
    queue, changed = policy.queue, policy.overridden(override_change.overrides)
    number = yield on_board(queue, "number")
    loaded = (yield on_board(queue, "fold_all")) if override_change.rebuilds else (yield on_board(queue, "load"))
    yield on_board(queue, "to_tables", loaded)
    if override_change.rebuilds:
        flows, lanes, gates = yield on_board(queue, "select_all")
        kept = yield on_board(queue, "kept_places", policy)
        yield on_board(queue, "replace", rebuild(changed, now, loaded.state, flows, lanes, gates, kept), now)
    before, after = override_change.before, override_change.after
    yield query("delete_overrides", number, [each.id for each in before])
    yield query("put_overrides", number, [each.id for each in after], [encode(each) for each in after])
    held = (yield on_board(queue, "ask", Ask(gates=list(override_change.wakes)))).gates
    yield on_board(queue, "put_gates", carried_gates(changed, now, held), now)
    # A name that no other state of any queue has: a process that has read it has these overrides.
    yield query("update_overridden", number, uuid4().hex, override_change.overrides.expires_at)
    yield query("nudge", number, EVERYONE, None)
    yield query("tell_holders", number)


# Partitions. The state of each is its own; jobs go from one to another as facts do, by lane events: they have left
# here, and come there.


@locked
def move_misrouted(queue: str, limit: int = 1_000) -> Procedure[Advanced]:
    """Move waiting jobs of a partition to where they belong, each in its place: up to `limit` ready and as many
    scheduled ones."""
    policy, _ = yield on_board(queue, "in_force")
    if policy.partition is None or not policy.partition.is_guarded:
        return Advanced()
    number = yield on_board(queue, "number")
    yield on_board(queue, "checkpoint", (yield on_board(queue, "fold_all")))
    misrouted, later = (misrouted_lanes(policy, lanes) for lanes in (yield from _select_lanes(number)))
    homes = {}
    for home in sorted({lane.queue for lane in (*misrouted, *later)}):
        homes[home] = yield from queue_number(home)
    chosen: list[tuple[MisroutedLane, int]] = []
    left = limit
    for lane in misrouted:
        if left > 0 and lane.was.ready > 0:
            chosen.append((lane, min(lane.was.ready, left)))
            left -= lane.was.ready
    moved: Counter[int] = Counter()
    if chosen:
        rows = [(each.was.id, each.was.floor, most, homes[each.queue], each.lane) for each, most in chosen]
        moved.update(dict(map(tuple, (yield query("move_ready_jobs", *map(list, zip(*rows, strict=True)))))))
    if later:
        due = [(each.was.id, homes[each.queue], each.lane) for each in later]
        found = yield query("move_scheduled_jobs", number, *map(list, zip(*due, strict=True)), limit)
        moved.update(dict(map(tuple, found)))
    for number, count in moved.items():
        yield query("nudge", number, count, None)
    waiting = sum(lane.was.ready for lane in (*misrouted, *later)) - moved.total()
    running = sum(lane.was.in_flight for lane in misrouted)
    return Advanced(moved=moved.total(), waiting=max(0, waiting), running=running)


def _lanes(queue: str) -> Procedure[list[WaitingLane]]:
    yield on_board(queue, "checkpoint", (yield on_board(queue, "fold_all")))
    used, later = yield from _select_lanes((yield on_board(queue, "number")))
    return used + later


_lanes_folded = locked_sweep(_lanes)
_lanes_seen = run_by(Terms(writes=True, is_together=True, is_durable=False, locks=True, keeps=False))(_lanes)


def lanes(queue: str, *, keeps: bool = False) -> Work[list[WaitingLane]]:
    """The lanes of jobs that wait or run, and those that scheduled jobs will join, once lane events are folded as a
    claim would. Nothing is changed unless it `keeps` what it has folded."""
    return (_lanes_folded if keeps else _lanes_seen)(queue)


def _select_lanes(queue: int) -> Procedure[tuple[list[WaitingLane], list[WaitingLane]]]:
    """Lanes of jobs that are ready or run, as far as lane events have been folded; and those of scheduled jobs."""
    used = yield query("select_lanes_in_use", queue)
    later = yield query("select_scheduled_lanes", queue)
    return [_waiting(*row) for row in used], [_waiting(*row) for row in later]


def _waiting(lane: bytes, priority: int, keys: str, *counts: Any) -> WaitingLane:
    return WaitingLane(lane, priority, decode_keys(keys), *counts)


@locked_sweep
def gates_that_move(queue: str, was: int) -> Procedure[list[tuple[str, GateRow]]]:
    """The gates of keys that were at home here, when there were `was` partitions, and belong to another one now; each
    with the name of that one."""
    policy = (yield from _known(queue)).policy
    yield on_board(queue, "checkpoint", (yield on_board(queue, "load")))
    flows, _, gates = yield on_board(queue, "select_all")
    return gates_of_misrouted(policy, was, gates) + weights_of_misrouted(policy, was, flows)
