"""`fairlane demo`."""

from __future__ import annotations

import os
import signal
from types import FrameType

import click
import msgspec
from rich.console import Console

from fairlane.demo.acts import Workload, verdict
from fairlane.demo.show import Report, Watcher, own_database, play, sqlite_file, throwaway_postgres
from fairlane.demo.view import LineView, LiveView, draw_report
from fairlane.demo.view import save_svg as save_picture
from fairlane.errors import ConfigurationError

LOG_WIDTH = 110


@click.command()
@click.option("--url", help="Play on this PostgreSQL, in a database of the demo's own that is dropped afterwards.")
@click.option("--postgres", is_flag=True, help="Play on a throw-away PostgreSQL that the demo starts and stops.")
@click.option("--json", "as_json", is_flag=True, help="Print the figures as a JSON object, and nothing else.")
@click.option("--scale", type=click.FloatRange(0.001, 10), default=1.0, hidden=True, help="For tests: fewer jobs.")
@click.option("--save-svg", type=click.Path(dir_okay=False), hidden=True, help="Save the last screen as a picture.")
def demo(url: str | None, postgres: bool, as_json: bool, scale: float, save_svg: str | None) -> None:
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
    console = Console(highlight=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = LOG_WIDTH
    report = _play(url, postgres, scale, _view(console, as_json))
    if save_svg:
        save_picture(report, save_svg)
    if as_json:
        click.echo(_as_json(report))
    else:
        console.print(draw_report(report))
    if failure := verdict(report.promises):
        raise click.ClickException(failure)


def _play(url: str | None, postgres: bool, scale: float, view: Watcher) -> Report:
    if url and postgres:
        raise ConfigurationError("give --url or --postgres, not both")
    venue = own_database(url) if url else throwaway_postgres() if postgres else sqlite_file()
    workload = Workload() if scale == 1 else Workload().scaled(scale)
    with venue as place, view.around():
        return play(place, workload, view)


def _view(console: Console, as_json: bool) -> Watcher:
    if as_json:
        return Watcher()
    return LiveView(console) if console.is_terminal else LineView(console)


def _as_json(report: Report) -> str:
    figures = {"workload": report.workload, "acts": report.figures, "promises": report.promises}
    return msgspec.json.format(msgspec.json.encode(figures)).decode()


def _leave(signum: int, frame: FrameType | None) -> None:
    signal.signal(signum, signal.SIG_IGN)
    raise SystemExit(128 + signum)
