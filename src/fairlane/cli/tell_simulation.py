"""Simulations as people read them: tables side by side, and plots."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from fairlane.cli.telling import print_table
from fairlane.clock import measured
from fairlane.errors import ConfigurationError

if TYPE_CHECKING:
    from fairlane.simulation.measures import Group, Simulation
    from fairlane.simulation.run import Recording

__all__ = ["tell_simulations", "write_plots"]

LETTERS = "AB"


def tell_simulations(simulations: Sequence[Simulation], shown_keys: int) -> None:
    """One policy, or two side by side: line by line, the first above the second."""
    marked = list(zip(LETTERS, simulations, strict=False))
    for letter, each in marked:
        mark = f"{letter}: " if len(marked) > 1 else ""
        click.echo(f"{mark}{each.policy}")
        click.echo(f"   {_summary(each)}")
        if each.without_numbers:
            click.echo(
                f"   {each.without_numbers:,} jobs brought no number for a limit or weight that the policy takes from "
                "its jobs: it was 1 until another job of their key brought one"
            )
    click.echo()
    _print_groups("CLASS", [(letter, list(each.classes)) for letter, each in marked], with_busy=True)
    if shown_keys and any(each.by for each in simulations):
        click.echo()
        slowest = [(letter, _slowest(each, shown_keys)) for letter, each in marked]
        _print_groups(f"SLOWEST {', '.join(simulations[0].by).upper()}", slowest, with_busy=False)
    limits = [
        (
            *([letter] if len(marked) > 1 else []),
            use.limit,
            f"{use.keys:,}",
            _percent(use.full),
            _percent(use.held_up),
            use.fullest,
            f"{use.waited:,.1f} s",
        )
        for letter, each in marked
        for use in each.limits
    ]
    if limits:
        click.echo()
        headings = ("LIMIT", "KEYS", "FULL", "FULL AND WAITED FOR", "FULLEST KEY", "LANES WAITED")
        print_table((*([""] if len(marked) > 1 else []), *headings), limits, ("LIMIT", "FULLEST KEY"))


def _summary(each: Simulation) -> str:
    jain = "" if each.jain is None else f", Jain index {each.jain:.3f}"
    others = "".join(
        f", {count:,} {what}"
        for count, what in ((each.retried, "retried"), (each.dead, "dead"), (each.left, "left"))
        if count
    )
    return (
        f"{each.runs:,} runs in {measured(each.seconds)} on {each.slots:,} slots, "
        f"utilisation {_percent(each.utilisation)}{jain}{others}"
    )


def _slowest(each: Simulation, count: int) -> list[Group]:
    return sorted(each.keys, key=lambda group: -group.waits.p95)[:count]


def _print_groups(heading: str, found: list[tuple[str, list[Group]]], *, with_busy: bool) -> None:
    places = {name: nth for nth, name in enumerate(dict.fromkeys(group.name for _, each in found for group in each))}
    every = [(places[group.name], letter, group) for letter, groups in found for group in groups]
    rows = [
        _row(letter if len(found) > 1 else None, group, with_busy=with_busy)
        for _, letter, group in sorted(every, key=lambda entry: entry[:2])
    ]
    letters = [""] if len(found) > 1 else []
    busy = ["WHILE ALL WAITED"] if with_busy else []
    headings = (*letters, heading, "RUNS", "P50", "P95", "P99", "MAX", "SHARE", *busy)
    print_table(headings, rows, (heading,))


def _row(letter: str | None, group: Group, *, with_busy: bool) -> tuple[str, ...]:
    waits = group.waits
    return (
        *([] if letter is None else [letter]),
        group.name,
        f"{group.runs:,}" + (f" (+{group.left:,} left)" if group.left else ""),
        *(measured(each) for each in (waits.p50, waits.p95, waits.p99, waits.max)),
        _percent(group.share),
        *([] if not with_busy else ["" if group.share_when_busy is None else _percent(group.share_when_busy)]),
    )


def _percent(share: float) -> str:
    return f"{share * 100:.1f} %"


def write_plots(folder: str, simulations: Sequence[Simulation], recordings: Sequence[Recording]) -> None:
    """waits.svg for all, slots-a.svg and waiting-a.svg for each policy."""
    from fairlane.simulation.measures import timeline
    from fairlane.simulation.plots import plot_simulations, plot_timeline

    plots = {"waits.svg": plot_simulations(simulations)}
    for letter, each, recording in zip(LETTERS.lower(), simulations, recordings, strict=False):
        slots, waiting = plot_timeline(timeline(recording), each.policy)
        mark = f"-{letter}" if len(simulations) > 1 else ""
        plots[f"slots{mark}.svg"], plots[f"waiting{mark}.svg"] = slots, waiting
    place = Path(folder)
    try:
        place.mkdir(parents=True, exist_ok=True)
        for name, text in plots.items():
            (place / name).write_text(text)
    except OSError as error:
        raise ConfigurationError(f"--plot {folder}: {error.strerror or error}") from None
    click.echo(f"wrote {', '.join(plots)} into {folder}", err=True)
