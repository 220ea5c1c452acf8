"""`fairlane status`, `queues`, `keys`, `top` and `workers`: what goes on, as it is now."""

from __future__ import annotations

import asyncio
import os
import sys
import termios
import tty
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from typing import Any

import click
from rich.text import Text

from fairlane.cli.options import (
    app_or_url_options,
    json_option,
    key_option,
    keys_given,
    place_options,
    with_app,
)
from fairlane.cli.output import (
    Given,
    Ticker,
    ago,
    as_of,
    chart_lines,
    columns,
    counted,
    gauge_line,
    hint_lines,
    look,
    look_again,
    look_in_place,
    make_console,
    number,
    per_minute,
    plural,
    printable,
    run_time,
    run_until_stopped,
    show,
    show_rest,
    sparkline,
    titled,
    wait,
    watch_option,
    wrapped,
)
from fairlane.errors import ConfigurationError
from fairlane.operations import Operations, Ranking
from fairlane.operations.views import (
    KeyList,
    KeyView,
    LimitView,
    NextJob,
    OneKey,
    OneQueue,
    Overview,
    QueueView,
    Totals,
    WorkerList,
    WorkerView,
)
from fairlane.policy.keys import key_words
from fairlane.policy.partitions import whole_of

OF_A_DAY = ("24H", "FAIL 24H")
QUEUES_WIDE = 100
STATUS_STYLES = {
    "idle": "dim",
    "flowing": "green",
    "limited": "cyan",
    "lagging": "bold yellow",
    "paused": "magenta",
    "stopped": "bold red",
}


@click.command()
@watch_option
@app_or_url_options
@json_option("a JSON object; with --watch, one a line")
def status(watch: float | None, **given: Any) -> None:
    """Say whether work flows, who waits and why, and what to do. Looking changes nothing.

    A queue is idle, flowing, limited (limits and pauses hold back everything that waits, as the policy requires),
    lagging (jobs could start and have no slot), paused, or stopped (no worker serves it, or all that do are
    stopping; none knows its tasks, or the broker of its engine refuses). HELD are those of the READY ones that are
    held back; /MIN and FAIL are starts and failures of the last 60 seconds; 24H and FAIL 24H are what has ended in
    the last 24 hours, and how much of it failed.

    \b
    Example:
      fairlane status
      fairlane status --watch 5
      fairlane status --json | jq .totals
    """
    if watch is None:
        show(look(Operations.overview, given), draw_status, given)
    else:
        look_again(Operations.overview, draw_status, watch, given)


def draw_status(view: Overview, width: int) -> list[Text]:
    lines = [Text(as_of(view.now), "bold"), *_totals(view.totals, width), Text("")]
    if not view.queues:
        return [*lines, Text("no queue is known to this database yet")]
    return [*lines, *draw_queues(view.queues, width), *titled("HINTS", hint_lines(view.hints, width))]


def _totals(totals: Totals, width: int) -> list[Text]:
    held = f" ({number(totals.held_jobs)} held back)" if totals.held_jobs else ""
    oldest = f"; the oldest waits for {wait(totals.oldest_wait)}" if totals.oldest_wait is not None else ""
    serving = f"{plural(totals.workers, 'worker')} with {plural(totals.slots, 'slot')}"
    others = ((totals.workers_stopping, "stopping"), (totals.workers_late, "gone silent"))
    said = (
        f"{number(totals.ready)} ready{held}, {number(totals.running)} running, {counted(totals.scheduled)} scheduled, "
        f"{counted(totals.dead)} dead",
        f"{per_minute(totals.started_per_minute)} started, {per_minute(totals.ended_per_minute)} ended, "
        f"{per_minute(totals.failed_per_minute)} failed a minute{oldest}",
        f"{number(totals.ended)} ended in 24 h, {number(totals.failed)} of them failed",
        ", ".join(
            [
                serving if totals.workers else "no worker takes jobs",
                *(f"{count:,} {how}" for count, how in others if count),
            ]
        ),
    )
    return [line for text in said for line in wrapped(text, width, "")]


