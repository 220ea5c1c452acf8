"""How the next turns will fall, as far as can be seen before the gates are asked."""

from __future__ import annotations

from heapq import heapify, heappop, heapreplace

from fairlane.scheduler.board import Board, Flow

__all__ = ["turns"]


def turns(board: Board, flows: list[Flow], budget: int) -> dict[bytes, int]:
    """How many of the next `budget` turns each flow will get, and one to spare where that is only a guess."""
    counts = [0] * len(flows)
    most = [flow.most() for flow in flows]
    steps = [board.charge(flow) / flow.weight for flow in flows]
    nexts = [max(0.0, flow.vtime + flow.debt) + step for flow, step in zip(flows, steps, strict=True)]
    heap = [(board.tag(flow), flow.tie, n) for n, flow in enumerate(flows)]
    heapify(heap)
    for tie in range(board.tie + 1, board.tie + 1 + budget):
        if not heap:
            break
        n = heap[0][2]
        counts[n] += 1
        if counts[n] < most[n]:
            heapreplace(heap, (nexts[n], tie, n))
            nexts[n] += steps[n]
        else:
            heappop(heap)
    # Turns of a flow that a gate stops fall to the others; among several lanes the next head decides who is next.
    guess = board.policy.has_keyed_gates
    return {
        flow.id: max(1, count) + (guess or flow.open + flow.shut > 1) for flow, count in zip(flows, counts, strict=True)
    }
