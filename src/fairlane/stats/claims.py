"""What one claim did: who arrived, who started, who ended, and whom a limit held back.

A claim has all of this in hand when its plan is made. It is a part of its entry in the journal; stats are the sum of
these (`keys.py`).
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from fairlane.scheduler.board import Board, Gate, Lane
from fairlane.scheduler.snapshot import GateTally, LaneTally, Snapshot, Start, Tally

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Tally)


def tally(snapshot: Snapshot, board: Board, starts: Iterable[Start]) -> Tally | None:
    """What a claim that is planned so will have done; `None`: nothing worth telling."""
    now, waited, longest = snapshot.now, 0, 0
    lanes: dict[bytes, LaneTally] = {}
    for start in starts:
        told = lanes.get(start.lane) or _of(board.lanes[start.lane], lanes)
        told.started += 1
        wait = now - start.head.ready_at
        if wait > 0:
            told.waited += wait
            waited += wait
            if wait > longest:
                longest = wait
    for bell in snapshot.arrivals:
        # As it was folded: what is taken from a lane that nobody knows is taken from nobody.
        if bell.count and (lane := board.lanes.get(bell.lane)) is not None:
            told = _of(lane, lanes)
            told.arrived += bell.count
            if bell.count > 0 and bell.since > told.newest:
                told.newest = bell.since
    for release in snapshot.releases:
        if (lane := board.lanes.get(release.lane)) is not None:
            told = lanes.get(release.lane) or _of(lane, lanes)
            told.release(release)
    gates = [_gate(gate) for gate in board.gates.values() if gate.waiting or gate.waited or gate.denied]
    return Tally(now, waited, longest, list(lanes.values()), gates) if lanes or gates else None


def _of(lane: Lane, lanes: dict[bytes, LaneTally]) -> LaneTally:
    found = lanes.get(lane.id)
    if found is None:
        found = lanes[lane.id] = LaneTally(lane.keys, lane.priority)
    return found


def _gate(gate: Gate) -> GateTally:
    return GateTally(gate.name, gate.key, gate.waiting > 0, gate.denied)


def encode_tally(told: Tally) -> bytes:
    """A tally as stores keep it."""
    return _encoder.encode(told)


def decode_tally(stored: bytes) -> Tally:
    return _decoder.decode(stored)
