"""The peers' works: each peer in its own environment and in its best configuration; see bench/peers/README.md."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median, quantiles

from bench.judging import Run
from bench.measuring import CLIENT, JOBS_PER_SECOND, Load, family, process_seconds
from bench.peer import FOLDER, POSTGRES_PEERS, PeerRun, run_peer
from bench.running import Bench, Work
from bench.works_postgres import LAST_SMALL, P50, P99, PICKUPS, TOTAL, WHALE_JOBS

__all__ = ["HUEY_DRAIN", "works"]

SERVER_IN_ALL = "server µs/job in all"
"""Of the whole run: a peer does not say when it has put its jobs in place and begins."""
HUEY_DRAIN = "huey: SQLite drain"
WORKLOADS = {
    "drain": "no-op, one process, FIFO",
    "single enqueue": "16 at once in one process",
    "bulk enqueue": "1,000 jobs a call",
    "pickup": "an idle queue, one job at a time",
    "whale": "5,000 hot, then 100 × 10; 20 slots × 5 ms",
}
NAMES = {"single enqueue": "enqueue", "bulk enqueue": "bulk"}
SHARES = {"drain": 1.0, "single enqueue": 0.3, "bulk enqueue": 2.0}
SLOWER = {"pgqueuer": 1.0, "awa-pg": 0.5, "procrastinate": 0.1, "chancy": 0.1, "dbos": 0.04, "huey": 0.4}
"""Of the jobs that Fairlane is given: a peer that is slower is measured for as long with fewer."""
SHORT = {
    *(("pgqueuer", work) for work in WORKLOADS if work != "whale"),
    ("awa-pg", "drain"),
    ("awa-pg", "bulk enqueue"),
    ("procrastinate", "pickup"),
}
"""What a bar names, and whoever may be the best at it."""


def jobs_of(bench: Bench, peer: str, work: str) -> int:
    match work:
        case "pickup":
            return PICKUPS
        case "whale":
            return WHALE_JOBS
        case _:
            return max(1_000, round(bench.jobs * SHARES[work] * SLOWER[peer]))


def peer_work(peer: str, work: str) -> Callable[[Bench], Run]:
    def run(bench: Bench) -> Run:
        url = str(bench.file()) if peer == "huey" else bench.database()
        server, load = process_seconds(family(bench.server.pid)), Load.now()
        done = run_peer(peer, NAMES.get(work, work), url, jobs=jobs_of(bench, peer, work))
        foreign = load.foreign_until_now()
        server = process_seconds(family(bench.server.pid)) - server
        if done.unsupported:
            return Run(figures={}, foreign_load=0.0, unsupported=done.unsupported)
        figures = stats_of(done)
        if peer != "huey":
            figures[SERVER_IN_ALL] = server / done.jobs * 1e6
        settings = ", ".join(f"{name} {value}" for name, value in done.configuration.items())
        return Run(
            figures=figures,
            foreign_load=foreign,
            configuration=f"{done.jobs:,} jobs, {peer} {done.version}: {settings}",
        )

    return run


def stats_of(done: PeerRun) -> dict[str, float]:
    """What the peer itself has measured."""
    if done.latencies_ms:
        return {P50: median(done.latencies_ms), P99: quantiles(done.latencies_ms, n=100)[98]}
    if done.total_seconds is not None and done.last_small_seconds is not None:
        return {TOTAL: done.total_seconds, LAST_SMALL: done.last_small_seconds / done.total_seconds}
    return {JOBS_PER_SECOND: done.jobs_per_second, CLIENT: done.client_cpu_seconds / done.jobs * 1e6}


def works() -> list[Work]:
    found = [
        Work(
            name=f"{peer}: {work}",
            what=what,
            run=peer_work(peer, work),
            is_short=(peer, work) in SHORT,
            rounds=None if (peer, work) in SHORT else 3,
        )
        for peer in POSTGRES_PEERS
        for work, what in WORKLOADS.items()
        if (FOLDER / peer).is_dir()
    ]
    if (FOLDER / "huey").is_dir():
        found.append(Work(name=HUEY_DRAIN, what="no-op, a SQLite file", run=peer_work("huey", "drain"), is_short=True))
    return found
