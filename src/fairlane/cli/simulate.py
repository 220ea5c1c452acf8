"""`fairlane simulate`."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import click
from rich.text import Text

from fairlane.cli.database import app_of, existing_store, load_app
from fairlane.cli.options import json_option, place_options
from fairlane.cli.output import Progress, columns, show, wrapped
from fairlane.cli.worker import spare_the_collector
from fairlane.clock import measured, microseconds
from fairlane.errors import ConfigurationError, UnknownQueue
from fairlane.operations.requests import in_force
from fairlane.operations.trials import Misread, read_policy_text
from fairlane.policy.policy import Policy
from fairlane.simulation.measures import Group, Simulation, measure, report_by, timeline
from fairlane.simulation.plots import plot_simulations, plot_timeline
from fairlane.simulation.replay import read_history, record
from fairlane.simulation.run import Recording, SimulatedJob
from fairlane.simulation.workload import Workload, read_trace


@click.command()
@click.option("--policy", "policy_file", metavar="FILE", help="The policy, as JSON: see `fairlane policy show --json`.")
@click.option("--queue", metavar="NAME", help="Or the policy that --app declares for this queue.")
@click.option("--against", metavar="FILE", help="Another policy, to compare with.")
@click.option("--workload", metavar="FILE", help="A declared workload, as TOML or JSON.")
@click.option("--trace", metavar="FILE", help='Jobs as JSON lines: {"at": 0.5, "keys": {…}, "run_time": 0.05}.')
@click.option("--history", metavar="QUEUE", help="What ran in a queue of --app or --url; its policy, unless named.")
@click.option("--last", default="1h", help="How far back --history goes.")
@click.option("--limit", type=click.IntRange(1), default=200_000, help="Jobs of --history, at most.")
@click.option("--slots", type=click.IntRange(1), default=100, help="Total number of concurrent jobs.")
@click.option("--seed", type=int, help="Another seed than the workload's.")
@click.option("--claim-time", default="4ms", help="How long a claim takes.")
@click.option("--settle-time", default="4ms", help="How long a settlement takes.")
@click.option("--until", metavar="DURATION", help="Stop after this long.  [default: when all is done]")
@click.option("--by", metavar="KEY[,KEY]", help="Group results by these keys.  [default: the fair key]")
@click.option("--keys", "shown_keys", type=click.IntRange(0), default=5, help="Keys to list.")
@json_option("a JSON object, with every key")
@click.option("--plot", metavar="DIR", help="Write plots into this folder, as SVG.")
@place_options
def simulate(plot: str | None, shown_keys: int, **options: Any) -> None:
    """Try a policy, or two, on a virtual clock.

    Runs the plan that real claims use over a declared workload, a trace, or what a queue has just been through, and
    reports waits, shares, fairness and how far limits were used. Touches no queue.

    \b
    Example:
      fairlane simulate --app shop:app --queue webhooks --workload monday.toml --slots 40
      fairlane simulate --policy now.json --against next.json --trace jobs.jsonl --plot plots
      fairlane simulate --app shop:app --history webhooks --last 1h --against next.json --json
    """
    sources = [name for name in ("workload", "trace", "history") if options[name]]
    if len(sources) != 1:
        raise ConfigurationError("which jobs? Give one of --workload FILE, --trace FILE and --history QUEUE")
    policies, jobs = _policies_and_jobs(options)
    by = tuple(filter(None, (options["by"] or "").split(","))) or next(filter(None, map(report_by, policies)), ())
    # Rows come and go by the thousand and form no cycles: looking for some takes a tenth of a long simulation.
    spare_the_collector()
    recordings = [_record(each, jobs, options) for each in policies]
    found = [measure(each, by) for each in recordings]
    if plot:
        write_plots(plot, found, recordings)
    show(
        found,
        lambda found, width: _draw(found, shown_keys, width),
        options,
        lambda found: {"simulations": [each.to_document() for each in found]},
    )


def _policies_and_jobs(options: dict[str, Any]) -> tuple[list[Policy], list[SimulatedJob]]:
    stored, jobs = _remembered(options) if options["history"] else (None, _foreseen(options))
    if options["policy_file"]:
        policy = read_policy("--policy", options["policy_file"])
    elif stored is None or options["queue"]:
        policy = _declared(options["app"], options["queue"])
    else:
        policy = stored
    return [policy, *([read_policy("--against", options["against"])] if options["against"] else [])], jobs


def _declared(place: str | None, name: str | None) -> Policy:
    """What the app declares for the queue that was named, or for the only one it has."""
    if not place:
        raise ConfigurationError("which policy? Give --policy FILE, or --app module:app with --queue NAME")
    queues = load_app(place).queues
    if name is None and len(queues) == 1:
        name = next(iter(queues))
    if name not in queues:
        which = "name one with --queue" if name is None else f"it declares no {name!r}"
        raise UnknownQueue(f"the app has the queues {', '.join(queues) or '(none)'}; {which}")
    return queues[name].policy


def _foreseen(options: dict[str, Any]) -> list[SimulatedJob]:
    if path := options["workload"]:
        return Workload.parse(read_bytes("--workload", path), f"--workload {path}").simulated(options["seed"])
    path = options["trace"]
    return read_trace(read_bytes("--trace", path).splitlines(), f"--trace {path}")


def _remembered(options: dict[str, Any]) -> tuple[Policy, list[SimulatedJob]]:
    """The policy in force for a queue, and what ran there."""
    queue, last, limit = options["history"], microseconds(options["last"]), options["limit"]

    async def read() -> tuple[Policy, list[SimulatedJob]]:
        async with existing_store(app_of(options["app"], options["url"])) as store:
            policy = (await in_force(store, queue)).policy
            with Progress("jobs read") as progress:
                now = await store.now()
                return policy, await read_history(store, queue, now, last, limit=limit, on_progress=progress)

    policy, jobs = asyncio.run(read())
    if not jobs:
        raise ConfigurationError(f"no job of queue {queue!r} ended within the last {options['last']}; give --last")
    if len(jobs) >= limit:
        click.echo(f"the newest {len(jobs):,} jobs were read and there may be more; raise --limit", err=True)
    return policy, jobs


def _record(policy: Policy, jobs: Iterable[SimulatedJob], options: dict[str, Any]) -> Recording:
    how = {name: options[name] for name in ("slots", "claim_time", "settle_time", "until")}
    with Progress("jobs simulated") as progress:
        return record(policy, jobs, **how, on_progress=progress)


LETTERS = "AB"


WITHOUT_NUMBERS = (
    "{:,} jobs brought no number for a limit or weight that the policy takes from its jobs: it was 1 until another job "
    "of their key brought one"
)


def _draw(simulations: Sequence[Simulation], shown_keys: int, width: int) -> list[Text]:
    """One policy, or two side by side: line by line, the first above the second."""
    marked = list(zip(LETTERS if len(simulations) > 1 else [""], simulations, strict=True))
    lines: list[Text] = []
    for letter, each in marked:
        lines += [Text(f"{letter}: {each.policy}" if letter else each.policy), Text(f"   {_summary(each)}")]
        if each.without_numbers:
            lines += wrapped(WITHOUT_NUMBERS.format(each.without_numbers), width, "   ")
    lines += [Text(""), *_groups("CLASS", [(letter, each.classes) for letter, each in marked], width, with_busy=True)]
    if shown_keys and any(each.by for each in simulations):
        slowest = [(letter, each.slowest(shown_keys)) for letter, each in marked]
        name = f"SLOWEST {', '.join(simulations[0].by).upper()}"
        lines += [Text(""), *_groups(name, slowest, width, with_busy=False)]
    limits = [
        (
            letter,
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
        headings = ("", "LIMIT", "KEYS", "FULL", "FULL AND WAITED FOR", "FULLEST KEY", "LANES WAITED")
        lines += [Text(""), *_columns(headings, limits, width, ("LIMIT", "FULLEST KEY"))]
    return lines


def _columns(
    headings: Sequence[str], rows: Sequence[tuple[str, ...]], width: int, flexible: Sequence[str]
) -> list[Text]:
    """A table; of a single policy without the first column, its letter."""
    first = 0 if any(row[0] for row in rows) else 1
    return columns(headings[first:], [row[first:] for row in rows], width, flexible=flexible)


def _summary(each: Simulation) -> str:
    jain = "" if each.jain is None else f", Jain index {each.jain:.3f}"
    others = ((each.retried, "retried"), (each.dead, "dead"), (each.left, "left"))
    return (
        f"{each.runs:,} runs in {measured(each.seconds)} on {each.slots:,} slots, "
        f"utilisation {_percent(each.utilisation)}{jain}"
        + "".join(f", {count:,} {what}" for count, what in others if count)
    )


def _groups(heading: str, found: Sequence[tuple[str, Sequence[Group]]], width: int, *, with_busy: bool) -> list[Text]:
    places = {name: nth for nth, name in enumerate(dict.fromkeys(group.name for _, each in found for group in each))}
    every = sorted((places[group.name], letter, _row(letter, group)) for letter, groups in found for group in groups)
    headings = ("", heading, "RUNS", "P50", "P95", "P99", "MAX", "SHARE", "WHILE ALL WAITED")
    last = len(headings) if with_busy else -1
    return _columns(headings[:last], [row[:last] for _, _, row in every], width, (heading,))


def _row(letter: str, group: Group) -> tuple[str, ...]:
    waits = group.waits
    return (
        letter,
        group.name,
        f"{group.runs:,}" + (f" (+{group.left:,} left)" if group.left else ""),
        *(measured(each) for each in (waits.p50, waits.p95, waits.p99, waits.max)),
        _percent(group.share),
        "" if group.share_when_busy is None else _percent(group.share_when_busy),
    )


def _percent(share: float) -> str:
    return f"{share * 100:.1f} %"


def write_plots(folder: str, simulations: Sequence[Simulation], recordings: Sequence[Recording]) -> None:
    """waits.svg for all, slots-a.svg and waiting-a.svg for each policy."""
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


def read_bytes(option: str, path: str) -> bytes:
    """What a file holds, or an error that names the option."""
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ConfigurationError(f"{option} {path}: {error.strerror or error}") from None


def read_policy(option: str, path: str) -> Policy:
    """The policy that a file holds."""
    found = read_policy_text(read_bytes(option, path).decode(errors="replace"))
    if isinstance(found, Misread):
        line = "" if found.line is None else f", line {found.line}"
        raise ConfigurationError(f"{option} {path}{line}: {found.words}")
    return found