def draw_queues(queues: list[QueueView], width: int) -> list[Text]:
    """A line for each queue; under it, where something waits, its status in a sentence and who holds what back."""
    is_wide = width >= QUEUES_WIDE
    headings = [heading for heading in QUEUE_COLUMNS if is_wide or heading not in OF_A_DAY]
    cells = [[QUEUE_COLUMNS[heading](each) for heading in headings] for each in queues]
    head, *rows = columns(headings, cells, width, flexible=("QUEUE",), right=headings[2:])
    lines = [head]
    for row, each in zip(rows, queues, strict=True):
        lines.append(row)
        if each.ready or each.is_paused or each.status == "stopped":
            lines += wrapped(each.words, width)
        if each.ended and not is_wide:
            lines += wrapped(f"{number(each.ended)} ended in 24 h, {number(each.failed)} of them failed", width)
        for held in each.held:
            whose = f" of {plural(held.keys, 'key')}" if held.by else ""
            lines += wrapped(f"{plural(held.jobs, 'job')}{whose} held by {held.words}", width, "  - ", "    ")
    return lines


QUEUE_COLUMNS: Mapping[str, Callable[[QueueView], str | Text]] = {
    "QUEUE": lambda view: view.queue,
    "STATUS": lambda view: Text(str(view.status), STATUS_STYLES[str(view.status)]),
    "READY": lambda view: number(view.ready),
    "HELD": lambda view: number(view.held_jobs),
    "RUN": lambda view: number(view.running),
    "SCHED": lambda view: counted(view.scheduled),
    "DEAD": lambda view: counted(view.dead),
    "OLDEST": lambda view: wait(view.oldest_wait),
    "/MIN": lambda view: per_minute(view.started_per_minute),
    "FAIL": lambda view: per_minute(view.failed_per_minute),
    "24H": lambda view: number(view.ended),
    "FAIL 24H": lambda view: number(view.failed),
}


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
        show(look(lambda operations: operations.queues.list(), given), _draw_queues, given)
    else:
        show(look(lambda operations: operations.queues.show(queue), given), draw_queue, given)


def _draw_queues(views: list[QueueView], width: int) -> list[Text]:
    if not views:
        return [Text("no queue is known to this database yet")]
    return [Text(as_of(views[0].stats_as_of), "bold"), *draw_queues(views, width)]


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


SORTS = {"w": "waiting", "r": "running", "e": "ended", "s": "started", "n": "name"}
"""Of keys, and the letters for them in `top`."""
ONLY_WIDE = ("SCHED", "SHARE", "WEIGHT", "ARRIVED", "STARTED")
KEYS_WIDE = 110
TEXT = ("KEY", "QUEUE", "HELD BY")


@click.command()
@click.argument("queue")
@click.option("--by", metavar="KEYS", help="List these keys: account, or account,region.  [default: the fair key]")
@click.option("--sort", type=click.Choice(list(SORTS.values())), default="waiting", help="Most first, or by name.")
@click.option(
    "--search", default="", show_default=False, metavar="TEXT", help="Only keys whose values contain this text."
)
@click.option("--held", "held_only", is_flag=True, help="Only keys that a limit or a pause of their own holds back.")
@click.option("--limit", type=click.IntRange(1, 500), default=50, help="Maximum number to list.")
@click.option("--after", metavar="CURSOR", help="Continue from the end of an earlier page.")
@key_option("named", "Show this key; repeat to combine several.")
@place_options
@json_option()
def keys(queue: str, named: tuple[str, ...], **given: Any) -> None:
    """List the keys of a queue, or show one. Looking changes nothing.

    One key is shown with its lanes, what runs, what starts next and what holds it.

    ENDED and FAIL, which is part of it, are of the last 24 hours, and so is SHARE, of the queue's run time (110 columns
    and more); LIMIT is how much of its fullest limit is used; WAITED is how long those that started in the last hour
    were ready before, on average; TIME is how long its jobs take. ARRIVED and STARTED are when a job of it last became
    ready (enqueued, due, or due again) and last started.

    \b
    Example:
      fairlane keys webhooks
      fairlane keys webhooks --by endpoint --sort running --search acme
      fairlane keys webhooks --key account=acme
    """
    how = {name: given[name] for name in ("by", "sort", "search", "held_only", "limit", "after")}
    if not named:
        page = look(lambda operations: operations.keys.list(queue, **how), given)
        show(page, _draw_key_page, given)
        show_rest(page.after, given)
    elif how["by"] or how["search"] or how["held_only"] or how["after"]:
        raise ConfigurationError("--key shows one key; leave out --by, --search, --held and --after")
    else:
        show(look(lambda operations: operations.keys.show(queue, keys_given(named)), given), draw_key, given)


