"""What the peers' `run.py` files share: the command line, the workloads' shapes, the clocks and the one line of JSON.

Only the standard library: every peer's own environment imports this file.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Any

PAYLOAD_BYTES = 110
WARM_UP_PICKUPS = 10
IDLE_SECONDS = 0.02  # between two pick-ups, so that the worker is waiting again: the queue is meant to be idle
SMALL_KEYS = 100
JOBS_PER_SMALL_KEY = 10
WHALE_SLOTS = 20
WHALE_HANDLER_SECONDS = 0.005
HOT = "hot"

EXIT_INCOMPLETE = 1
EXIT_TIMED_OUT = 3


@dataclass(frozen=True)
class Options:
    """The command line, with the peer's settings for this workload."""

    workload: str
    url: str
    jobs: int
    size: int
    producers: int
    bulk: int
    settings: Mapping[str, Any]

    def documents(self) -> Iterator[dict[str, Any]]:
        """Every job's payload in order: one tenant of a hundred each, or the whale first."""
        for number in range(self.jobs):
            yield document(number, self.size, self._key(number))

    def chunks(self) -> Iterator[list[dict[str, Any]]]:
        """The payloads, `bulk` at a time."""
        chunk: list[dict[str, Any]] = []
        for each in self.documents():
            chunk.append(each)
            if len(chunk) == self.bulk:
                yield chunk
                chunk = []
        if chunk:
            yield chunk

    def _key(self, number: int) -> str:
        if self.workload != "whale":
            return f"tenant-{number % 100:03d}"
        small = number - (self.jobs - SMALL_KEYS * JOBS_PER_SMALL_KEY)
        return HOT if small < 0 else f"small-{small % SMALL_KEYS:03d}"


def document(number: int, size: int, key: str) -> dict[str, Any]:
    """A payload whose JSON has about `size` bytes."""
    empty = {"tenant": key, "order": number, "note": ""}
    return empty | {"note": "x" * max(0, size - len(json.dumps(empty)))}


@dataclass
class Watch:
    """Wall and processor time between the first start and the last stop."""

    started: float | None = None
    stopped: float = 0.0
    cpu_started: float = 0.0
    cpu_stopped: float = 0.0

    def start(self) -> None:
        """Begin; only the first call counts."""
        if self.started is None:
            self.cpu_started = time.process_time()
            self.started = time.monotonic()

    def stop(self) -> None:
        """End; the last call counts."""
        self.stopped = time.monotonic()
        self.cpu_stopped = time.process_time()

    @property
    def seconds(self) -> float:
        """Wall time."""
        return self.stopped - self.started if self.started is not None else 0.0

    @property
    def cpu_seconds(self) -> float:
        """User and system time of this process, all its threads."""
        return self.cpu_stopped - self.cpu_started


