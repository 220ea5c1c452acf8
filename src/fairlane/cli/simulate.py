"""`fairlane simulate`."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click

from fairlane.cli.choosing import place_options
from fairlane.errors import ConfigurationError, UnknownQueue

if TYPE_CHECKING:
    from fairlane.policy.policy import Policy
    from fairlane.simulation.measures import Simulation
    from fairlane.simulation.run import Recording, SimulatedJob

__all__ = ["simulate"]


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
    from fairlane.cli.tell_simulation import tell_simulations, write_plots
    from fairlane.simulation.measures import measure, report_by

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
    from fairlane.cli.policy_file import read_policy

    policy = read_policy("--policy", options["policy_file"]) if options["policy_file"] else None
    against = [read_policy("--against", options["against"])] if options["against"] else []
    if options["history"]:
        stored, jobs = _remembered(options)
        return [policy or _declared(options, required=False) or stored, *against], jobs
    policy = policy or _declared(options, required=True)
    return [*filter(None, [policy]), *against], _foreseen(options)


def _declared(options: dict[str, Any], *, required: bool) -> Policy | None:
    """What the app declares for the queue that was named, or for the only one it has."""
    from fairlane.cli.loading import load_app

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
    from fairlane.cli.policy_file import read_bytes
    from fairlane.simulation.workload import Workload, read_trace

    if path := options["workload"]:
        return Workload.parse(read_bytes("--workload", path), f"--workload {path}").simulated(options["seed"])
    path = options["trace"]
    return read_trace(read_bytes("--trace", path).splitlines(), f"--trace {path}")


def _remembered(options: dict[str, Any]) -> tuple[Policy, list[SimulatedJob]]:
    """The policy in force for a queue, and what ran there."""
    import asyncio

    from fairlane.cli.database import app_of, existing_store
    from fairlane.cli.telling import Progress
    from fairlane.clock import microseconds
    from fairlane.simulation.replay import read_history
    from fairlane.store.rows import not_among

    queue, last = options["history"], microseconds(options["last"])

    async def look() -> tuple[Policy, list[SimulatedJob]]:
        async with existing_store(app_of(options["app"], options["url"])) as store:
            declared = await store.policy(queue)
            if declared is None:
                raise not_among(queue, await store.queues())
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
    import gc

    from fairlane.cli.worker import COLLECT_AFTER

    young, *older = gc.get_threshold()
    gc.set_threshold(max(young, COLLECT_AFTER) if young else 0, *older)
    try:
        yield
    finally:
        gc.set_threshold(young, *older)


def _record(policy: Policy, jobs: Iterable[SimulatedJob], options: dict[str, Any]) -> Recording:
    from fairlane.cli.telling import Progress
    from fairlane.simulation.replay import record

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