def _draw_key_page(page: KeyList, width: int) -> list[Text]:
    if not page.keys:
        return [Text(_nothing(page))]
    unserved = [] if page.unserved is None else wrapped(page.unserved, width, "")
    return [Text(as_of(page.now), "bold"), *unserved, *draw_keys(page.keys, page.now, width)]


def _nothing(page: KeyList) -> str:
    by = ", ".join(page.by)
    if page.search:
        return "no key fits"
    if not page.held_only:
        return f"{page.queue} has no jobs by {by}"
    others = " or ".join(f"--by {','.join(scope)}" for scope in page.scopes if scope != page.by)
    return f"no limit or pause by {by} holds anybody back; look {others}" if others else "nobody is held back"


def draw_keys(views: Sequence[KeyView], now: datetime, width: int, *, with_queue: bool = False) -> list[Text]:
    """A line for each key, with as much as fits."""
    headings = [
        heading
        for heading in KEY_COLUMNS
        if (width >= KEYS_WIDE or heading not in ONLY_WIDE) and (with_queue or heading != "QUEUE")
    ]
    rows = [[KEY_COLUMNS[heading](each, now) for heading in headings] for each in views]
    right = [heading for heading in headings if heading not in TEXT]
    return columns(headings, rows, width, flexible=TEXT, right=right)


KEY_COLUMNS: Mapping[str, Callable[[KeyView, datetime], str]] = {
    "QUEUE": lambda view, now: whole_of(view.queue),
    "KEY": lambda view, now: ", ".join("None" if value is None else value for value in view.keys.values()),
    "WAIT": lambda view, now: number(view.waiting),
    "SCHED": lambda view, now: counted(view.scheduled),
    "RUN": lambda view, now: number(view.running),
    "ENDED": lambda view, now: number(view.ended),
    "FAIL": lambda view, now: number(view.failed),
    "LIMIT": lambda view, now: _fullest(view),
    "WAITED": lambda view, now: wait(view.mean_wait),
    "TIME": lambda view, now: run_time(view.run_time),
    "SHARE": lambda view, now: "" if view.share is None else f"{view.share:.0%}",
    "WEIGHT": lambda view, now: "" if view.weight is None else f"{view.weight:g}",
    "ARRIVED": lambda view, now: ago(view.last_arrived_at, now),
    "STARTED": lambda view, now: ago(view.last_started_at, now),
    "HELD BY": lambda view, now: "a pause" if view.is_paused else ", ".join(view.held_by),
}


def _fullest(view: KeyView) -> str:
    fullest = max(view.gauges, key=lambda gauge: gauge.saturation, default=None)
    return "" if fullest is None else f"{fullest.used:.4g}/{fullest.bound:.4g}"


def draw_key(one: OneKey, width: int) -> list[Text]:
    view = one.view
    title = f"{printable(key_words(view.keys))} in {view.queue}, {as_of(one.now)}"
    lines = [Text(title, "bold"), *draw_keys([view], one.now, width)]
    if view.drained_in is not None:
        least = "at least " if view.drains_at_least else ""
        drained = f"what waits will have started in {least}{wait(view.drained_in)}, if limits are all that slows it"
        lines += wrapped(drained, width)
    if view.weight_words:
        lines += wrapped(f"weight {view.weight:g}: {view.weight_words}", width)
    for title, words in (("WHY IT WAITS", one.why), ("CHANGED BY OPERATORS", one.overrides)):
        lines += titled(title, (line for each in words for line in wrapped(with_app(each), width)))
    lines += titled("LIMITS", (Text("  ").append_text(gauge_line(gauge, width - 2)) for gauge in view.gauges))
    lines += titled("LAST HOUR, minute by minute, and the most of them", chart_lines(one.minutes, width))
    hours = (("ended", view.hours), ("failed", one.hours_failed))
    lines += titled(
        "LAST 24 HOURS", (Text(f"  {name:<8}{sparkline(each)}  {number(sum(each))}") for name, each in hours)
    )
    if one.lanes:
        rows = [
            (key_words(lane.keys), str(lane.priority), number(lane.waiting), number(lane.running), lane.held_by or "")
            for lane in one.lanes
        ]
        headings = ("LANE", "PRIORITY", "WAIT", "RUN", "HELD BY")
        flexible, right = ("LANE", "HELD BY"), ("PRIORITY", "WAIT", "RUN")
        lines += titled("LANES", columns(headings, rows, width, flexible=flexible, right=right))
    for title, jobs in (("RUNNING", one.running), ("NEXT, in the order in which they would start", one.next_jobs)):
        lines += titled(title, _jobs(jobs, one.now, width) if jobs else [])
    return lines


