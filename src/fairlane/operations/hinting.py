"""Hints: what a look at queues, keys and workers says to do, in words and with the knob to turn.

Pure: they say what the views show. A limit that does its work is told apart from workers that do not keep up.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from shlex import quote

from fairlane.clock import lasting
from fairlane.operations.findings import Finding, Level
from fairlane.operations.views import GaugeView, HeldView, Hint, HintKind, KeyView, QueueStatus, QueueView
from fairlane.policy.keys import key_words
from fairlane.policy.partitions import whole_of
from fairlane.scheduler.explain import no_service, start_command

__all__ = ["hints_of", "status_of"]

LAGGING_AFTER = 60.0
"""Seconds that a job which nothing holds back may wait before it is told as lag."""
MOST_HINTS = 20
OF_ONE_LIMIT = 3
"""Keys that are named one by one for a limit that holds many back: its queue's page has the others."""
TOLD_BY_QUEUES = ("broker refuses", "unbegun jobs")
"""Findings about dispatchers that their queues tell of."""
FEW_SLOTS = 0.9
OFTEN_FAILING = 0.5
OFTEN_DENIED = 0.1
"""Jobs turned away for each that started: where slots are what is short, limits turn hardly any away."""


def status_of(view: QueueView) -> tuple[QueueStatus, str]:
    """How a queue is doing, in a word and in a sentence. What the view says of its status is not looked at."""
    ready, held, running = view.ready, view.held_jobs, view.running
    if view.is_paused:
        return QueueStatus.PAUSED, f"paused: {_waiting(ready)}, {running:,} still run"
    if not ready and not running and view.unknown_tasks:
        tasks = ", ".join(map(repr, view.unknown_tasks))
        return QueueStatus.STOPPED, f"no worker that serves it knows task {tasks}: its jobs are given back"
    if not ready:
        return (QueueStatus.FLOWING, f"{running:,} run, nothing waits") if running else (QueueStatus.IDLE, "idle")
    if view.refusal is not None:
        return QueueStatus.STOPPED, f"the broker refuses what is published: {_waiting(ready)}; {view.refusal}"
    if not view.workers:
        # What a worker that died was running counts as running until somebody is there to notice.
        left = f", {running:,} {'was' if running == 1 else 'were'} running" if running else ""
        who = no_service(view.workers_stopping, is_forwarded=view.is_forwarded)
        return QueueStatus.STOPPED, f"{who}: {_waiting(ready)}{left}"
    eligible, pauses, limits = ready - held, *_by_pause(view.held)
    if _is_rated(view, eligible):
        let = "lets jobs start as it opens" if len(view.rates) == 1 else "let jobs start as they open"
        return QueueStatus.LIMITED, f"{', '.join(view.rates.values())} {let}, as the policy requires: {_waiting(ready)}"
    if eligible <= 0:
        if pauses and not limits:
            return (
                QueueStatus.LIMITED,
                f"pauses hold back everything that waits ({_jobs(ready)}), as operators requested",
            )
        if pauses:
            words = f"pauses of operators and limits hold back everything that waits ({_jobs(ready)})"
            return QueueStatus.LIMITED, f"{words}; {', '.join(f'{_jobs(each.jobs)}: {each.words}' for each in pauses)}"
        holding = [run for run in view.long_runs if run.limit is not None]
        if holding:
            longest = holding[0]
            words = f"; job {longest.job} ({longest.task}) has held {longest.limit} for {lasting(longest.ran)}"
            return QueueStatus.LIMITED, f"limits hold back everything that waits ({_jobs(ready)}){words}"
        return QueueStatus.LIMITED, f"limits hold back everything that waits ({_jobs(ready)}), as the policy requires"
    if _is_lagging(view, eligible):
        are = "is" if view.slots_free == 1 else "are"
        slots = f"{view.slots_free:,} of {view.slots:,} slots {are} free" if view.slots_free else "no slot is free"
        oldest = "" if held or view.oldest_wait is None else f"; the oldest waits for {lasting(view.oldest_wait)}"
        return QueueStatus.LAGGING, f"{_jobs(eligible)} could start, and {slots}{oldest}"
    by = " and ".join(["limits"] * bool(limits) + ["pauses"] * bool(pauses)) or "limits"
    back = f", {held:,} {'is' if held == 1 else 'are'} held back by {by}" if held else ""
    return QueueStatus.FLOWING, f"{_jobs(eligible)} could start now{back}"


