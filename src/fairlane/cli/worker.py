"""`fairlane worker`."""

from __future__ import annotations

import gc
import logging
import os
import platform
import re
import signal
from collections.abc import Iterator, Sequence
from dataclasses import replace
from difflib import get_close_matches
from importlib.metadata import version
from typing import Any

import click

from fairlane.app import App, without_password
from fairlane.cli.database import load_app
from fairlane.cli.options import app_options, options
from fairlane.clock import lasting
from fairlane.errors import ConfigurationError, UnknownQueue
from fairlane.policy.partitions import parse_partition
from fairlane.redaction import TextLines
from fairlane.worker import QueueShare, WorkerOptions, run_mate, run_worker
from fairlane.worker.logs import JsonLines
from fairlane.worker.processes import command_of_worker
from fairlane.worker.worker import name_of_process

COLLECT_AFTER = 100_000
"""Objects allocated and not yet freed before Python looks for cycles. A claim allocates about as many and frees them
all; at Python's 700, looking for cycles among them took a fifth of its time."""

logging_options = options(
    click.option(
        "--log-level",
        type=click.Choice(["debug", "info", "warning", "error"]),
        default="info",
        help="Failures are logged at warning, dead jobs at error, every job at debug.",
    ),
    click.option(
        "--log-format",
        type=click.Choice(["text", "json"]),
        default="text",
        help="Text for people, or one JSON object per line.",
    ),
)
metrics_options = options(
    click.option(
        "--metrics-port",
        type=click.IntRange(0, 65_535),
        help="Serve /metrics, /healthz and /readyz on this port.  [default: none]",
    ),
    click.option("--metrics-host", default="127.0.0.1", help="The address to bind to."),
)


@click.command()
@app_options
@click.option("--queues", help="Which queues to serve, with weights.  [default: all of the app]")
@click.option(
    "--slots", multiple=True, metavar="QUEUE=MIN:MAX", help="Slots kept for a queue, and the most it may use."
)
@click.option(
    "--order",
    type=click.Choice(["weighted", "strict"]),
    default="weighted",
    help="Between queues: by weight, or strictly in the order given.",
)
@click.option("--concurrency", type=int, default=100, help="Concurrent jobs in each process.")
@click.option(
    "--processes", type=click.IntRange(1, 256), default=1, help="Processes that run jobs; one more claims for them."
)
@click.option("--lease", default="30s", help="How long a claim is held without a heartbeat.")
@click.option("--drain-timeout", default="30s", help="How long jobs may go on after SIGTERM.")
@click.option("--long-run", default="30s", help="The least time after which a run is reported as long.")
@click.option("--name", help="Display name of this worker.  [default: host:pid]")
@metrics_options
@click.option(
    "--metrics-fleet/--no-metrics-fleet", default=True, help="Report on the whole fleet too, from the database."
)
@click.option(
    "--metrics-keys",
    type=click.IntRange(0, 500),
    default=20,
    help="Keys that are named in metrics, those with most jobs waiting.",
)
@click.option(
    "--traces",
    type=click.Choice(["linked", "nested"]),
    default="linked",
    help="Runs in traces of their own, linked to the enqueue, or in its trace.",
)
@click.option("--banner/--no-banner", default=True, help="Log the app, its store and its queues at the start.")
@logging_options
@click.option("--mate", type=int, hidden=True)
@click.option("--black-box", type=int, hidden=True)
def worker(
    app: str,
    queues: str | None,
    slots: tuple[str, ...],
    banner: bool,
    log_level: str,
    log_format: str,
    mate: int | None,
    black_box: int | None,
    **given: Any,
) -> None:
    """Run the jobs of an app.

    With --processes, a job that kills its process does no harm to its neighbors: the process is restarted at once, and
    each job that was running in it next runs alone.

    SIGTERM or Ctrl-C: claims nothing more, lets running jobs end, gives back the rest. A second signal stops at once,
    and loses nothing.

    \b
    Example:
      fairlane worker shop:app
      fairlane worker shop:app --queues webhooks,email=2 --slots email=1:5 --concurrency 20 --processes 4
      fairlane worker shop:app --metrics-port 9100 --log-format json
    """
    end_well_when_stopped_early()
    name, traces, processes = given["name"], given["traces"], given["processes"]
    log_to_stderr(log_level, log_format, name)
    # Checked here even when other processes run the jobs: a mistake is reported once, and not by each of them.
    loaded = load_app(app)
    if mate is not None and black_box is not None:
        spare_the_collector()
        of_mate = WorkerOptions(concurrency=given["concurrency"], name=name, traces=traces)
        run_mate(loaded, of_mate, mate, black_box)
        return
    declared = loaded.queue_names
    # What an engine runs is served here only if it is named.
    own = declared if queues is not None else [each for each in declared if each not in loaded.forwarded]
    if declared and not own:
        raise ConfigurationError(
            "every queue of this app is forwarded to an engine; run `fairlane forward`, or name with --queues what to "
            "run here instead"
        )
    # The processes that run jobs bear its name, in logs and events.
    passed = ("--name", name or name_of_process(), "--traces", traces)
    logs = ("--log-level", log_level, "--log-format", log_format)
    command = command_of_worker([app, "--no-banner", *passed, *logs])
    chosen = WorkerOptions(queues=queue_shares(queues, slots, own), command=command, **given)
    if banner:
        # A record for each line: it must survive whatever formats the log.
        for line, fields in _banner(app, loaded, chosen.serving(own), processes):
            logging.getLogger("fairlane.worker").info("%s", line, extra=fields)
    spare_the_collector()
    raise SystemExit(run_worker(loaded, chosen))