@dataclass
class Tally:
    """What the handlers of a drain or a whale count. Handlers on several threads hold the lock."""

    expected: int
    watch: Watch = field(default_factory=Watch)
    counted: int = 0
    small_left: int = SMALL_KEYS * JOBS_PER_SMALL_KEY
    last_small: float = 0.0
    last: float = 0.0
    all_counted: threading.Event = field(default_factory=threading.Event)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def count(self) -> None:
        """A handler of a drain ran."""
        self.counted += 1
        if self.counted >= self.expected:
            self.all_counted.set()

    def count_from_thread(self) -> None:
        """A handler of a drain ran on one of several threads."""
        with self.lock:
            self.count()

    def finish(self, key: str) -> None:
        """A handler of the whale ran to its end; `watch.start` was called at its beginning."""
        with self.lock:
            self.last = time.monotonic()
            if key != HOT:
                self.last_small = self.last
                self.small_left -= 1
            self.count()


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One workload, measured."""

    seconds: float
    cpu_seconds: float
    counted: int = 0
    complete: bool
    latencies_ms: list[float] | None = None
    last_small_seconds: float | None = None
    total_seconds: float | None = None


@dataclass(frozen=True)
class Unsupported:
    """Why a workload makes no sense for a peer."""

    reason: str


@dataclass(frozen=True)
class Workload:
    """How a peer does a workload, and its best settings for it; `--set name=value` tries others."""

    measure: Callable[[Options], Measured]
    settings: Mapping[str, Any] = field(default_factory=dict)


def measured(watch: Watch, *, complete: bool, counted: int = 0) -> Measured:
    """A workload that only has a beginning and an end."""
    return Measured(seconds=watch.seconds, cpu_seconds=watch.cpu_seconds, counted=counted, complete=complete)


def measured_whale(tally: Tally, *, complete: bool) -> Measured:
    """From the first start to the end of the last small job, and to the end of the last of all."""
    begun = tally.watch.started or 0.0
    return Measured(
        seconds=tally.last - begun,
        cpu_seconds=tally.watch.cpu_seconds,
        counted=tally.counted,
        complete=complete and tally.small_left == 0,
        last_small_seconds=tally.last_small - begun,
        total_seconds=tally.last - begun,
    )


async def produce(options: Options, enqueue: Callable[[dict[str, Any]], Awaitable[object]]) -> Watch:
    """Enqueue every job, `producers` at once, each producer one at a time."""
    documents = options.documents()

    async def producer() -> None:
        for each in documents:
            await enqueue(each)

    watch = Watch()
    watch.start()
    await asyncio.gather(*(producer() for _ in range(options.producers)))
    watch.stop()
    return watch


def produce_in_threads(options: Options, enqueue: Callable[[dict[str, Any]], object]) -> Watch:
    """Enqueue every job from `producers` threads."""
    documents, lock = options.documents(), threading.Lock()

    def producer(_: int) -> None:
        while True:
            with lock:
                each = next(documents, None)
            if each is None:
                return
            enqueue(each)

    watch = Watch()
    with ThreadPoolExecutor(options.producers) as threads:
        watch.start()
        for _ in threads.map(producer, range(options.producers)):
            pass
        watch.stop()
    return watch


async def produce_chunks(
    options: Options, enqueue: Callable[[list[dict[str, Any]]], Awaitable[object]], at_once: int
) -> Watch:
    """Enqueue every job in chunks, `at_once` chunks at a time; making the payloads is not timed."""
    chunks = list(options.chunks())
    waiting = iter(chunks)

    async def producer() -> None:
        for chunk in waiting:
            await enqueue(chunk)

    watch = Watch()
    watch.start()
    await asyncio.gather(*(producer() for _ in range(at_once)))
    watch.stop()
    return watch


@dataclass
class Pickups:
    """Jobs enqueued one after the other, each only once the one before has started and the worker is idle again."""

    jobs: int
    started_ns: int = 0
    counted: int = 0
    started: threading.Event = field(default_factory=threading.Event)
    loop: asyncio.AbstractEventLoop | None = None
    started_on_loop: asyncio.Event = field(default_factory=asyncio.Event)

    def start(self) -> None:
        """The first line of every handler."""
        self.started_ns = time.monotonic_ns()
        self.counted += 1
        self.started.set()
        if self.loop is not None:
            self.loop.call_soon_threadsafe(self.started_on_loop.set)

    async def measure(self, options: Options, enqueue: Callable[[dict[str, Any]], Awaitable[object]]) -> Measured:
        """On the worker's own event loop."""
        self.loop = asyncio.get_running_loop()
        watch, latencies = Watch(), []
        for number in range(-WARM_UP_PICKUPS, self.jobs):
            await asyncio.sleep(IDLE_SECONDS)
            if number == 0:
                watch.start()
            self.started_on_loop.clear()
            before = time.monotonic_ns()
            await enqueue(document(number, options.size, "tenant-000"))
            await self.started_on_loop.wait()
            latencies.append((self.started_ns - before) / 1e6)
        watch.stop()
        return self._measured(watch, latencies)

    def measure_blocking(self, options: Options, enqueue: Callable[[dict[str, Any]], object]) -> Measured:
        """From a thread that is not the worker's."""
        watch, latencies = Watch(), []
        for number in range(-WARM_UP_PICKUPS, self.jobs):
            time.sleep(IDLE_SECONDS)
            if number == 0:
                watch.start()
            self.started.clear()
            before = time.monotonic_ns()
            enqueue(document(number, options.size, "tenant-000"))
            self.started.wait()
            latencies.append((self.started_ns - before) / 1e6)
        watch.stop()
        return self._measured(watch, latencies)

    def _measured(self, watch: Watch, latencies: list[float]) -> Measured:
        return Measured(
            seconds=watch.seconds,
            cpu_seconds=watch.cpu_seconds,
            counted=self.counted - WARM_UP_PICKUPS,
            complete=self.counted == self.jobs + WARM_UP_PICKUPS,
            latencies_ms=[round(each, 3) for each in latencies[WARM_UP_PICKUPS:]],
        )