def _by_pause(held: Iterable[HeldView]) -> tuple[list[HeldView], list[HeldView]]:
    """What pauses hold back, and what limits do."""
    pauses = [each for each in held if each.limit.startswith("pause:")]
    return pauses, [each for each in held if each not in pauses]


def _is_rated(view: QueueView, eligible: int) -> bool:
    """Whether rates are all that slows a queue down, at a moment in which they are shut or have just opened: they have
    turned jobs away lately, nothing else holds any back, and those that could start now do not wait for a slot."""
    if not view.rates or any(each.limit not in view.rates for each in view.held):
        return False
    return eligible <= 0 or not _is_busy(view) or _has_just_opened(view)


def _has_just_opened(view: QueueView) -> bool:
    """Whether a limit that turns jobs away again and again holds nobody at this moment: it lets the next job start."""
    return not view.held_jobs and view.recently_denied > OFTEN_DENIED * view.recently_started


def _is_lagging(view: QueueView, eligible: int) -> bool:
    """Whether jobs that nothing holds back wait for long. Where others are held back, nobody knows which is the oldest:
    then by whether all slots are busy, and more could start than start in a minute. A limit that has room for the next
    job just now holds back the others all the same."""
    if _has_just_opened(view) or (view.oldest_wait is not None and view.oldest_wait <= LAGGING_AFTER):
        return False
    if not view.held_jobs and not view.recently_denied:
        return view.oldest_wait is not None and view.oldest_wait > LAGGING_AFTER
    return _is_busy(view) and view.recently_started > 0 and eligible > view.started_per_minute


def _is_busy(view: QueueView) -> bool:
    return view.slots > 0 and view.slots - view.slots_free >= FEW_SLOTS * view.slots


def hints_of(queues: Sequence[QueueView], keys: Iterable[KeyView], findings: Iterable[Finding]) -> list[Hint]:
    """Faults first, then lag, then pauses, then what may break soon, then limits that do their work."""
    hints = [*_of_findings(findings), *_about_queues(queues), *_about_keys(keys)]
    order = {HintKind.FAULT: 0, HintKind.LAG: 1, HintKind.PAUSE: 2, HintKind.WARNING: 3, HintKind.LIMIT: 4}
    return sorted(hints, key=lambda hint: order[hint.kind])[:MOST_HINTS]


def _of_findings(findings: Iterable[Finding]) -> Iterator[Hint]:
    """What the doctor finds at a glance, but for what the queues say themselves. What may be on purpose is left to the
    doctor."""
    kinds = {Level.FAULT: HintKind.FAULT, Level.WARNING: HintKind.WARNING}
    for each in findings:
        if (kind := kinds.get(each.level)) is not None and each.check not in TOLD_BY_QUEUES:
            yield Hint(kind=kind, queue=each.queue, words=each.words, knob=each.remedy)


def _about_queues(queues: Sequence[QueueView]) -> Iterator[Hint]:
    stopped = [each for each in queues if each.status is QueueStatus.STOPPED and each.ready and each.refusal is None]
    for is_forwarded in dict.fromkeys(each.is_forwarded for each in stopped):
        yield _about_stopped([each for each in stopped if each.is_forwarded is is_forwarded])
    for each in queues:
        if each.status is QueueStatus.STOPPED and each.refusal is not None:
            knob = "check the broker; publishing is retried until it accepts messages"
            yield Hint(kind=HintKind.FAULT, queue=each.queue, words=f"{each.queue}: {each.words}", knob=knob)
        elif each.status is QueueStatus.LAGGING:
            knob = "start more workers, or give them more --concurrency"
            if each.slots and not _is_busy(each):
                knob = f"slots are free, so it is not the workers: fairlane explain --queue {quote(each.queue)}"
            yield Hint(kind=HintKind.LAG, queue=each.queue, words=f"{each.queue}: {each.words}", knob=knob)
        elif each.status is QueueStatus.PAUSED and each.ready:
            knob = f"fairlane resume {quote(each.queue)}"
            yield Hint(kind=HintKind.PAUSE, queue=each.queue, words=f"{each.queue} is {each.words}", knob=knob)
        if each.unbegun is not None:
            knob = "start a worker of the engine that consumes the queue, or check those that do"
            yield Hint(kind=HintKind.WARNING, queue=each.queue, words=f"{each.queue}: {each.unbegun}", knob=knob)
        yield from _about_failures(each)


