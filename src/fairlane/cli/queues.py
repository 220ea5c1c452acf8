"""`fairlane queues`: every queue at a glance, or one of them with its policy, its limits and its last hour."""

from __future__ import annotations

import click
from rich.text import Text

from fairlane.cli.job_selection import place_options
from fairlane.cli.output import look, tell
from fairlane.cli.status import draw_queues
from fairlane.cli.tables import as_of, chart_lines, gauge_line, hint_lines, number, plural, wrapped
from fairlane.operations.views import Chart, LimitView, OneQueue, QueueView


@click.command()
@click.argument("queue", required=False, metavar="[QUEUE]")
@place_options
@click.option("--json", "as_json", is_flag=True, help="Print a JSON array; of one queue, an object.")
def queues(queue: str | None, app: str | None, url: str | None, as_json: bool) -> None:
    """List the queues, or show one. Looking changes nothing.

    One queue is shown with its policy in words, its limits and how full they are, its partitions and its last hour.

    \b
    Example:
      fairlane queues
      fairlane queues webhooks
      fairlane queues webhooks --json | jq .limits
    """
    if queue is None:
        tell(look(lambda operations: operations.queues.list(), app, url), _draw_list, as_json)
    else:
        tell(look(lambda operations: operations.queues.show(queue), app, url), draw_queue, as_json)


def _draw_list(views: list[QueueView], width: int) -> list[Text]:
    if not views:
        return [Text("no queue is known to this database yet")]
    return [Text(as_of(views[0].figures_as_of), "bold"), *draw_queues(views, width)]


def draw_queue(one: OneQueue, width: int) -> list[Text]:
    lines = [
        Text(as_of(one.now), "bold"),
        *draw_queues([one.view], width),
        Text(""),
        Text(f"POLICY (version {one.version})", "bold"),
    ]
    for words in one.policy_words:
        lines += wrapped(words, width, "  ", "    ")
    if one.limits:
        lines += [Text(""), Text("LIMITS", "bold")]
        for limit in one.limits:
            lines += _limit(limit, width)
    if one.partitions:
        lines += [Text(""), Text("PARTITIONS", "bold"), *draw_queues(one.partitions, width)]
    lines += [Text(""), Text("LAST HOUR, minute by minute, and the most of them", "bold"), *_chart(one.chart, width)]
    if one.hints:
        lines += [Text(""), Text("HINTS", "bold"), *hint_lines(one.hints, width)]
    return lines


def _limit(limit: LimitView, width: int) -> list[Text]:
    if limit.gauge is not None:
        lines = [Text("  ").append_text(gauge_line(limit.gauge, width - 2))]
    else:
        lines = wrapped(f"{limit.limit}: {limit.words}", width, "  ", "    ")
    keys = plural(limit.held_keys, "key")
    said = [
        f"holds back {plural(limit.held_jobs, 'job')} of {keys}" if limit.held_jobs else "",
        f"turned claims away {plural(limit.denied, 'time')} in the last hour" if limit.denied else "",
        f"has another bound for {limit.overridden_keys:,} of them" if limit.overridden_keys else "",
        "is suspended: it counts, and holds nothing back" if limit.is_suspended else "",
    ]
    told = "; ".join(each for each in said if each)
    return lines + (wrapped(told, width, "    ") if told else [])


def _chart(chart: Chart, width: int) -> list[Text]:
    denied = ", ".join(f"{limit.removesuffix(':')} {number(count)}" for limit, count in chart.denied.items())
    return [*chart_lines(chart.minutes, width), Text(f"  {'denied':<8}{denied or 'none'}")]
