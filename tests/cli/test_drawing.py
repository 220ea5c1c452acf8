"""What the commands that look draw: made-up views, whatever the width."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec
import pytest

from fairlane.cli.output import Screen, Ticker, bar, columns, number, printable, sparkline, watch
from fairlane.cli.views import draw_key, draw_keys, draw_queue, draw_ranking, draw_status, draw_workers
from fairlane.errors import StoreUnavailable
from fairlane.operations import Ranking
from fairlane.operations.diagnosis import about_workers
from fairlane.operations.queues import hints_of, status_of
from fairlane.operations.views import (
    BlockView,
    Chart,
    Counted,
    GaugeView,
    HeldView,
    KeyMinute,
    KeyView,
    LaneView,
    LimitView,
    LongRunView,
    MinuteView,
    NextJob,
    OneKey,
    OneQueue,
    Overview,
    QueueStatus,
    QueueView,
    Totals,
    WorkerList,
    WorkerView,
)

NOW = datetime(2030, 1, 31, 3, 0, tzinfo=UTC)
HELD = HeldView(limit="concurrency:account", words="Concurrency(5, by='account')", by=["account"], keys=1, jobs=4_120)
GAUGE = GaugeView(
    limit="concurrency:account",
    words="Concurrency(5, by='account')",
    reason="concurrency",
    used=5,
    bound=5,
    room=0,
    saturation=1.0,
    opens_at=None,
)


def queue(name: str = "webhooks", **given: Any) -> QueueView:
    stats: dict[str, Any] = {
        "ready": 4_120,
        "held": [],
        "held_jobs": 0,
        "running": 5,
        "scheduled": Counted(10_000, False),
        "dead": Counted(1),
        "oldest_wait": 2_280.0,
        "started_per_minute": 120.0,
        "ended_per_minute": 118.0,
        "failed_per_minute": 0.4,
        "workers": 3,
        "slots": 60,
        "slots_free": 0,
        "is_paused": False,
        "partitions": 1,
        "unseen": 0,
        "stats_as_of": NOW,
    }
    view = QueueView(queue=name, status=QueueStatus.IDLE, words="", **(stats | given))
    status, words = status_of(view)
    return QueueView(
        **{each: getattr(view, each) for each in view.__struct_fields__ if each not in ("status", "words")},
        status=status,
        words=words,
    )


def key(value: str = "acme", **given: Any) -> KeyView:
    stats: dict[str, Any] = {
        "keys": {"account": value},
        "queue": "webhooks",
        "waiting": 4_120,
        "scheduled": Counted(3),
        "running": 5,
        "held_by": ["concurrency:account"],
        "ended": 1_234_567,
        "failed": 12,
        "run_time": 0.21,
        "share": 0.42,
        "weight": 1.0,
        "is_paused": False,
        "gauges": [GAUGE],
        "last_arrived_at": NOW - timedelta(seconds=3),
        "last_started_at": NOW - timedelta(minutes=5),
        "hours": [0] * 23 + [9],
        "drained_in": 2_280.0,
    }
    return KeyView(**(stats | given))


def worker(name: str = "web-1:77", **given: Any) -> WorkerView:
    stats: dict[str, Any] = {
        "id": "0198c0de-0000-7000-8000-000000000000",
        "host": "web-1",
        "pid": 77,
        "version": "1.0",
        "queues": {"webhooks": 1.0, "email": 2.0},
        "concurrency": 20,
        "running": 5,
        "waiting": 1,
        "unsettled": 0,
        "is_well": True,
        "is_stopping": False,
        "is_late": False,
        "is_gone": False,
        "started_at": NOW - timedelta(hours=3),
        "seen_at": NOW - timedelta(seconds=2),
        "clock_offset": 0.01,
        "loops": {"claiming": "running"},
        "tasks": ["deliver"],
        "stats": {},
    }
    return WorkerView(name=name, **(stats | given))


def overview(*queues: QueueView, keys: tuple[KeyView, ...] = (), workers: tuple[WorkerView, ...] = ()) -> Overview:
    hints = hints_of(queues, keys, about_workers(workers))
    chart = Chart(minutes=[], denied={})
    totals = Totals(ready=9, held_jobs=4, running=5, oldest_wait=12.0, workers=1, workers_late=1, slots=60)
    return Overview(now=NOW, totals=totals, queues=list(queues), hints=hints, chart=chart)


def text(lines: list[Any]) -> str:
    return "\n".join(line.plain for line in lines)


def assert_fits(lines: list[Any], width: int = 80) -> None:
    """Only what is to be copied as it stands may be wider."""
    wide = [line.plain for line in lines if line.cell_len > width and "→ fairlane " not in line.plain]
    assert wide == []


def test_what_troubles_a_worker_is_told_below_it() -> None:
    troubled = worker(warnings={"publishing": "OSError: nobody is there"})
    found = WorkerList(now=NOW, workers=[troubled], alive=1, late=0, slots=20, running=5)
    _, row, below, *_ = text(draw_workers(found, 100)).splitlines()
    assert row.split()[:2] == ["web-1:77", "troubled"]
    assert below == "  publishing: OSError: nobody is there"


RUN = LongRunView(
    job="0198c0de-0000-7000-8000-000000000001",
    task="export",
    queue="webhooks",
    worker="web-1:77",
    since=NOW - timedelta(minutes=40),
    ran=2_400.0,
    usual=3.0,
    is_long=True,
    limit="Concurrency(2)",
)
BLOCK = BlockView(
    since=NOW - timedelta(seconds=29),
    until=None,
    seconds=29.0,
    job="0198c0de-0000-7000-8000-000000000002",
    task="parse",
    where="parse (shop/tasks.py:31)",
    beside=[],
)


def test_what_blocks_a_worker_and_what_takes_long_in_it_is_told_below_it() -> None:
    other = msgspec.structs.replace(BLOCK, pid=17_811, where="read (shop/files.py:12)")
    over = msgspec.structs.replace(BLOCK, until=NOW)
    blocked = worker(long_runs=[RUN], lost_runs=2, blocks=[BLOCK, other, over])
    found = WorkerList(now=NOW, workers=[blocked], alive=1, late=0, slots=20, running=5)
    _, row, *below = text(draw_workers(found, 200)).splitlines()
    assert row.split()[:2] == ["web-1:77", "blocked"]
    assert below[:4] == [
        f"  its event loop has been blocked for 29 s by job {BLOCK.job} (parse), at parse (shop/tasks.py:31)",
        f"  the event loop of its process 17811 has been blocked for 29 s by job {BLOCK.job} (parse), at read "
        "(shop/files.py:12)",
        f"  job {RUN.job} (export) has run for 40 min, and holds Concurrency(2), for which others wait",
        "  2 runs whose claims are lost still take up slots",
    ]


def test_a_limit_that_a_long_run_holds_is_not_as_the_policy_wants_it() -> None:
    """N10."""
    told = text(draw_status(overview(queue(held=[HELD], held_jobs=4_120, long_runs=[RUN])), 200))
    assert "as the policy requires" not in told
    assert f"; job {RUN.job} (export) has held Concurrency(2) for 40 min" in told


def test_a_limit_at_work_looks_different_from_lag_without_any_colour() -> None:
    limited = queue("limited-one", held=[HELD], held_jobs=4_120)
    told = text(draw_status(overview(limited, queue("lagging-one"), keys=(key(),)), 100)).splitlines()
    (at_work,) = [line for line in told if line.startswith("limited-one")]
    (behind,) = [line for line in told if line.startswith("lagging-one")]
    assert at_work.split()[1:4] == ["limited", "4,120", "4,120"]
    assert behind.split()[1:4] == ["lagging", "4,120", "0"]
    assert "  limits hold back everything that waits (4,120 jobs), as the policy requires" in told
    assert "  - 4,120 jobs of 1 key held by Concurrency(5, by='account')" in told
    assert "  4,120 jobs could start, and no slot is free; the oldest waits for 38 min" in told
    assert "  limit   account=acme is held by its limit of 5: 4,120 jobs wait, 38 min to drain" in told
    assert "          → fairlane limit set webhooks concurrency:account NUMBER --key account=acme" in told


LONG = "a-queue-with-a-name-that-nobody-can-say-in-one-breath-and-yet-somebody-has-chosen"


def test_everything_fits_in_eighty_columns() -> None:
    huge = {"ready": 123_456_789, "running": 9_999_999, "dead": Counted(10_000, False), "started_per_minute": 1e6}
    views = (queue(LONG, **huge), queue("p", is_paused=True), queue("s", workers=0, running=0))
    workers = (
        worker(LONG, is_late=True),
        worker("b", loops={"claiming": "died " * 40}),
        worker("c", clock_offset=-90.5),
    )
    keys = (key(LONG), key("b", is_paused=True, held_by=["pause:account"]))
    assert_fits(draw_status(overview(*views, keys=keys, workers=workers), 80))
    assert_fits(draw_keys(keys, NOW, 80))
    found = WorkerList(now=NOW, workers=list(workers), alive=2, late=1, slots=40, running=10)
    assert_fits(draw_workers(found, 80))
    ranking = Ranking(now=NOW, queues=[LONG, "b"], left_out=3, sort="waiting", keys=list(keys))
    assert_fits(draw_ranking(ranking, 80, help="w waiting"))
    assert_fits(draw_queue(one_queue(), 80))
    assert_fits(draw_key(one_key(), 80))


def one_queue() -> OneQueue:
    minutes = [MinuteView(at=NOW - timedelta(minutes=60 - n), started=n, mean_wait=n) for n in range(60)]
    gauge = GaugeView(
        limit="concurrency",
        words="Concurrency(200)",
        reason="concurrency",
        used=50,
        bound=200,
        room=150,
        saturation=0.25,
        opens_at=None,
    )
    limits = [
        LimitView(
            limit=limit,
            words=words,
            by=by,
            gauge=shown,
            held_keys=len(by),
            held_jobs=4_120 * len(by),
            denied=77,
            is_suspended=False,
            overridden_keys=len(by),
        )
        for limit, words, by, shown in (
            ("concurrency", "Concurrency(200)", [], gauge),
            ("concurrency:account", "Concurrency(5, by='account')", ["account"], None),
        )
    ]
    return OneQueue(
        now=NOW,
        view=queue(held=[HELD], held_jobs=4_120),
        policy="Policy",
        version=3,
        policy_words=["Every account gets its turn, charged for the time its jobs run."],
        limits=limits,
        scopes=[["account"]],
        partitions=[queue("webhooks"), queue("webhooks__p1")],
        hints=[],
        chart=Chart(minutes=minutes, denied={"concurrency:account": 77}),
    )


def one_key() -> OneKey:
    job = NextJob(
        id="0198c0de-0000-7000-8000-000000000000",
        task="shop.deliver",
        priority=0,
        keys={"account": "acme", "endpoint": "api.acme.com/" + "x" * 90},
        attempt=1,
        enqueued_at=NOW - timedelta(minutes=9),
    )
    lane = LaneView(keys={"account": "acme", "task": "deliver"}, priority=5, waiting=7, running=2, held_by="rate/60s")
    return OneKey(
        now=NOW,
        view=key(),
        hours_failed=[0] * 24,
        minutes=[KeyMinute(at=NOW - timedelta(minutes=60 - n), started=2, mean_wait=n) for n in range(60)],
        lanes=[lane],
        running=[job],
        next_jobs=[job],
        why=["5 of 5 are running"],
        overrides=["concurrency:account is 5 for account=acme"],
    )


def test_a_queue_is_shown_with_its_policy_its_limits_its_partitions_and_its_hour() -> None:
    told = text(draw_queue(one_queue(), 80))
    assert "POLICY (version 3)\n  Every account gets its turn" in told
    assert "██░░░░░░░░   25%  50 of 200  Concurrency(200)" in told
    assert "holds back 4,120 jobs of 1 key; turned claims away 77 times in the last" in told
    assert "webhooks__p1" in told
    assert "denied  concurrency:account 77" in told
    (line,) = [line for line in told.splitlines() if line.startswith("  started")]
    assert "▁" in line
    assert "█  59" in line


def test_a_key_is_shown_with_lanes_jobs_in_run_order_why_and_what_operators_changed() -> None:
    told = text(draw_key(one_key(), 80))
    for said in (
        "account=acme in webhooks",
        "what waits will have started in 38 min",
        "WHY IT WAITS\n  5 of 5 are running",
        "CHANGED BY OPERATORS\n  concurrency:account is 5 for account=acme",
        "██████████  100%  5 of 5",
        "NEXT, in the order in which they would start",
        "█  59 s",
    ):
        assert said in told
    assert told.count("0198c0de-0000-7000-8000-000000000000") == 2, "ids are never cut off"


def test_keys_say_how_long_they_waited_beside_how_long_they_run() -> None:
    for width in (80, 200):
        head, row = text(draw_keys([key(mean_wait=42.0)], NOW, width)).splitlines()
        assert head.index("WAITED") + len("WAITED") == row.index("42 s") + len("42 s")
        assert head.index("WAITED") < head.index("TIME")


def test_what_ended_in_a_day_is_told_by_queue_however_wide_the_terminal() -> None:
    """N8."""
    views = overview(queue(ended=1_234, failed=5), queue("email", ended=7, failed=0))
    narrow = text(draw_status(views, 80))
    assert "  1,234 ended in 24 h, 5 of them failed" in narrow
    assert "  7 ended in 24 h, 0 of them failed" in narrow
    rows = [
        line.split() for line in text(draw_status(views, 100)).splitlines() if line[:5] in ("QUEUE", "webho", "email")
    ]
    assert rows[0][-3:] == ["24H", "FAIL", "24H"]
    assert [row[-2:] for row in rows[1:]] == [["1,234", "5"], ["7", "0"]]


def test_a_queue_that_is_stopped_says_why_though_nothing_is_ready() -> None:
    """N9: jobs of an unknown task are given back, and wait as scheduled ones meanwhile."""
    told = text(draw_status(overview(queue(ready=0, running=0, unknown_tasks=["export"])), 80))
    assert "  no worker that serves it knows task 'export': its jobs are given back" in told


def test_a_key_cannot_write_on_the_operators_terminal() -> None:
    hostile = "\x1b[2J\x1b]0;owned\x07\r\n\u202eevil"
    views = [key(hostile, held_by=["\x1b[1m"])]
    shown = text(draw_keys(views, NOW, 200)) + text(draw_key(one_key(), 200))
    ranking = Ranking(now=NOW, queues=[hostile], left_out=0, sort="name", keys=views)
    shown += text(draw_ranking(ranking, 200)) + text(draw_status(overview(queue(hostile), keys=tuple(views)), 200))
    assert all(each.isprintable() for each in shown.replace("\n", ""))
    assert "\\x1b[2J" in shown


def test_late_and_unwell_workers_are_marked_in_words() -> None:
    late, sick = worker("a", is_late=True), worker("b", is_well=False, loops={"claiming": "ValueError: no"})
    found = WorkerList(
        now=NOW, workers=[late, sick, worker("c", is_stopping=True)], alive=2, late=1, slots=40, running=9
    )
    told = text(draw_workers(found, 80))
    states = [line.split()[1] for line in told.splitlines() if line[:2] in ("a ", "b ", "c ")]
    assert states == ["late", "unwell", "stopping"]
    assert "  its loop claiming died: ValueError: no" in told
    assert "2 alive, 9 of 40 slots in use; 1 gone silent" in told


@pytest.mark.parametrize(
    ("count", "said"),
    [(0, "0"), (99_999, "99,999"), (100_000, "100k"), (999_499, "999k"), (999_500, "1.0M"), (12_345_678, "12.3M")],
)
def test_a_number_is_exact_while_it_is_short(count: int, said: str) -> None:
    assert number(count) == said


def test_only_what_is_full_looks_full_and_only_what_is_empty_looks_empty() -> None:
    assert bar(0, 4) == "░░░░"
    assert bar(0.01, 4) == "█░░░"
    assert bar(0.99, 4) == "███░"
    assert bar(1, 4) == bar(3, 4) == "████"
    assert sparkline([0, 1, 50, 100]) == " ▁▅█"
    assert sparkline([0, 0]) == "  "
    assert printable("käse\x00") == "käse\\x00"


def test_a_column_that_must_not_give_way_does_not() -> None:
    (head, line) = columns(("ID", "WHAT"), [("0" * 36, "wide " * 40)], 60, flexible=("WHAT",))
    assert head.plain == "ID" + " " * 36 + "WHAT"
    assert line.plain.startswith("0" * 36 + "  wide wide")
    assert line.cell_len == 60


# Watching.


class Enough(Exception):
    pass


async def test_a_lost_database_is_told_and_looked_for_again() -> None:
    answers: Iterator[Any] = iter([1, StoreUnavailable("it is gone"), StoreUnavailable("it is gone"), 2, Enough()])
    seen: list[Any] = []

    async def look() -> int:
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return int(answer)

    async def pause() -> None:
        seen.append("pause")

    with pytest.raises(Enough):
        await watch(look, seen.append, seen.append, pause)
    assert seen == [1, "pause", "it is gone", "pause", "it is gone", "pause", 2, "pause"]


async def test_a_pause_can_be_cut_short_and_the_next_one_is_whole_again() -> None:
    ticker = Ticker(3_600)
    ticker.hurry()
    await ticker()
    waiting = asyncio.create_task(ticker())
    await asyncio.sleep(0)
    assert not waiting.done()
    ticker.hurry()
    await waiting


def test_what_was_seen_last_stays_on_the_screen_of_a_lost_database() -> None:
    drawn: list[str] = []
    screen = Screen(lambda lines: drawn.append(text(lines)))
    screen.show(draw_keys([key()], NOW, 80))
    screen.lost("PostgreSQL cannot be reached")
    assert drawn[1] == "PostgreSQL cannot be reached; looking again. This was seen last:\n" + drawn[0]


def test_after_the_last_worker_has_stopped_none_is_running() -> None:
    found = WorkerList(now=datetime(2026, 1, 1, tzinfo=UTC), workers=[], alive=0, late=0, slots=0, running=0)
    assert text(draw_workers(found, 80)).strip() == "no worker is running"
