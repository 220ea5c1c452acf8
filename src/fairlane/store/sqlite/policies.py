"""Policies on SQLite: putting another one in force, with the state that a queue has."""

from __future__ import annotations

from collections.abc import Sequence

from fairlane.clock import Instant
from fairlane.policy.policy import Policy
from fairlane.scheduler.rebuild import rebuild, refuse_to_strand
from fairlane.scheduler.snapshot import GateRow, KeptPlaces, Plan
from fairlane.scheduler.strays import imported, shared_tokens, tokens_of_its_own, tokens_to_share
from fairlane.store.sqlite import claims, rows, sharing
from fairlane.store.sqlite.database import Transaction

__all__ = ["check_waiting", "remake", "replace_policy"]


def replace_policy(
    tx: Transaction,
    queue: claims.QueueInForce,
    policy: Policy,
    now: Instant,
    *,
    accept_missing_keys: bool,
    coming: Sequence[GateRow] = (),
) -> None:
    """Put another policy in force; `InvalidPolicy` where waiting jobs lack a key that it looks at."""
    in_force = policy.overridden(queue.policy.overrides)
    gates = [rows.gate(row) for row in tx.all("select_all_gates", queue.id)]
    tokens = tokens_to_share(queue.policy, policy, gates)
    for name, bound in shared_tokens(queue.policy, policy).items():
        coming = [*coming, *tokens_of_its_own(policy.queue, name, sharing.gates_of(tx, bound))]
    remake(tx, queue, in_force, now, accept_missing_keys=accept_missing_keys, coming=coming)
    tx.run("update_policy", policy.encoded, policy.digest, now, queue.id)
    sharing.put_in_force(tx, queue.id, policy, now)
    sharing.count_running(tx, queue.id, policy)
    sharing.put_tokens(tx, policy, tokens)


def check_waiting(tx: Transaction, queue: claims.QueueInForce, policy: Policy) -> None:
    """Refuse what `replace_policy` would refuse because of jobs that wait, as far as bells have been folded."""
    refuse_to_strand(policy, [rows.lane(row) for row in tx.all("select_all_lanes", queue.id)])


def remake(
    tx: Transaction,
    queue: claims.QueueInForce,
    policy: Policy,
    now: Instant,
    *,
    accept_missing_keys: bool = True,
    coming: Sequence[GateRow] = (),
) -> None:
    """Make flows and gates anew from the lanes, as this policy has them; every lane with ready jobs is woken."""
    queue = claims.fold_all(tx, queue, now)
    lanes = [rows.lane(row) for row in tx.all("select_all_lanes", queue.id)]
    if not accept_missing_keys:
        refuse_to_strand(policy, lanes)
    rebuilt = rebuild(
        policy,
        now,
        queue.state,
        [rows.flow(row) for row in tx.all("select_all_flows", queue.id)],
        lanes,
        imported(policy.queue, [rows.gate(row) for row in tx.all("select_all_gates", queue.id)], coming),
        [] if policy.sequence is None else _kept_places(tx, queue.id),
    )
    for statement in ("delete_flows", "delete_lanes", "delete_gates"):
        tx.run(statement, queue.id)
    queue.known.forget()
    claims.write(tx, queue, Plan([], rebuilt.queue, rebuilt.flows, rebuilt.lanes, rebuilt.gates, False))
    queue.known.forget()


def _kept_places(tx: Transaction, queue: int) -> list[KeptPlaces]:
    found = tx.all("count_kept_places", queue)
    return [KeptPlaces(priority, rows.decode_keys(keys), count) for priority, keys, count in found]
