"""`fairlane simulate`."""

from __future__ import annotations

import asyncio
import gc
import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
import msgspec

from fairlane.cli.database import app_of, existing_store, load_app
from fairlane.cli.job_selection import place_options
from fairlane.cli.tables import Progress, print_table
from fairlane.cli.worker import COLLECT_AFTER
from fairlane.clock import measured, microseconds
from fairlane.errors import ConfigurationError, UnknownQueue
from fairlane.policy.policy import POLICY_EXAMPLE, Policy, parse_policy
from fairlane.simulation.measures import Group, Simulation, measure, report_by, timeline
from fairlane.simulation.plots import plot_simulations, plot_timeline
from fairlane.simulation.replay import read_history, record
from fairlane.simulation.run import Recording, SimulatedJob
from fairlane.simulation.workload import Workload, read_trace
from fairlane.store import records
from fairlane.store.rows import not_among


@click.command()
@click.option("--policy", "policy_file", metavar="FILE", help="The policy, as JSON: see `fairlane policy show --json`.")
@click.option("--queue", metavar="NAME", help="Or the policy that --app declares for this queue.")
@click.option("--against", metavar="FILE", help="Another policy, to compare with.")
@click.option("--workload", metavar="FILE", help="A declared workload, as TOML or JSON.")
@click.option("--trace", metavar="FILE", help='Jobs as JSON lines: {"at": 0.5, "keys": {…}, "run_time": 0.05}.')
@click.option("--history", metavar="QUEUE", help="What ran in a queue of --app or --url; its policy, unless named.")
@click.option("--last", default="1h", show_default=True, help="How far back --history goes.")
@click.option("--limit", type=click.IntRange(1), default=200_000, show_default=True, help="Jobs of --history, at most.")
@click.option(
    "--slots", type=click.IntRange(1), default=100, show_default=True, help="Total number of concurrent jobs."
)
@click.option("--seed", type=int, help="Another seed than the workload's.")
@click.option("--claim-time", default="4ms", show_default=True, help="How long a claim takes.")
@click.option("--settle-time", default="4ms", show_default=True, help="How long a settlement takes.")
@click.option("--until", metavar="DURATION", help="Stop after this long.  [default: when all is done]")
@click.option("--by", metavar="KEY[,KEY]", help="Group results by these keys.  [default: the fair key]")
@click.option("--keys", "shown_keys", type=click.IntRange(0), default=5, show_default=True, help="Keys to list.")
@click.option("--json", "as_json", is_flag=True, help="Print a JSON object, with every key.")
@click.option("--plot", metavar="DIR", help="Write plots into this folder, as SVG.")
@place_options
def simulate(as_json: bool, plot: str | None, shown_keys: int, **options: Any) -> None:
    """Try a policy, or two, on a virtual clock.

    Runs the plan that real claims use over a declared workload, a trace, or what a queue has just been through, and
    tells waits, shares, fairness and how far limits were used. Touches no queue.

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
    recordings = [_record(each, jobs, options) for each in policies]
    found: list[Simulation] = [measure(each, by) for each in recordings]
    if plot:
        write_plots(plot, found, recordings)
    if as_json:
        click.echo(json.dumps({"simulations": [each.to_document() for each in found]}))
    else:
        tell_simulations(found, shown_keys)


def _policies_and_jobs(options: dict[str, Any]) -> tuple[list[Policy], list[SimulatedJob]]:
    policy = read_policy("--policy", options["policy_file"]) if options["policy_file"] else None
    against = [read_policy("--against", options["against"])] if options["against"] else []
    if options["history"]:
        stored, jobs = _remembered(options)
        return [policy or _declared(options, required=False) or stored, *against], jobs
    policy = policy or _declared(options, required=True)
    return [*filter(None, [policy]), *against], _foreseen(options)


def _declared(options: dict[str, Any], *, required: bool) -> Policy | None:
    """What the app declares for the queue that was named, or for the only one it has."""
    place, name = options["app"], options["queue"]
    if not place and (required or name):
        raise ConfigurationError("which policy? Give --policy FILE, or --app module:app with --queue NAME")
    if not place or (not required and not name):
        return None
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
    queue, last = options["history"], microseconds(options["last"])

    async def look() -> tuple[Policy, list[SimulatedJob]]:
        async with existing_store(app_of(options["app"], options["url"])) as store:
            declared = await store.policy(queue)
            if declared is None:
                raise not_among(queue, await store.run(records.queues()))
            with Progress("jobs read") as progress:
                now = await store.now()
                jobs = await read_history(store, queue, now, last, limit=options["limit"], on_progress=progress)
            return declared.policy, jobs

    policy, jobs = asyncio.run(look())
    if not jobs:
        raise ConfigurationError(f"no job of queue {queue!r} ended within the last {options['last']}; give --last")
    if len(jobs) >= options["limit"]:
        click.echo(f"the newest {len(jobs):,} jobs were read and there may be more; raise --limit", err=True)
    return policy, jobs


@contextmanager
def _fewer_collections() -> Iterator[None]:
    """Rows come and go by the thousand and form no cycles: looking for some takes a tenth of a long simulation."""
    young, *older = gc.get_threshold()
    gc.set_threshold(max(young, COLLECT_AFTER) if young else 0, *older)
    try:
        yield
    finally:
        gc.set_threshold(young, *older)


def _record(policy: Policy, jobs: Iterable[SimulatedJob], options: dict[str, Any]) -> Recording:
    with Progress("jobs simulated") as progress, _fewer_collections():
        return record(
            policy,
            jobs,
            slots=options["slots"],
            claim_time=options["claim_time"],
            settle_time=options["settle_time"],
            until=options["until"],
            on_progress=progress,
        )


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
    try:
        found = msgspec.json.decode(read_bytes(option, path))
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigurationError(
            f"{option} {path}: this is not JSON ({error}); a policy looks like {POLICY_EXAMPLE}"
        ) from None
    if isinstance(found, list) and len(found) == 1:
        found = found[0]
    if not isinstance(found, dict):
        what = f"{len(found)} policies" if isinstance(found, list) else f"a {type(found).__name__}"
        raise ConfigurationError(f"{option} {path}: this holds {what}, not one policy such as {POLICY_EXAMPLE}")
    return parse_policy(found, f"{option} {path}")