def _jobs(jobs: Sequence[NextJob], now: datetime, width: int) -> list[Text]:
    rows = [
        (each.id, each.task, str(each.priority), str(each.attempt), ago(each.enqueued_at, now), key_words(each.keys))
        for each in jobs
    ]
    headings = ("ID", "TASK", "PRIO", "TRIES", "AGE", "KEYS")
    return columns(headings, rows, width, flexible=("TASK", "KEYS"), right=("PRIO", "TRIES", "AGE"))


HELP = "w waiting  r running  e ended  s started  n name  q quit"
AROUND = 4
"""Lines of the screen that are not keys: two above the headings and them, and one below."""
IN_A_PIPE = 50


@click.command()
@click.argument("queue", required=False, metavar="[QUEUE]")
@click.option("--by", metavar="KEYS", help="List these keys of the queue.  [default: the fair key]")
@click.option("--sort", type=click.Choice(list(SORTS.values())), default="waiting")
@click.option("--every", type=click.FloatRange(0.2, 3_600), default=2.0, help="Seconds.")
@place_options
@json_option("a JSON object, once")
def top(queue: str | None, by: str | None, sort: str, every: float, **given: Any) -> None:
    """Watch the keys of a queue, or of the busiest queues. Looking changes nothing.

    On a terminal it is drawn anew every so often, and a key sorts it: w, r, e, s, n; q quits. In a pipe it prints once.
    What the columns mean, `fairlane keys --help` says.

    \b
    Example:
      fairlane top
      fairlane top webhooks --by endpoint --sort running
      fairlane top webhooks --json | jq '.keys[0]'
    """
    if by and queue is None:
        raise ConfigurationError("--by is about the keys of one queue; name it: fairlane top QUEUE --by …")
    if is_on_a_terminal() and not given["as_json"]:
        run_until_stopped(lambda: _watch(queue, by, sort, every, given))
        return
    ranking = look(lambda operations: operations.keys.rank(queue, by, sort=sort, limit=IN_A_PIPE), given)
    show(ranking, draw_ranking, given)


async def _watch(queue: str | None, by: str | None, sort: str, every: float, given: Given) -> None:
    ticker, watching = Ticker(every), asyncio.current_task()
    assert watching is not None

    def press(key: str) -> None:
        nonlocal sort
        if key.lower() == "q":
            watching.cancel()
        elif key.lower() in SORTS:
            sort = SORTS[key.lower()]
            ticker.hurry()

    async def ask(operations: Operations) -> Ranking:
        limit = max(1, make_console().height - AROUND)
        return await operations.keys.rank(queue, by, sort=sort, limit=limit)

    await look_in_place(
        ask, lambda ranking, width: draw_ranking(ranking, width, help=HELP), ticker, given, pressed_keys(press)
    )


def draw_ranking(ranking: Ranking, width: int, *, help: str = "") -> list[Text]:
    where = ", ".join(ranking.queues) or "no queue is known to this database yet"
    more = f" and {ranking.left_out:,} queues with less to do" if ranking.left_out else ""
    said = Text(f"{as_of(ranking.now)}  {printable(where)}{more}  by {ranking.sort}", "bold")
    said.truncate(width, overflow="ellipsis")
    lines = [said, Text("")]
    for queue, words in ranking.unserved.items():
        lines += wrapped(words if len(ranking.queues) == 1 else f"{queue}: {words}", width, "")
    lines += draw_keys(ranking.keys, ranking.now, width, with_queue=len(ranking.queues) > 1)
    if not ranking.keys:
        lines.append(Text("nobody has a job here"))
    return [*lines, Text(help, "dim")] if help else lines


GONE = "q"
"""What a closed terminal counts as."""


def is_on_a_terminal() -> bool:
    """Whether somebody types there and reads what is shown."""
    return sys.stdin.isatty() and sys.stdout.isatty()