def end_well_when_stopped_early() -> None:
    """Exit with status 0 at a signal: until the worker listens for signals itself, it holds nothing."""

    def leave(*_: object) -> None:
        raise SystemExit(0)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, leave)


def spare_the_collector() -> None:
    """Let Python's collector run less often, and never look at what is loaded already: this process is ours."""
    gc.collect()
    gc.freeze()
    young, *older = gc.get_threshold()
    if 0 < young < COLLECT_AFTER:
        gc.set_threshold(COLLECT_AFTER, *older)


def _banner(place: str, app: App, chosen: WorkerOptions, processes: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """What this worker is and serves, line by line, and the same as fields."""
    slots, tasks, store = chosen.concurrency, len(list(app.registry)), without_password(app.url)
    yield f"fairlane {version('fairlane')} on Python {platform.python_version()}, process {os.getpid()}", {}
    yield f"app:    {place} with {tasks:,} task{'' if tasks == 1 else 's'}", {"app": place, "tasks": tasks}
    yield f"store:  {store}", {"store": store}
    each = f"{slots * processes:,}, {slots:,} in each of {processes} processes" if processes > 1 else f"{slots:,}"
    yield f"slots:  {each}", {"concurrency": slots, "processes": processes}
    for share in chosen.shares:
        policy = _policy_in_a_line(app, share.name)
        details = [f"weight {share.weight:g}"] if share.weight != 1 else []
        if share.min_slots or share.max_slots is not None:
            most = "or more" if share.max_slots is None else f"to {share.max_slots:,}"
            details.append(f"slots {share.min_slots:,} {most}")
        served = f"{share.name} ({', '.join(details)})" if details else share.name
        yield f"queue:  {served}: {policy}", {"queue": share.name, "policy": policy}
    drain = lasting(chosen.time("drain_timeout").total_seconds())
    yield f"stop:   SIGTERM or Ctrl-C waits up to {drain} for running jobs; a second one stops at once", {}


def _policy_in_a_line(app: App, queue: str) -> str:
    """The policy as the app declares it. If another one is in force, a warning says so."""
    declared = app.queues[queue].policy if queue in app.queues else app.declared_policies.get(queue)
    if declared is None:
        return "no limits"  # the default queue, which need not be declared
    return ", ".join(repr(each) for each in (declared.fair, *declared.limits) if each is not None) or "no limits"


def log_to_stderr(level: str, format: str, name: str | None) -> None:
    """Log as the options say, under the name that people see."""
    logging.basicConfig(level=level.upper())
    formatter = JsonLines(name or name_of_process()) if format == "json" else TextLines()
    for handler in logging.getLogger().handlers:
        handler.setFormatter(formatter)


_SLOTS = re.compile(r"(?P<name>[^=:\s]+)=(?P<min>\d*)[:-](?P<max>\d*)\Z")


def queue_shares(queues: str | None, slots: Sequence[str], declared: Sequence[str]) -> tuple[QueueShare, ...]:
    """The queues that a worker serves (by default all that the app declares), each with its weight and slots."""
    named = declared if queues is None else [part for part in queues.split(",") if part.strip()]
    if not named and queues is None:
        raise ConfigurationError(
            "the app has no queue for a worker: an engine runs all that it declares (`fairlane forward`); "
            "name those that this worker is to serve as well with --queues"
        )
    if not named:
        raise ConfigurationError("--queues names no queue; leave it out to serve all queues of the app")
    shares = {share.name: share for share in map(QueueShare.parse, named)}
    if len(shares) < len(named):
        raise ConfigurationError(f"--queues {queues}: a queue is named twice")
    for name in shares:
        if (parse_partition(name) or (name,))[0] not in declared:
            similar = get_close_matches(name, declared, n=1)
            suggestion = f"did you mean {similar[0]!r}?" if similar else f"it declares {', '.join(declared)}"
            raise UnknownQueue(f"--queues: the app declares no queue {name!r}; {suggestion}")
    for given in slots:
        found = _SLOTS.match(given.strip())
        if found is None:
            raise ConfigurationError(f"--slots {given}: write queue=min:max, such as email=1:5, email=1: or email=:5")
        name, least, most = found["name"], int(found["min"] or 0), int(found["max"]) if found["max"] else None
        if name not in shares:
            served = ", ".join(shares)
            raise ConfigurationError(f"--slots {given}: this worker does not serve {name!r}; it serves {served}")
        shares[name] = replace(shares[name], min_slots=least, max_slots=most)
    return tuple(shares.values())