async def settled(left: Callable[[], Awaitable[int]], watch: Watch, *, look_every: float = 0.002) -> None:
    """Wait until no job is left; for peers that tell nobody when a settlement is committed."""
    while True:
        unsettled = await left()
        watch.stop()
        if unsettled == 0:
            return
        await asyncio.sleep(look_every)


def main(peer: str, distribution: str, workloads: Mapping[str, Workload | Unsupported]) -> int:
    """Run one workload, bounded in time; the exit status."""
    arguments = _parse(peer, workloads)
    report: dict[str, Any] = {"peer": peer, "version": version(distribution), "workload": arguments.workload}
    workload = workloads[arguments.workload]
    if isinstance(workload, Unsupported):
        print(json.dumps(report | {"unsupported": workload.reason}), flush=True)
        return 0
    options = Options(
        workload=arguments.workload,
        url=arguments.url,
        jobs=arguments.jobs,
        size=arguments.size,
        producers=arguments.producers,
        bulk=arguments.bulk,
        settings=dict(workload.settings) | dict(arguments.set),
    )
    if options.workload == "whale" and options.jobs <= SMALL_KEYS * JOBS_PER_SMALL_KEY:
        sys.exit(f"the whale needs more than its {SMALL_KEYS * JOBS_PER_SMALL_KEY} small jobs; 6000 makes 5000 hot")
    watchdog = threading.Timer(arguments.timeout, _give_up)
    watchdog.daemon = True
    watchdog.start()
    result = workload.measure(options)
    watchdog.cancel()
    print(json.dumps(report | _figures(options, result)), flush=True)
    if not result.complete:
        print(f"{peer} {options.workload}: not every job was stored, run and settled exactly once", file=sys.stderr)
        return EXIT_INCOMPLETE
    return 0


def _figures(options: Options, result: Measured) -> dict[str, Any]:
    figures: dict[str, Any] = {
        "jobs": options.jobs,
        "seconds": round(result.seconds, 4),
        "jobs_per_second": round(options.jobs / result.seconds, 1),
        "counted_by_handlers": result.counted,
        "client_cpu_seconds": round(result.cpu_seconds, 4),
    }
    if result.latencies_ms is not None:
        figures["latencies_ms"] = result.latencies_ms
    if result.total_seconds is not None and result.last_small_seconds is not None:
        figures["last_small_seconds"] = round(result.last_small_seconds, 4)
        figures["total_seconds"] = round(result.total_seconds, 4)
    shape = {"payload_bytes": options.size, "python": ".".join(str(part) for part in sys.version_info[:3])}
    if options.workload == "enqueue":
        shape["producers"] = options.producers
    if options.workload == "bulk":
        shape["jobs_per_chunk"] = options.bulk
    return figures | {"configuration": dict(options.settings) | shape}


def _parse(peer: str, workloads: Mapping[str, object]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=f"Run one workload with {peer}, and print one JSON line.")
    parser.add_argument("workload", choices=tuple(workloads))
    parser.add_argument("--url", required=True, help="an empty database, or the path of a file that is not there yet")
    parser.add_argument("--jobs", type=int, required=True)
    parser.add_argument("--size", type=int, default=PAYLOAD_BYTES, help="bytes of a payload")
    parser.add_argument("--producers", type=int, default=16)
    parser.add_argument("--bulk", type=int, default=1000, help="jobs per bulk call")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds before the process gives up")
    parser.add_argument(
        "--set", type=_setting, action="append", default=[], metavar="NAME=VALUE", help="try another configuration"
    )
    return parser.parse_args()


def _setting(text: str) -> tuple[str, Any]:
    name, _, value = text.partition("=")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


def _give_up() -> None:
    print("timed out", file=sys.stderr, flush=True)
    os._exit(EXIT_TIMED_OUT)
