"""Hints and statuses say what views show: a limit that does its work is not lag, and each names its knob."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import msgspec
import pytest

from fairlane import AdaptiveConcurrency, Backlog, Breaker, Concurrency, Fair, Rate, Sequence
from fairlane.clock import lasting
from fairlane.operations.diagnosis import Finding, Level, about_workers
from fairlane.operations.queues import hints_of, status_of
from fairlane.operations.views import (
    Counted,
    GaugeView,
    HeldView,
    HintKind,
    KeyView,
    LongRunView,
    QueueStatus,
    QueueView,
    WorkerView,
)
from fairlane.policy import Policy
from fairlane.policy.policy import policy_words

NOW = datetime(2030, 1, 31, 8, tzinfo=UTC)


def queue(**stats: object) -> QueueView:
    view = QueueView(
        queue="webhooks",
        status=QueueStatus.IDLE,
        words="",
        ready=0,
        held=[],
        held_jobs=0,
        running=0,
        scheduled=Counted(),
        dead=Counted(),
        oldest_wait=None,
        started_per_minute=0.0,
        ended_per_minute=0.0,
        failed_per_minute=0.0,
        workers=1,
        slots=100,
        slots_free=0,
        is_paused=False,
        partitions=1,
        unseen=0,
        stats_as_of=NOW,
    )
    view = msgspec.structs.replace(view, **stats)
    status, words = status_of(view)
    return msgspec.structs.replace(view, status=status, words=words)


@pytest.mark.parametrize(
    ("stats", "status"),
    [
        ({}, QueueStatus.IDLE),
        ({"running": 3}, QueueStatus.FLOWING),
        ({"running": 3, "lapsed": 3}, QueueStatus.FLOWING),  # somebody is there to take them back
        ({"running": 3, "lapsed": 3, "workers": 0}, QueueStatus.STOPPED),
        ({"running": 3, "workers": 0}, QueueStatus.FLOWING),  # a program claims by hand
        ({"ready": 5, "running": 3, "oldest_wait": 1.0}, QueueStatus.FLOWING),
        ({"ready": 5, "workers": 0}, QueueStatus.STOPPED),
        ({"ready": 5, "workers": 0, "running": 9}, QueueStatus.STOPPED),
        ({"ready": 5, "held_jobs": 5, "running": 5, "oldest_wait": 9_000.0}, QueueStatus.LIMITED),
        ({"ready": 5_000, "running": 100, "oldest_wait": 600.0}, QueueStatus.LAGGING),
        ({"ready": 500, "held_jobs": 5, "started_per_minute": 100.0, "recently_started": 500}, QueueStatus.LAGGING),
        (
            {"ready": 500, "held_jobs": 5, "started_per_minute": 100.0, "recently_started": 500, "slots_free": 91},
            QueueStatus.FLOWING,
        ),
        # Nobody has waited for a minute yet.
        (
            {"ready": 500, "held_jobs": 5, "started_per_minute": 9.0, "recently_started": 500, "oldest_wait": 9.0},
            QueueStatus.FLOWING,
        ),
        # A rate has room for the next job just now, so nobody is held at this moment: no lag.
        ({"ready": 500, "oldest_wait": 600.0, "recently_denied": 9, "slots_free": 91}, QueueStatus.FLOWING),
        ({"ready": 50, "held_jobs": 5, "started_per_minute": 100.0, "recently_started": 500}, QueueStatus.FLOWING),
        ({"ready": 5, "is_paused": True, "workers": 0}, QueueStatus.PAUSED),
    ],
)
def test_a_queue_says_how_it_does_in_a_word(stats: dict[str, object], status: QueueStatus) -> None:
    assert queue(**stats).status is status


RATE = "rate/60s:endpoint"
RATED: dict[str, object] = {
    "ready": 1_600, "rates": {RATE: "Rate(100, per='1m', by='endpoint')"}, "oldest_wait": 600.0, "running": 1,
    "started_per_minute": 100.0, "recently_started": 500, "recently_denied": 500,
}  # fmt: skip


def held_by(limit: str, jobs: int, words: str = "") -> HeldView:
    return HeldView(limit=limit, words=words, by=["endpoint"], keys=1, jobs=jobs)


def test_a_rate_is_told_in_the_same_words_whether_it_is_shut_or_has_just_opened() -> None:
    shut: dict[str, object] = {"held_jobs": 1_600, "held": [held_by(RATE, 1_600)]}
    for slots_free in (0, 1, 99):
        for view in [queue(**RATED, slots_free=slots_free, **stats) for stats in (shut, {})]:
            assert view.status is QueueStatus.LIMITED
            assert view.words == (
                "Rate(100, per='1m', by='endpoint') lets jobs start as it opens, as the policy requires: "
                "1,600 jobs wait"
            )
            assert hints_of([view], [], []) == []


def test_jobs_without_a_slot_are_lag_though_a_rate_has_turned_others_away() -> None:
    assert queue(**RATED, held_jobs=40, held=[held_by(RATE, 40)]).status is QueueStatus.LAGGING
    assert queue(**RATED | {"recently_denied": 3}).status is QueueStatus.LAGGING
    assert queue(**RATED | {"recently_denied": 3}, slots_free=99).status is QueueStatus.LIMITED


def test_a_pause_of_an_operator_is_not_told_as_policy() -> None:
    held = [held_by("pause:account", 1_580, "a pause by account"), held_by("concurrency:account", 71)]
    view = queue(ready=1_651, held_jobs=1_651, held=held)
    assert view.status is QueueStatus.LIMITED
    assert view.words == (
        "pauses of operators and limits hold back everything that waits (1,651 jobs); 1,580 jobs: a pause by account"
    )
    some = queue(ready=9, held_jobs=1, held=[held_by("pause:account", 1)])
    assert some.words == "8 jobs could start now, 1 is held back by pauses"


def test_hints_go_from_faults_over_lag_and_pauses_to_warnings_and_limits() -> None:
    stopped, lagging = queue(queue="mail", ready=5, workers=0), queue(ready=5_000, running=100, oldest_wait=600.0)
    warning = Finding(check="old transaction", queue=None, message="", remedy="", level=Level.WARNING)
    hints = hints_of([stopped, lagging], [key(), key(is_paused=True)], [warning])
    assert [each.kind for each in hints] == ["fault", "lag", "pause", "warning", "limit"]


def test_queues_that_nobody_serves_have_one_hint_with_one_command() -> None:
    (hint,) = hints_of([queue(queue=name, ready=5, workers=0) for name in ("email", "sms", "push")], [], [])
    assert (hint.queue, hint.knob) == (None, "fairlane worker module:app")
    assert hint.words == "email, sms, push: no worker serves these queues: 15 jobs wait"


def test_a_queue_whose_only_worker_is_stopping_says_so() -> None:
    view = queue(ready=5, workers=0, workers_stopping=1, running=1)
    assert view.status is QueueStatus.STOPPED
    assert view.words == "its only worker is stopping and takes no new jobs: 5 jobs wait, 1 was running"


def test_runs_that_hold_one_limit_are_told_once() -> None:
    runs = [
        LongRunView(
            job=f"job-{minutes}", task="send", queue="webhooks", worker="one", since=NOW - timedelta(minutes=minutes),
            ran=60.0 * minutes, usual=1.0, is_long=True, limit="Concurrency(8, by='account')",
        )
        for minutes in (5, 40, 7)
    ]  # fmt: skip
    (hint,) = hints_of([], [], about_workers([worker(long_runs=runs[:2]), worker(long_runs=runs[2:])]))
    assert hint.kind is HintKind.WARNING
    assert "job job-40 (send) has run for 40 min" in hint.words
    assert hint.words.endswith(
        "it holds Concurrency(8, by='account'), for which others wait; 2 others hold it too, none for longer"
    )


def test_one_free_slot_is_one() -> None:
    assert "1 of 40 slots is free" in queue(ready=5_000, oldest_wait=600.0, slots=40, slots_free=1).words


def key(**stats: object) -> KeyView:
    gauge = GaugeView(
        limit="concurrency:account",
        words="Concurrency(5, by='account')",
        reason="concurrency",
        used=5,
        bound=5,
        room=0,
        saturation=1.0,
        opens_at=None,
    )
    view = KeyView(
        keys={"account": "acme"},
        queue="webhooks__p2",
        waiting=4_120,
        scheduled=Counted(),
        running=5,
        held_by=["concurrency:account"],
        ended=0,
        failed=0,
        run_time=2.767,
        share=None,
        weight=1.0,
        is_paused=False,
        gauges=[gauge],
        last_arrived_at=None,
        last_started_at=None,
        hours=[0] * 24,
        drained_in=2_280.0,
    )
    return msgspec.structs.replace(view, **stats)


def test_a_key_behind_its_limit_is_told_with_the_command_that_changes_it() -> None:
    (hint,) = hints_of([queue(running=5)], [key()], [])
    assert hint.kind is HintKind.LIMIT
    assert hint.words == "account=acme is held by its limit of 5: 4,120 jobs wait, 38 min to drain"
    assert hint.knob == "fairlane limit set webhooks concurrency:account NUMBER --key account=acme"


@pytest.mark.parametrize(
    ("reason", "limit"), [("sequence", "sequence:account"), ("concurrency", "concurrency:account@seats")]
)
def test_no_command_is_named_that_is_refused(reason: str, limit: str) -> None:
    """A sequence has no number, and a limit that queues share has none of its own in one of them."""
    (gauge,) = key().gauges
    held = key(gauges=[msgspec.structs.replace(gauge, reason=reason, limit=limit)], held_by=[limit])
    (hint,) = hints_of([queue(running=5)], [held], [])
    assert hint.knob == "fairlane explain --queue webhooks --key account=acme"


def test_a_paused_key_is_told_with_the_command_that_resumes_it() -> None:
    (hint,) = hints_of([], [key(is_paused=True, keys={"account": "a b"})], [])
    assert hint.kind is HintKind.PAUSE
    assert hint.knob == "fairlane resume webhooks --key 'account=a b'"


def test_of_many_keys_behind_one_limit_the_first_are_named() -> None:
    keys = [key(keys={"account": str(number)}) for number in range(10)]
    assert [hint.keys for hint in hints_of([], keys, [])] == [{"account": str(number)} for number in range(3)]


def test_lag_is_told_before_limits_and_says_whether_slots_are_the_reason() -> None:
    lagging = queue(ready=5_000, running=100, oldest_wait=600.0)
    full = hints_of([lagging], [key()], [])
    assert [hint.kind for hint in full] == [HintKind.LAG, HintKind.LIMIT]
    assert "start more workers" in full[0].knob
    (free, _) = hints_of([msgspec.structs.replace(lagging, slots_free=90)], [key()], [])
    assert free.knob == "slots are free, so it is not the workers: fairlane explain --queue webhooks"


def test_a_queue_without_workers_and_failing_runs_are_faults() -> None:
    views = [queue(ready=3, workers=0), queue(queue="email", recently_ended=10, recently_failed=9)]
    stopped, failing = hints_of(views, [], [])
    assert stopped.knob == "fairlane worker module:app --queues webhooks"
    assert failing.words == "email: 90% of the runs of the last five minutes failed"


def worker(**stats: object) -> WorkerView:
    view = WorkerView(
        id="w",
        name="host:1",
        host="host",
        pid=1,
        version="0.1.0",
        queues={"webhooks": 1.0},
        concurrency=100,
        running=0,
        waiting=0,
        unsettled=0,
        is_well=True,
        is_stopping=False,
        is_late=False,
        is_gone=False,
        started_at=NOW,
        seen_at=NOW,
        clock_offset=0.0,
        loops={"claiming": "running", "leases": "ended"},
        tasks=[],
        stats={},
    )
    return msgspec.structs.replace(view, **stats)


def test_workers_that_are_silent_broken_or_out_of_time_are_faults() -> None:
    workers = [
        worker(),
        worker(is_late=True),
        worker(loops={"claiming": "OSError: gone"}),
        worker(clock_offset=-9.0),
    ]
    broken, skewed, silent = hints_of([], [], about_workers(workers))
    assert [each.kind for each in (broken, skewed, silent)] == [HintKind.FAULT, HintKind.FAULT, HintKind.WARNING]
    assert "was last heard from at 2030-01-31 08:00:00 UTC" in silent.words
    assert broken.words == "worker host:1: its loop claiming died (OSError: gone)"
    assert skewed.words == "the clock of worker host:1 differs from the database's by -9.0 s"


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(0.3, "0.3 s"), (59, "59 s"), (99, "99 s"), (115, "2 min"), (120, "2 min"), (7_200, "2 h"), (200_000, "2 d")],
)
def test_durations_have_the_unit_that_suits_them(seconds: float, words: str) -> None:
    assert lasting(seconds) == words


def test_a_policy_is_told_in_sentences() -> None:
    policy = Policy(
        "q",
        Fair(by="account"),
        (
            Concurrency(5, by="account"),
            Concurrency({"acme": 9}, by="account"),
            Concurrency(200),
            Rate(100, per="1m", by="endpoint"),
            Rate(300, per="1h", rolling=True, name="vendor"),
            AdaptiveConcurrency(by="endpoint", min=2, max=50),
            Breaker(5, by="endpoint", cooldown="30s"),
            Backlog(1_000, by="account", when_full="reject"),
        ),
    )
    assert policy_words(policy) == [
        "Every account gets its turn, charged for the time its jobs run.",
        "At most 5 at the same time for each account.",
        "At the same time for each account: 9 for acme.",
        "At most 200 at the same time in the whole queue.",
        "At most 100 starts per minute for each endpoint, 100 at once.",
        "Never more than 300 starts within any hour in the whole queue, shared by all queues that name 'vendor'.",
        "A cap that learns, from 2 to 50 at the same time for each endpoint.",
        "Stops for each endpoint after 5 failures in a row; probes again after 30 seconds.",
        "At most 1,000 may wait for each account; beyond that more are refused.",
    ]


def test_a_plain_queue_and_a_sequence_are_told_too() -> None:
    assert policy_words(Policy("q")) == ["First come, first served, higher priorities with a head start."]
    policy = Policy("q", None, (Sequence(by="order"),))
    assert policy_words(policy)[1] == "Strictly one after the other for each order."
