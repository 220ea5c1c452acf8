"""`app.operations`: what operators see and do. Each noun is an attribute, and holds what can be done with it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Self

from fairlane.clock import Instant, as_datetime
from fairlane.operations.diagnosis import Finding, diagnose, findings_at_a_glance
from fairlane.operations.jobs import Jobs
from fairlane.operations.keys import Keys, keys_at
from fairlane.operations.metrics import FleetMetrics, metrics_at
from fairlane.operations.overrides import Limits, Overrides, Weights
from fairlane.operations.partitions import Partitions
from fairlane.operations.policies import Audit, Policies
from fairlane.operations.queues import Look, Queues, hints_of, look_at, look_with_keys, sum_of, views_of
from fairlane.operations.schedules import Schedules
from fairlane.operations.section import PROGRAM, KeyValues, OperationsSource, Section
from fairlane.operations.trials import Trials
from fairlane.operations.views import KeyView, Overview, QueueView, Totals, WorkerList
from fairlane.operations.workers import Workers
from fairlane.parameters import checked_methods
from fairlane.redaction import Audience, Redact, Redactor
from fairlane.store import records
from fairlane.store.stats import Looking, Moment


@checked_methods
class Operations(Section):
    """What operators see and do: `app.operations`.

    Every change is one transaction, in force at the next claim, and recorded with `actor` (by default FAIRLANE_ACTOR,
    else user@host) and `reason`. With `dry_run` the result says what would change, and nothing changes.
    """

    def __init__(self, source: OperationsSource, audience: Audience = PROGRAM, rules: tuple[Redact, ...] = ()) -> None:
        super().__init__(source, audience, rules)
        self.audit = Audit(source, audience, rules)
        self.jobs = Jobs(source, audience, rules)
        self.keys = Keys(source, audience, rules)
        self.limits = Limits(source, audience, rules)
        self.overrides = Overrides(source, audience, rules)
        self.partitions = Partitions(source, audience, rules)
        self.policies = Policies(source, audience, rules)
        self.queues = Queues(source, audience, rules)
        self.schedules = Schedules(source, audience, rules)
        self.trials = Trials(source, audience, rules)
        self.weights = Weights(source, audience, rules)
        self.workers = Workers(source, audience, rules)

    def seen_by(self, audience: Audience, *rules: Redact | None) -> Self:
        """The same operations for another audience: the app's `redact` and these rules decide what it may see."""
        return type(self)(self._source, audience, tuple(rule for rule in rules if rule is not None))

    @property
    def redactor(self) -> Redactor | None:
        """What decides how much of a job may be seen; `None`: all of it."""
        return self._redactor

    async def now(self) -> Instant:
        """The time by the database's clock, as are all times here."""
        return await (await self._store()).now()

    async def overview(self) -> Overview:
        """Is work flowing, who waits and why, and what can be done about it."""
        return (await self.overview_beside({}))[0]

    async def overview_beside(
        self, keys: Mapping[str, Sequence[KeyValues]]
    ) -> tuple[Overview, list[tuple[str, KeyView]]]:
        """The same, with some keys of queues, as of the same moment."""

        def ask(moment: Moment) -> Looking[tuple[Look, list[KeyView], list[tuple[str, KeyView]]]]:
            look, held = yield from look_with_keys(moment, self._source.forwarded)
            beside = []
            for queue, wanted in keys.items():
                if queue in look.policies:
                    beside += [(queue, view) for view in (yield from keys_at(moment, queue, wanted))]
            return look, held, beside

        store = await self._store()
        look, held, beside = await store.ask(ask)
        views, workers = await views_of(store, look), look.workers
        overview = Overview(
            now=as_datetime(look.now),
            totals=_totals(views, workers),
            queues=views,
            hints=hints_of(views, held, await findings_at_a_glance(store, workers.workers)),
            chart=look.chart,
        )
        return overview, beside

    async def diagnose(self) -> list[Finding]:
        """What is wrong with this database, its queues and its workers, as far as it can be seen from outside."""
        app, store = self._source, await self._store()
        look = await store.ask(lambda moment: look_at(moment, app.forwarded))
        views = await views_of(store, look, by_partition=True)
        tasks, stats = app.known_tasks() or None, look.stats.values()
        return await diagnose(store, app.declared_policies, tasks, stats, views, look.workers.workers)

    async def metrics(self, keys: int = 20) -> FleetMetrics:
        """Queues, limits, keys and workers in numbers, by metric: what a scraper gets for the whole fleet. Of keys,
        the first so many."""
        return await (await self._store()).ask(lambda moment: metrics_at(moment, keys))

    async def end_session(self, session: str, expires_at: Instant) -> None:
        """End a session of the dashboard: in every process on this database, and for every copy of its cookie."""
        await (await self._store()).run(records.end_session(session, expires_at))

    async def is_session_ended(self, session: str) -> bool:
        """Whether this session was ended."""
        return await (await self._store()).run(records.is_session_ended(session))


SUMMED = (
    "ready", "held_jobs", "running", "ended", "failed", "started_per_minute", "ended_per_minute", "failed_per_minute",
)  # fmt: skip


def _totals(views: Sequence[QueueView], workers: WorkerList) -> Totals:
    return Totals(
        **{name: sum(getattr(view, name) for view in views) for name in SUMMED},
        scheduled=sum_of(view.scheduled for view in views),
        dead=sum_of(view.dead for view in views),
        oldest_wait=max((view.oldest_wait for view in views if view.oldest_wait is not None), default=None),
        workers_late=workers.late,
        # A worker may serve several queues.
        workers=workers.alive - workers.stopping,
        workers_stopping=workers.stopping,
        slots=workers.slots,
    )
