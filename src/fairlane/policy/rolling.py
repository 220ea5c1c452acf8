"""A rolling window: which starts still count, exactly, as a gate remembers them.

A gate's memo is `{"taken": 7, "now": instant, "starts": [[instant, count], …]}`, oldest first; `taken` is the sum of
the counts, `now` the time of the claim that made the last entry, absent once that is given back. Claims of one batch
share an entry. A start counts in the half-open window that begins with it: one that was made `per` ago has left.
Whatever is not known exactly is counted for longer, never for less time.
"""

from __future__ import annotations

from typing import Any

from fairlane.clock import Instant
from fairlane.policy.gates import GateState

__all__ = ["EXACT_ENTRIES", "SLICES", "give_back", "opens_again_at", "postpone", "room_at", "take"]

EXACT_ENTRIES = 1_000
"""So many instants are remembered one by one."""
SLICES = 500
"""Where there are more, those of one slice of the window, a five-hundredth, count as made at the last of them."""


def room_at(gate: GateState, limit: int, per: int, now: Instant) -> int:
    """How many jobs may start now."""
    memo: dict[str, Any] | None = gate.memo
    if memo is None:
        return limit
    room: int = limit - memo["taken"]
    for instant, count in memo["starts"]:
        if instant + per > now:
            break
        room += count
    return room if room > 0 else 0


def take(gate: GateState, per: int, now: Instant, count: int, at: Instant | None = None) -> None:
    """Remember jobs that start, now or `at` a later instant, and forget those that have left the window."""
    memo = gate.memo or {"taken": 0, "starts": []}
    starts: list[list[int]] = memo["starts"]
    left = 0
    while left < len(starts) and starts[left][0] + per <= now:
        memo["taken"] -= starts[left][1]
        left += 1
    del starts[:left]
    # Never before the entry before it: that may lie ahead, because its jobs start late or a clock was set back.
    instant = max(now if at is None else at, starts[-1][0] if starts else 0)
    if starts and (starts[-1][0] == instant if at is not None else memo.get("now") == now):
        starts[-1][1] += count
    else:
        starts.append([instant, count])
        if len(starts) > EXACT_ENTRIES:
            memo["starts"] = starts = _merged(starts, max(1, per // SLICES))
    memo["taken"] += count
    memo["now"] = now
    gate.memo = memo
    gate.tat = starts[-1][0] + per


def postpone(gate: GateState, per: int, now: Instant, lag: int) -> None:
    """What was taken now is started by `now + lag`: it counts from then on."""
    memo: dict[str, Any] | None = gate.memo
    if memo is not None and memo.get("now") == now and memo["starts"]:
        last = memo["starts"][-1]
        last[0] = max(last[0], now + lag)
        gate.tat = last[0] + per


def _merged(starts: list[list[int]], width: int) -> list[list[int]]:
    """Entries of one slice as one, at the last of their instants.

    Slices lie still: were neighbours merged by their number alone, the oldest entry would be merged with the next for
    ever, and never leave.
    """
    merged: list[list[int]] = []
    for instant, count in starts:
        if merged and merged[-1][0] // width == instant // width:
            merged[-1] = [instant, merged[-1][1] + count]
        else:
            merged.append([instant, count])
    return merged


def give_back(gate: GateState, per: int, now: Instant, count: int, since: Instant) -> bool:
    """Forget starts that were not made, the oldest of them charged at `since`; say whether any still counted.

    They are taken from the entry of that instant, and what it does not hold from those after it, in order. If their own
    entries are later ones, what is left counts for too long, never too short.
    """
    memo: dict[str, Any] | None = gate.memo
    if memo is None or since + per <= now:
        # The first has left the window by itself, and how many of the others have is not known.
        return False
    starts: list[list[int]] = memo["starts"]
    owed = count
    for entry in starts:
        if entry[0] >= since and owed:
            taken = min(owed, entry[1])
            entry[1] -= taken
            owed -= taken
    memo["taken"] -= count - owed
    if starts and not starts[-1][1]:
        # The entry before it is of an earlier claim: what starts at this same instant must not be counted from then.
        memo.pop("now", None)
    memo["starts"] = starts = [entry for entry in starts if entry[1]]
    gate.memo = memo if starts else None
    gate.tat = starts[-1][0] + per if starts else 0
    return owed < count


def opens_again_at(gate: GateState, limit: int, per: int) -> Instant | None:
    """When enough of the oldest have left for one more to start."""
    memo: dict[str, Any] | None = gate.memo
    if memo is None:
        return None
    room = limit - memo["taken"]
    for instant, count in memo["starts"]:
        room += count
        if room > 0:
            return int(instant) + per
    return None
