"""A service behind a queue, on a virtual clock: so many servers, a short waiting line, and a refusal beyond it.

Its capacity changes while the queue, its plan and its limit are the real ones. `python -m tests.scheduler.downstream`
draws what happens into docs/images/adaptive.svg.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import count, pairwise
from pathlib import Path
from random import Random

from fairlane.clock import SECOND, Instant
from fairlane.policy import AdaptiveConcurrency, Concurrency, Limit, Policy
from fairlane.scheduler.board import Gate
from fairlane.scheduler.settlement import Verdict
from fairlane.scheduler.snapshot import Start
from fairlane.simulation.memory import MemoryQueue

PICTURE = Path(__file__).resolve().parents[2] / "docs" / "images" / "adaptive.svg"

EPOCH = 1_900_000_000 * SECOND
SERVICE = SECOND // 10
"""The mean time that a call takes once it has a server; each takes up to a fifth more or less."""
REFUSAL = SECOND // 200
KEYS = {"endpoint": "api", "task": "call"}
BACKLOG = 500


@dataclass(frozen=True)
class Phase:
    """So many servers for so long."""

    capacity: int
    seconds: int

    @property
    def ideal(self) -> float:
        """Good calls a second with a cap that is exactly the capacity."""
        return self.capacity * SECOND / SERVICE


FALL_AND_RECOVERY = (Phase(30, 20), Phase(10, 20), Phase(30, 30))
ADAPTIVE = AdaptiveConcurrency(start=10, max=200, target="125ms", by="endpoint")


@dataclass(frozen=True, slots=True)
class Settled:
    at: Instant
    is_good: bool
    cap: int


class Downstream:
    """Calls come and end. It knows nothing of queues."""

    def __init__(self, capacity: int, seed: int, *, waiting_room: float) -> None:
        self.capacity = capacity
        self.waiting_room = waiting_room
        self.random = Random(seed)
        self.busy = 0
        self.line: deque[tuple[Start, Instant]] = deque()
        self.ends: list[tuple[Instant, int, Start, Instant, bool]] = []
        self.order = count()

    def call(self, start: Start, now: Instant) -> None:
        if self.busy < self.capacity:
            self._serve(start, now, now)
        elif len(self.line) < int(self.capacity * self.waiting_room):
            self.line.append((start, now))
        else:
            heappush(self.ends, (now + REFUSAL, next(self.order), start, now, False))

    def _serve(self, start: Start, since: Instant, now: Instant) -> None:
        self.busy += 1
        took = round(SERVICE * self.random.uniform(0.8, 1.2))
        heappush(self.ends, (now + took, next(self.order), start, since, True))

    def next_end(self) -> tuple[Instant, Start, Instant, bool]:
        """When the next call ends, which it is, since when it was made, and whether it was served."""
        now, _, start, since, is_good = heappop(self.ends)
        self.busy -= is_good
        while self.line and self.busy < self.capacity:
            self._serve(*self.line.popleft(), now)
        return now, start, since, is_good


def simulate(
    limit: Limit, phases: Sequence[Phase] = FALL_AND_RECOVERY, *, waiting_room: float = 0.5, seed: int = 1
) -> list[list[Settled]]:
    """What is settled in each phase, by a fleet that always has work and more slots than it may use."""
    queue = MemoryQueue(Policy("q", limits=(limit,)))
    downstream = Downstream(phases[0].capacity, seed, waiting_room=waiting_room)
    now, end = EPOCH, EPOCH
    settled: list[list[Settled]] = []
    for phase in phases:
        settled.append([])
        downstream.capacity = phase.capacity
        end += phase.seconds * SECOND
        while now < end:
            if queue.waiting() < BACKLOG // 2:
                queue.enqueue(now, KEYS, BACKLOG)
            for start in queue.claim(now, BACKLOG).starts:
                downstream.call(start, now)
            now, start, since, is_good = downstream.next_end()
            queue.settle(start, now - since, Verdict.GOOD if is_good else Verdict.FAILED)
            settled[-1].append(Settled(now, is_good, _cap(queue)))
    return settled


def _cap(queue: MemoryQueue) -> int:
    (bound,), (row,) = queue.policy.bound, queue.gates.values()
    if isinstance(bound.limit, AdaptiveConcurrency):
        return bound.limit.cap_of(Gate(row, bound, bound.limit))
    assert isinstance(bound.limit, Concurrency)
    return bound.limit.max


@dataclass(frozen=True)
class Measured:
    """A phase: its steady state is its second half."""

    throughput: float
    """Good calls in the steady state, as a share of what the ideal cap gives."""
    errors: float
    """Failed calls in the steady state, as a share of all."""
    failed: int
    """In the whole phase."""
    recovery: int | None
    """Settlements from its beginning until good calls come at 85 % of the ideal rate for a second."""
    caps: tuple[int, int]
    """The lowest and the highest in the steady state."""


def measure(phase: Phase, settled: Sequence[Settled], began: Instant) -> Measured:
    half = began + phase.seconds * SECOND // 2
    steady = [each for each in settled if each.at >= half]
    good = sum(each.is_good for each in steady)
    return Measured(
        throughput=good / (phase.ideal * phase.seconds / 2),
        errors=(len(steady) - good) / len(steady),
        failed=sum(not each.is_good for each in settled),
        recovery=_recovery(phase, settled),
        caps=(min(each.cap for each in steady), max(each.cap for each in steady)),
    )


def _recovery(phase: Phase, settled: Sequence[Settled]) -> int | None:
    good = [(each.at, n) for n, each in enumerate(settled) if each.is_good]
    wanted = int(0.85 * phase.ideal)
    return next(
        (n for (at, n), (later, _) in zip(good, good[wanted:], strict=False) if later - at <= SECOND),
        None,
    )


def measure_all(
    limit: Limit, phases: Sequence[Phase] = FALL_AND_RECOVERY, *, waiting_room: float = 0.5, seed: int = 1
) -> list[Measured]:
    began, measured = EPOCH, []
    for phase, settled in zip(phases, simulate(limit, phases, waiting_room=waiting_room, seed=seed), strict=True):
        measured.append(measure(phase, settled, began))
        began += phase.seconds * SECOND
    return measured


# -- the picture --------------------------------------------------------------------------------------------------

LEFT, TOP, WIDE, HIGH = 52, 44, 640, 240
MOST = 50
STYLE = """
    text { font: 13px system-ui, sans-serif; fill: #57606a }
    .grid { stroke: #8c959f; stroke-opacity: .35 }
    .cap { fill: none; stroke: #0969da; stroke-width: 2 }
    .capacity { fill: none; stroke: #8250df; stroke-width: 2; stroke-dasharray: 6 4 }
    .failed { stroke: #cf222e; stroke-width: 2 }
    @media (prefers-color-scheme: dark) {
      text { fill: #9da7b3 }
      .cap { stroke: #58a6ff }
      .capacity { stroke: #bc8cff }
      .failed { stroke: #ff7b72 }
    }"""


def draw(phases: Sequence[Phase], settled: Sequence[Sequence[Settled]]) -> str:
    """The cap against the capacity, and when calls failed, as SVG for light and dark pages."""
    seconds = sum(phase.seconds for phase in phases)

    def place(at: float, jobs: float) -> str:
        return f"{LEFT + WIDE * at / seconds:.1f},{TOP + HIGH * (1 - jobs / MOST):.1f}"

    failures = [(each.at - EPOCH) / SECOND for row in settled for each in row if not each.is_good]
    failed = [f'<path class="failed" d="M{place(at, 0)}v-10"/>' for at in failures]
    lines = [
        f'<path class="grid" d="M{place(0, jobs)}h{WIDE}"/>'
        f'<text x="{LEFT - 8}" y="{TOP + HIGH * (1 - jobs / MOST) + 4:g}" text-anchor="end">{jobs}</text>'
        for jobs in range(0, MOST + 1, 10)
    ]
    ticks = [
        f'<text x="{LEFT + WIDE * at / seconds:.1f}" y="{TOP + HIGH + 20}" text-anchor="middle">{at} s</text>'
        for at in range(0, seconds + 1, 10)
    ]
    key = [
        f'<path class="{name}" d="M{x},20h28"/><text x="{x + 36}" y="24">{said}</text>'
        for name, x, said in (
            ("capacity", LEFT, "what the service can serve at once"),
            ("cap", LEFT + 290, "the cap"),
            ("failed", LEFT + 400, "a call that failed"),
        )
    ]
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {LEFT + WIDE + 20} {TOP + HIGH + 34}" role="img">',
            "  <title>AdaptiveConcurrency follows a service that falls to a third of its capacity and recovers</title>",
            f"  <style>{STYLE}",
            "  </style>",
            *(f"  {each}" for each in (*lines, *ticks, *key)),
            f'  <path class="capacity" d="M{" ".join(place(*point) for point in _capacity(phases))}"/>',
            f'  <path class="cap" d="M{" ".join(place(*point) for point in _caps(settled, seconds))}"/>',
            *(f"  {each}" for each in failed),
            "</svg>",
            "",
        ]
    )


def _capacity(phases: Sequence[Phase]) -> Iterator[tuple[float, float]]:
    at = 0
    for phase in phases:
        yield at, phase.capacity
        at += phase.seconds
        yield at, phase.capacity


def _caps(settled: Sequence[Sequence[Settled]], seconds: int) -> Iterator[tuple[float, float]]:
    """Each change of the cap, as a stair."""
    steps = [(0.0, ADAPTIVE.start), *(((each.at - EPOCH) / SECOND, each.cap) for row in settled for each in row)]
    yield steps[0]
    for (_, before), (at, after) in pairwise(steps):
        if after != before:
            yield at, before
            yield at, after
    yield seconds, steps[-1][1]


if __name__ == "__main__":
    PICTURE.write_text(draw(FALL_AND_RECOVERY, simulate(ADAPTIVE)))
