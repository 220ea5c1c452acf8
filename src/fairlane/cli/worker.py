"""`fairlane worker`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

from fairlane.cli.choosing import app_options
from fairlane.errors import ConfigurationError

__all__ = ["end_well_when_stopped_early", "log_to_stderr", "logging_options", "metrics_options", "worker"]

COLLECT_AFTER = 100_000
"""Values made and not yet let go of. A claim makes as many and lets go of them all; at Python's 700, looking for cycles
among them took a fifth of its time."""

LOG_LEVELS = ["debug", "info", "warning", "error"]
LOG_FORMATS = ["text", "json"]

F = TypeVar("F", bound=Callable[..., Any])


def logging_options(command: F) -> F:
    """`--log-level` and `--log-format`, of every command that goes on until it is stopped."""
    level = click.option("--log-level", type=click.Choice(LOG_LEVELS), default="info", show_default=True)
    form = click.option(
        "--log-format",
        type=click.Choice(LOG_FORMATS),
        default="text",
        show_default=True,
        help="Lines for people, or a JSON object a line.",
    )
    return level(form(command))


def metrics_options(*, others: str = "") -> Callable[[F], F]:
    """`--metrics-port` and `--metrics-host`; `others` says where further processes answer."""
    port = click.option(
        "--metrics-port",
        type=click.IntRange(0, 65_535),
        help=f"Answer /metrics, /healthz and /readyz there{others}.  [default: none]",
    )
    host = click.option("--metrics-host", default="127.0.0.1", show_default=True, help="The address to answer at.")
    return lambda command: port(host(command))


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
    show_default=True,
    help="Between queues: by weight, or strictly in the order given.",
)
@click.option("--concurrency", type=int, default=100, show_default=True, help="Jobs at the same time, in each process.")
@click.option("--processes", type=click.IntRange(1, 256), default=1, show_default=True, help="Worker processes.")
@click.option("--lease", default="30s", show_default=True, help="How long a claim is held without a sign of life.")
@click.option("--drain-timeout", default="30s", show_default=True, help="How long jobs may go on after SIGTERM.")
@click.option("--name", help="How people see this worker.  [default: host:pid]")
@metrics_options(others="; further processes at the ports that follow")
@click.option(
    "--metrics-fleet/--no-metrics-fleet",
    default=True,
    show_default=True,
    help="Tell of the whole fleet too, from the database.",
)
@click.option(
    "--metrics-keys",
    type=click.IntRange(0, 500),
    default=20,
    show_default=True,
    help="Keys that are named in metrics, those with most jobs waiting.",
)
@click.option(
    "--traces",
    type=click.Choice(["linked", "nested"]),
    default="linked",
    show_default=True,
    help="Runs in traces of their own, linked to the enqueue, or in its trace.",
)
@logging_options
def worker(
    app: str,
    queues: str | None,
    slots: tuple[str, ...],
    order: str,
    concurrency: int,
    processes: int,
    lease: str,
    drain_timeout: str,
    name: str | None,
    metrics_port: int | None,
    metrics_host: str,
    metrics_fleet: bool,
    metrics_keys: int,
    traces: str,
    log_level: str,
    log_format: str,
) -> None:
    """Run the jobs of an app.

    SIGTERM or Ctrl-C: claims nothing more, lets running jobs end, gives back the rest. A second signal stops at once,
    and loses nothing.

    \b
    Example:
      fairlane worker shop:app
      fairlane worker shop:app --queues webhooks,email=2 --slots email=1:5 --concurrency 20 --processes 4
      fairlane worker shop:app --metrics-port 9100 --log-format json
    """
    end_well_when_stopped_early()
    from fairlane.cli.loading import load_app
    from fairlane.cli.queue_slots import queue_shares
    from fairlane.worker import WorkerOptions, WorkerPool, run_worker

    log_to_stderr(log_level, log_format, name)
    # Loaded and checked here even when other processes do the work: a mistake is told once, and not by each of them.
    loaded = load_app(app)
    declared = loaded.queue_names
    # What an engine runs is served here only if it is named.
    own = declared if queues is not None else [each for each in declared if each not in loaded.forwarded]
    if declared and not own:
        raise ConfigurationError(
            "every queue of this app is forwarded to an engine; run `fairlane forward`, or name with --queues what to "
            "run here instead"
        )
    options = WorkerOptions(
        queues=queue_shares(queues, slots, own),
        order="strict" if order == "strict" else "weighted",
        concurrency=concurrency,
        lease=lease,
        drain_timeout=drain_timeout,
        name=name,
        metrics_port=metrics_port,
        metrics_host=metrics_host,
        metrics_fleet=metrics_fleet,
        metrics_keys=metrics_keys,
        traces="nested" if traces == "nested" else "linked",
    )
    if processes == 1:
        _spare_the_collector()
        raise SystemExit(run_worker(loaded, options))
    given = {
        "--queues": queues,
        "--order": order,
        "--concurrency": str(concurrency),
        "--lease": lease,
        "--drain-timeout": drain_timeout,
        "--name": name,
        "--metrics-host": metrics_host,
        "--metrics-keys": str(metrics_keys),
        "--traces": traces,
        "--log-level": log_level,
        "--log-format": log_format,
    }
    arguments = [
        app,
        f"--{'' if metrics_fleet else 'no-'}metrics-fleet",
        *(part for slot in slots for part in ("--slots", slot)),
    ]
    arguments += [part for option, value in given.items() if value is not None for part in (option, value)]
    raise SystemExit(WorkerPool.of_workers(arguments, processes, metrics_port).run())


def end_well_when_stopped_early() -> None:
    """Until the worker listens for signals itself, it holds nothing: being stopped is no failure."""
    import signal

    def leave(*_: object) -> None:
        raise SystemExit(0)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, leave)


def _spare_the_collector() -> None:
    """This process is ours: let Python's collector look less often, and never at what was loaded to stay."""
    import gc

    gc.collect()
    gc.freeze()
    young, *older = gc.get_threshold()
    if 0 < young < COLLECT_AFTER:
        gc.set_threshold(COLLECT_AFTER, *older)


def log_to_stderr(level: str, format: str, name: str | None) -> None:
    """Log as the options say, under the name that people see."""
    import logging

    logging.basicConfig(format="%(asctime)s %(levelname)-8s %(name)s: %(message)s", level=level.upper())
    if format == "json":
        from fairlane.worker.logs import JsonLines
        from fairlane.worker.worker import name_of_process

        for handler in logging.getLogger().handlers:
            handler.setFormatter(JsonLines(name or name_of_process()))
