"""`fairlane demo`."""

from __future__ import annotations

import os
import signal
from types import FrameType

import click
import msgspec
from rich.console import Console

from fairlane.demo.scenarios import Workload, verdict
from fairlane.demo.stage import Watcher, own_database, play, sqlite_file, throwaway_postgres
from fairlane.demo.view import LineView, LiveView, draw_report
from fairlane.errors import ConfigurationError

LOG_WIDTH = 110


@click.command()
@click.option("--url", help="Play on this PostgreSQL, in a database of the demo's own that is dropped afterwards.")
@click.option("--postgres", is_flag=True, help="Play on a throw-away PostgreSQL that the demo starts and stops.")
@click.option("--json", "as_json", is_flag=True, help="Print the figures as a JSON object, and nothing else.")
@click.option("--scale", type=click.FloatRange(0.001, 10), default=1.0, hidden=True, help="For tests: fewer jobs.")
def demo(url: str | None, postgres: bool, as_json: bool, scale: float) -> None:
    """See every tenant of a queue get its turn, in under a minute.

    One tenant (the whale) enqueues 5,000 jobs, then 100 small tenants enqueue 10 each. Two workers with 10 slots each
    run them three times: first come, first served; with Fair; with limits too. All figures are counted from what ran.
    Ends with an error if the demo's own promises do not hold.

    \b
    Example:
      fairlane demo
      fairlane demo --postgres
      fairlane demo --url postgresql://postgres@localhost/postgres --json
    """
    # SIGTERM (a time limit, a closing terminal's supervisor) cleans up like Ctrl-C.
    signal.signal(signal.SIGTERM, _leave)
    if url and postgres:
        raise ConfigurationError("give --url or --postgres, not both")
    console = Console(highlight=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = LOG_WIDTH
    view = Watcher() if as_json else LiveView(console) if console.is_terminal else LineView(console)
    database = own_database(url) if url else throwaway_postgres() if postgres else sqlite_file()
    with database as place, view.around():
        report = play(place, Workload() if scale == 1 else Workload().scaled(scale), view)
    if as_json:
        stats = {"workload": report.workload, "acts": report.stats, "promises": report.promises}
        click.echo(msgspec.json.format(msgspec.json.encode(stats)).decode())
    else:
        console.print(draw_report(report))
    if failure := verdict(report.promises):
        raise click.ClickException(failure)


def _leave(signum: int, frame: FrameType | None) -> None:
    signal.signal(signum, signal.SIG_IGN)
    raise SystemExit(128 + signum)
