"""`fairlane queues`: every queue at a glance, or one of them with its policy, its limits and its last hour."""

from __future__ import annotations

from typing import Any

import click
from rich.text import Text

from fairlane.cli.options import json_option, place_options
from fairlane.cli.output import as_of, chart_lines, gauge_line, hint_lines, look, number, plural, show, titled, wrapped
from fairlane.cli.status import draw_queues
from fairlane.operations.views import LimitView, OneQueue, QueueView


@click.command()
@click.argument("queue", required=False, metavar="[QUEUE]")
@place_options
@json_option("a JSON array; of one queue, an object")
def queues(queue: str | None, **given: Any) -> None:
    """List the queues, or show one. Looking changes nothing.

    One queue is shown with its policy in words, its limits and how full they are, its partitions and its last hour.

    \b
    Example:
      fairlane queues
      fairlane queues webhooks
      fairlane queues webhooks --json | jq .limits
    """
    if queue is None:
        show(look(lambda operations: operations.queues.list(), given), _draw_list, given)
    else:
        show(look(lambda operations: operations.queues.show(queue), given), draw_queue, given)


def _draw_list(views: list[QueueView], width: int) -> list[Text]:
    if not views:
        return [Text("no queue is known to this database yet")]
    return [Text(as_of(views[0].figures_as_of), "bold"), *draw_queues(views, width)]


def draw_queue(one: OneQueue, width: int) -> list[Text]:
    denied = ", ".join(f"{limit.removesuffix(':')} {number(count)}" for limit, count in one.chart.denied.items())
    last_hour = [*chart_lines(one.chart.minutes, width), Text(f"  {'denied':<8}{denied or 'none'}")]
    return [
        Text(as_of(one.now), "bold"),
        *draw_queues([one.view], width),
        *titled(
            f"POLICY (version {one.version})",
            [line for words in one.policy_words for line in wrapped(words, width, "  ", "    ")],
        ),
        *titled("LIMITS", [line for limit in one.limits for line in _limit(limit, width)]),
        *titled("PARTITIONS", draw_queues(one.partitions, width) if one.partitions else []),
        *titled("LAST HOUR, minute by minute, and the most of them", last_hour),
        *titled("HINTS", hint_lines(one.hints, width)),
    ]


def _limit(limit: LimitView, width: int) -> list[Text]:
    if limit.gauge is not None:
        lines = [Text("  ").append_text(gauge_line(limit.gauge, width - 2))]
    else:
        lines = wrapped(f"{limit.limit}: {limit.words}", width, "  ", "    ")
    remarks = [
        f"holds back {plural(limit.held_jobs, 'job')} of {plural(limit.held_keys, 'key')}" if limit.held_jobs else "",
        f"turned claims away {plural(limit.denied, 'time')} in the last hour" if limit.denied else "",
        f"has another bound for {limit.overridden_keys:,} of them" if limit.overridden_keys else "",
        "is suspended: it counts, and holds nothing back" if limit.is_suspended else "",
    ]
    return lines + wrapped("; ".join(filter(None, remarks)), width, "    ")