@contextmanager
def pressed_keys(on_key: Callable[[str], None]) -> Iterator[None]:
    """While this lasts, `on_key` is called with each key as it is pressed, which is not shown. Ctrl-C stays what it
    is."""
    terminal = sys.stdin.fileno()
    loop = asyncio.get_running_loop()
    before = termios.tcgetattr(terminal)

    def read() -> None:
        try:
            typed = os.read(terminal, 64)
        except OSError:
            typed = b""
        if not typed:
            loop.remove_reader(terminal)
        for key in typed.decode(errors="ignore") or GONE:
            on_key(key)

    tty.setcbreak(terminal)
    loop.add_reader(terminal, read)
    try:
        yield
    finally:
        loop.remove_reader(terminal)
        termios.tcsetattr(terminal, termios.TCSADRAIN, before)


WORKER_STYLES = {
    "well": "green",
    "replaced": "dim",
    "stopping": "magenta",
    "troubled": "yellow",
    "blocked": "bold red",
    "unwell": "bold red",
    "late": "bold red",
}


@click.command()
@click.option("--check", is_flag=True, help="Exit with status 1 if a worker is late, unhealthy or blocked.")
@app_or_url_options
@json_option()
def workers(check: bool, **given: Any) -> None:
    """List the workers: slots in use, what they serve, when last seen. Looking changes nothing.

    A worker is well, stopping, troubled (something fails around it: a dispatcher's broker refuses), blocked (a handler
    blocks its event loop, or that of one of its processes), unwell (a loop of it died), late (it has missed several
    reports in a row, so it died or stands still), or replaced: it died, and others on its host or under its name serve
    its queues. One that stops as it should is listed no more; one that died for a day, or for 15 minutes if live
    workers serve all its queues. WAIT are jobs that are claimed and have not started; CLOCK is how far the database's
    clock is ahead of the worker's.

    \b
    Example:
      fairlane workers
      fairlane workers --check
      fairlane workers --json | jq '.workers[] | select(.is_late)'
    """
    found = look(lambda operations: operations.workers.list(), given)
    show(found, draw_workers, given)
    if check and any(each.state in ("late", "unwell", "blocked") for each in found.workers):
        sys.exit(1)


def draw_workers(found: WorkerList, width: int) -> list[Text]:
    if not found.workers:
        return [Text("no worker is running")]
    right = ("SLOTS", "WAIT", "UP", "SEEN", "CLOCK")
    rows = [[cell(each, found.now) for cell in WORKER_COLUMNS.values()] for each in found.workers]
    head, *cells = columns(list(WORKER_COLUMNS), rows, width, flexible=("WORKER", "QUEUES"), right=right)
    lines = [head]
    for line, each in zip(cells, found.workers, strict=True):
        lines.append(line)
        for loop, cause in each.dead_loops.items():
            lines += wrapped(f"its loop {loop} died: {cause}", width, "  ", "    ")
        for block in each.blocks:
            if block.until is None:
                lines += wrapped(block.words, width, "  ", "    ")
        for run in each.long_runs:
            holds = "" if run.limit is None else f", and holds {run.limit}, for which others wait"
            lines += wrapped(f"job {run.job} ({run.task}) has run for {wait(run.ran)}{holds}", width, "  ", "    ")
        if each.lost_runs:
            lines += wrapped(each.lost_words, width, "  ", "    ")
        for name, words in each.warnings.items():
            lines += wrapped(f"{name}: {words}", width, "  ", "    ")
    late = f"; {found.late:,} gone silent" if found.late else ""
    stopping = f", {found.stopping:,} of them stopping" if found.stopping else ""
    lines.append(Text(f"{found.alive:,} alive{stopping}, {found.running:,} of {found.slots:,} slots in use{late}"))
    return lines


WORKER_COLUMNS: Mapping[str, Callable[[WorkerView, datetime], str | Text]] = {
    "WORKER": lambda worker, now: worker.name,
    "STATE": lambda worker, now: Text(worker.state, WORKER_STYLES[worker.state]),
    "SLOTS": lambda worker, now: f"{worker.running}/{worker.concurrency}",
    "WAIT": lambda worker, now: str(worker.waiting),
    "UP": lambda worker, now: ago(worker.started_at, now),
    "SEEN": lambda worker, now: ago(worker.seen_at, now),
    "CLOCK": lambda worker, now: f"{worker.clock_offset:+.1f}s",
    "QUEUES": lambda worker, now: ", ".join(
        f"{name}={weight:g}" if weight != 1 else name for name, weight in worker.queues.items()
    ),
}
