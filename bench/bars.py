"""The bars: what has to be shown in one run, on two cores that client and server share."""

from __future__ import annotations

from bench.claims import MEMORY, PINS, RATIO
from bench.judging import Bar, Figure
from bench.measuring import BOTH, JOBS_PER_SECOND
from bench.peer import POSTGRES_PEERS
from bench.works_partitions import name_of
from bench.works_peers import HUEY_DRAIN
from bench.works_postgres import IDLE_CPU, IDLE_QUERIES, LAST_SMALL, P50, P99, SLOT_GAP, TOTAL, VIOLATIONS
from bench.works_sqlite import LEAST_SHARE, LONGEST_WAIT

__all__ = ["BARS"]


def _rate(work: str) -> Figure:
    return Figure(work, JOBS_PER_SECOND)


def _best(work: str, name: str = JOBS_PER_SECOND) -> tuple[Figure, ...]:
    return tuple(Figure(f"{peer}: {work}", name) for peer in POSTGRES_PEERS)


HUEY = (_rate(HUEY_DRAIN),)
PGQUEUER = (_rate("pgqueuer: drain"),)

BARS = (
    Bar(what="drain / pgqueuer's best", figure=_rate("drain"), against=PGQUEUER, least=2),
    Bar(what="drain / awa's best", figure=_rate("drain"), against=(_rate("awa-pg: drain"),), least=4),
    Bar(
        what="fair drain / pgqueuer's (FIFO) best", figure=_rate("fair drain, 1,000 keys"), against=PGQUEUER, least=1.4
    ),
    Bar(
        what="fair + concurrency + rate / pgqueuer's (FIFO, no limits) best",
        figure=_rate("gated drain, 1,000 keys"),
        against=PGQUEUER,
        least=1.15,
    ),
    *(
        Bar(
            what=f"processor time of a job, {work} / plain",
            figure=Figure(work, BOTH),
            against=(Figure("drain", BOTH),),
            most=most,
        )
        # Where plain takes 50 µs: 20 more for turns, 32 more with limits.
        for work, most in (("fair drain, 1,000 keys", 1.4), ("gated drain, 1,000 keys", 1.64))
    ),
    Bar(what="violations of those limits", figure=Figure("gated drain, 1,000 keys", VIOLATIONS), most=0),
    Bar(what="claim time, 1,000 → 100,000 keys", figure=Figure("claim, 1,000 → 100,000 keys", RATIO), most=1.3),
    Bar(
        what="claim time, 10k → 1M waiting, one lane",
        figure=Figure("claim, 10k → 1M waiting, one lane", RATIO),
        most=1.2,
    ),
    Bar(
        what="claim time, 10k → 1M waiting, 1,000 lanes",
        figure=Figure("claim, 10k → 1M waiting, 1,000 lanes", RATIO),
        most=1.5,
    ),
    *(
        Bar(
            what=f"claim time, horizon pinned 60 s by {pin}",
            figure=Figure(f"claim, horizon pinned 60 s by {pin}", RATIO),
            most=most,
        )
        for pin, most in zip(PINS, (1.3, 4), strict=True)
    ),
    Bar(
        what="`--processes 64` with 4 slots each / one process with 256, jobs of 20 ms",
        figure=_rate("20 ms jobs, 64 × 4 slots"),
        against=(_rate("20 ms jobs, 1 × 256 slots"),),
        least=0.7,
    ),
    Bar(what="64 × 4: slot free to next start, ms", figure=Figure("20 ms jobs, 64 × 4 slots", SLOT_GAP), most=15),
    Bar(
        what="single enqueue / the best peer", figure=_rate("single enqueue"), against=_best("single enqueue"), least=3
    ),
    Bar(what="bulk enqueue / the best peer", figure=_rate("bulk enqueue"), against=_best("bulk enqueue"), least=2),
    Bar(what="pickup p50 / the best peer", figure=Figure("pickup", P50), against=_best("pickup", P50), most=1),
    Bar(what="pickup p99 / the best peer", figure=Figure("pickup", P99), against=_best("pickup", P99), most=1),
    Bar(what="whale: last small / total", figure=Figure("whale", LAST_SMALL), most=0.25),
    Bar(
        what="whale: total / own FIFO total",
        figure=Figure("whale", TOTAL),
        against=(Figure("whale, FIFO", TOTAL),),
        most=1.1,
    ),
    *(
        Bar(
            what=f"2 processes on 2 partitions / 2 on 1, through the 1 ms proxy{which}",
            figure=_rate(name_of(2, 2, is_far=True)),
            against=(_rate(name_of(2, 1, is_far=True)),),
            least=least,
        )
        for which, least in (("", 1.3), (", of twice the locks", 1.8))
    ),
    Bar(what="idle worker, % of a core", figure=Figure("idle worker", IDLE_CPU), most=0.5),
    Bar(what="idle worker, transactions/s", figure=Figure("idle worker", IDLE_QUERIES), most=1),
    Bar(what="SQLite drain / huey's best", figure=_rate("SQLite drain"), against=HUEY, least=12),
    Bar(what="SQLite fair drain / huey's best", figure=_rate("SQLite fair drain, 1,000 keys"), against=HUEY, least=6),
    Bar(what="SQLite with limits / huey's best", figure=_rate("SQLite gated drain, 1,000 keys"), against=HUEY, least=5),
    Bar(what="SQLite: violations of those limits", figure=Figure("SQLite gated drain, 1,000 keys", VIOLATIONS), most=0),
    Bar(what="SQLite, four processes: least share", figure=Figure("SQLite, four processes", LEAST_SHARE), least=0.5),
    Bar(
        what="SQLite, four processes: longest wait, ms", figure=Figure("SQLite, four processes", LONGEST_WAIT), most=100
    ),
    Bar(what="memory of a worker, MiB", figure=Figure("memory of a worker", MEMORY), most=150),
)