def _about_stopped(views: Sequence[QueueView]) -> Hint:
    """Queues that nobody serves, and whose jobs wait: one command starts them all."""
    names = [each.queue for each in views]
    knob = start_command(*names, is_forwarded=views[0].is_forwarded)
    if len(views) == 1:
        return Hint(kind=HintKind.FAULT, queue=names[0], words=f"{names[0]}: {views[0].words}", knob=knob)
    who = "dispatcher" if views[0].is_forwarded else "worker"
    words = f"{', '.join(names)}: no {who} serves these queues: {_waiting(sum(each.ready for each in views))}"
    return Hint(kind=HintKind.FAULT, queue=None, words=words, knob=knob)


def _about_failures(view: QueueView) -> Iterator[Hint]:
    knob = f"fairlane dead list --queue {quote(view.queue)}"
    if view.recently_failed > OFTEN_FAILING * view.recently_ended:
        share = view.recently_failed / view.recently_ended
        words = f"{view.queue}: {share:.0%} of the runs of the last five minutes failed"
        yield Hint(kind=HintKind.FAULT, queue=view.queue, words=words, knob=knob)
    elif view.recently_failed and view.dead.count:
        more = "" if view.dead.is_all else " or more"
        runs = "1 run" if view.recently_failed == 1 else f"{view.recently_failed:,} runs"
        words = f"{view.queue}: {runs} of the last five minutes failed, and {_jobs(view.dead.count)}{more} died"
        yield Hint(kind=HintKind.FAULT, queue=view.queue, words=words, knob=knob)


def _about_keys(keys: Iterable[KeyView]) -> Iterator[Hint]:
    told = Counter[tuple[str, str]]()
    for each in keys:
        if not each.held_by or not each.waiting:
            continue
        who, queue = key_words(each.keys), whole_of(each.queue)
        told.update((queue, limit) for limit in each.held_by)
        if max(told[queue, limit] for limit in each.held_by) > OF_ONE_LIMIT:
            continue
        if each.is_paused:
            words = f"{who} is paused: {_waiting(each.waiting)}"
            knob = f"fairlane resume {quote(queue)} {_key_options(each)}"
            yield Hint(kind=HintKind.PAUSE, queue=queue, words=words, knob=knob, keys=each.keys)
            continue
        gauge = next((gauge for gauge in each.gauges if gauge.limit in each.held_by), None)
        if gauge is None:
            continue
        words = f"{who} is held by its {_bound_words(gauge)}: {_waiting(each.waiting)}"
        if each.drained_in is not None:
            words += f", {lasting(each.drained_in)} to drain"
        knob = f"fairlane limit set {quote(queue)} {quote(gauge.limit)} NUMBER {_key_options(each)}"
        yield Hint(kind=HintKind.LIMIT, queue=queue, words=words, knob=knob, keys=each.keys, limit=gauge.limit)


def _bound_words(gauge: GaugeView) -> str:
    if gauge.reason == "rate":
        return f"rate ({gauge.words})"
    if gauge.reason == "breaker":
        return "breaker, which is open after failures"
    if gauge.reason == "sequence":
        return "sequence: its jobs run one after the other"
    return f"limit of {gauge.bound:g}"


def _key_options(view: KeyView) -> str:
    return " ".join(f"--key {quote(f'{name}={value}')}" for name, value in view.keys.items())


def _waiting(count: int) -> str:
    return "1 job waits" if count == 1 else f"{count:,} jobs wait"


def _jobs(count: int) -> str:
    return "1 job" if count == 1 else f"{count:,} jobs"
