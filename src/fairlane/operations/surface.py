"""`app.operations`: what operators see and do, for programs."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from copy import copy
from datetime import datetime, timedelta
from typing import Protocol, Self
from uuid import UUID

from fairlane.clock import Clock, Instant, as_instant, duration_of
from fairlane.declaration_checks import checked_time
from fairlane.errors import ConfigurationError
from fairlane.operations import documents, jobs, metrics, policies, schedules, trials
from fairlane.operations import keys as seeing_keys
from fairlane.operations import overrides as overriding
from fairlane.operations import partitions as partitioning
from fairlane.operations import queues as ranking
from fairlane.operations import queues as seeing
from fairlane.operations import workers as seeing_workers
from fairlane.operations.diagnosis import diagnose
from fairlane.operations.explanations import explain_job, explain_queue
from fairlane.operations.findings import Finding
from fairlane.operations.jobs import LIMIT, JobDetails, Report, Selection
from fairlane.operations.overrides import Change, LimitInForce, OverrideInForce
from fairlane.operations.partitions import Repartitioned
from fairlane.operations.policies import AuditPage, PolicyChange, PolicyInForce
from fairlane.operations.queues import Ranking
from fairlane.operations.requests import Intent
from fairlane.operations.schedules import ScheduleView
from fairlane.operations.trials import PolicyGiven, Tried
from fairlane.operations.views import KeyList, KeyView, OneKey, OneQueue, Overview, QueueView, WorkerList
from fairlane.parameters import checked_methods
from fairlane.policy.overrides import Override
from fairlane.policy.policy import Policy
from fairlane.policy.unique import OnReplayConflict
from fairlane.redaction import Audience, Redact, Redactor, Surface
from fairlane.scheduler.explain import Explanation
from fairlane.simulation.workload import Workload
from fairlane.store import records
from fairlane.store.operators import JobFilter, JobPage
from fairlane.store.protocol import Store

Duration = timedelta | str | float
KeyValues = Mapping[str, object]


class OperationsSource(Protocol):
    """What operations ask of their app."""

    forwarded: set[str]
    clock: Clock

    async def opened(self) -> Store: ...

    @property
    def declared_policies(self) -> Mapping[str, Policy]: ...

    @property
    def actor(self) -> str: ...

    @property
    def redact(self) -> Redact | None: ...

    def known_tasks(self) -> list[str]: ...


@checked_methods
class Operations:
    """What operators do with queues and jobs: `app.operations`.

    Every change is one transaction, in force at the next claim, and recorded with `actor` (by default FAIRLANE_ACTOR,
    else user@host) and `reason`. With `dry_run` it is only said what would change.
    """

    def __init__(self, source: OperationsSource) -> None:
        self._source = source
        self._audience = Audience(Surface.PROGRAM)
        self._rules: tuple[Redact, ...] = ()

    def seen_by(self, audience: Audience, *rules: Redact | None) -> Self:
        """The same operations for somebody else: what they may see is asked of the app's `redact`, and these rules."""
        theirs = copy(self)
        theirs._audience = audience
        theirs._rules = tuple(rule for rule in rules if rule is not None)
        return theirs

    @property
    def redactor(self) -> Redactor | None:
        """What decides how much of a job may be seen; `None`: all of it."""
        own = () if self._source.redact is None else (self._source.redact,)
        return Redactor((*own, *self._rules), self._audience) if own or self._rules else None

    async def now(self) -> Instant:
        """The time by the database's clock, which every moment here is told by."""
        return await (await self._source.opened()).now()

    # Sessions of the dashboard.

    async def end_session(self, session: str, expires_at: Instant) -> None:
        """End a session of the dashboard: in every process on this database, and for every copy of its cookie."""
        await (await self._source.opened()).run(records.end_session(session, expires_at))

    async def is_session_ended(self, session: str) -> bool:
        """Whether somebody has ended this session."""
        return await (await self._source.opened()).run(records.is_session_ended(session))

    # Looking.

    async def overview(self) -> Overview:
        """Is work flowing, who waits and why, and what can be done about it."""
        return await seeing.overview(await self._source.opened(), self._source.forwarded)

    async def overview_beside(
        self, keys: Mapping[str, Sequence[KeyValues]]
    ) -> tuple[Overview, list[tuple[str, KeyView]]]:
        """The same, with some keys of queues, as of the same moment."""
        return await seeing.overview_beside(await self._source.opened(), keys, self._source.forwarded)

    async def list_queues(self) -> list[QueueView]:
        """Every queue at a glance."""
        return await seeing.list_queues(await self._source.opened(), self._source.forwarded)

    async def show_queue(self, queue: str) -> OneQueue:
        """One queue: its policy in words, its limits, its partitions, its last hour."""
        return await seeing.show_queue(await self._source.opened(), queue, self._source.forwarded)

    async def list_keys(
        self,
        queue: str,
        by: str | Sequence[str] | None = None,
        *,
        sort: str = "waiting",
        search: str = "",
        held_only: bool = False,
        after: str | None = None,
        limit: int = 50,
    ) -> KeyList:
        """A page of a queue's keys, by one of its scopes; by `waiting`, `running`, `ended`, `started` or `name`."""
        return await seeing_keys.list_keys(
            await self._source.opened(),
            queue,
            by,
            sort=sort,
            search=search,
            held_only=held_only,
            after=after,
            limit=limit,
        )

    async def show_key(self, queue: str, keys: KeyValues) -> OneKey:
        """One key: what waits, runs and comes next, its limits and what holds it."""
        return await seeing_keys.show_key(await self._source.opened(), queue, keys)

    async def show_keys(self, queue: str, keys: Sequence[KeyValues]) -> list[KeyView]:
        """Some keys of a queue at a glance."""
        return await seeing_keys.show_keys(await self._source.opened(), queue, keys)

    async def list_workers(self) -> WorkerList:
        """Every worker, and those that have gone silent."""
        return await seeing_workers.list_workers(await self._source.opened())

    async def rank_keys(
        self, queue: str | None = None, by: str | Sequence[str] | None = None, *, sort: str = "waiting", limit: int = 50
    ) -> Ranking:
        """The first keys of a queue, or of the busiest queues together."""
        return await ranking.rank_keys(await self._source.opened(), queue, by, sort=sort, limit=limit)

    async def explain_queue(self, queue: str, keys: KeyValues | None = None) -> Explanation:
        """Everything that holds a queue, or some keys of it."""
        return await explain_queue(await self._source.opened(), queue, keys, self._source.forwarded)

    async def try_policies(
        self,
        policies: Sequence[PolicyGiven],
        *,
        workload: Workload | None = None,
        history: str | None = None,
        last: str | float = "1h",
        slots: int = 100,
        seed: int | None = None,
        until: str | float | None = None,
        by: Sequence[str] = (),
    ) -> list[Tried]:
        """The same jobs under each policy: those of a workload, or those that ended lately in the queue `history`.

        Bounded in jobs and in time. A policy is named by its queue, or given, also as a document.
        """
        return await trials.try_policies(
            await self._source.opened(),
            policies,
            workload=workload,
            history=history,
            last=last,
            slots=slots,
            seed=seed,
            until=until,
            by=by,
        )

    async def fleet_figures(self, keys: int = 20) -> metrics.Figures:
        """Queues, limits, keys and workers in numbers, by metric: what a scraper is told of the whole fleet."""
        return await metrics.fleet_figures(await self._source.opened(), keys)

    # Queues.

    async def pause(
        self,
        queue: str,
        *,
        keys: KeyValues | None = None,
        task: str | None = None,
        expires_in: Duration | None = None,
        expires_at: datetime | None = None,
        reason: str = "",
        actor: str | None = None,
        dry_run: bool = False,
    ) -> Change:
        """Start nothing more of a queue, a key or a task. What runs goes on; keys first seen later are covered."""
        intent = self._intent(actor, reason, dry_run, expires_in, expires_at)
        return await overriding.pause(await self._source.opened(), queue, intent, keys=keys, task=task)

    async def resume(
        self,
        queue: str,
        *,
        keys: KeyValues | None = None,
        task: str | None = None,
        reason: str = "",
        actor: str | None = None,
        dry_run: bool = False,
    ) -> Change:
        """End a pause: the one of exactly this queue, key or task."""
        intent = self._intent(actor, reason, dry_run)
        return await overriding.resume(await self._source.opened(), queue, intent, keys=keys, task=task)

    async def set_limit(
        self,
        queue: str,
        limit: str,
        value: float,
        *,
        keys: KeyValues | None = None,
        expires_in: Duration | None = None,
        expires_at: datetime | None = None,
        reason: str = "",
        actor: str | None = None,
        dry_run: bool = False,
    ) -> Change:
        """Give a limit another bound for one key. A lower one preempts nothing: what runs drains first."""
        intent = self._intent(actor, reason, dry_run, expires_in, expires_at)
        return await overriding.set_limit(await self._source.opened(), queue, limit, value, intent, keys=keys)

    async def clear_limit(
        self,
        queue: str,
        limit: str,
        *,
        keys: KeyValues | None = None,
        reason: str = "",
        actor: str | None = None,
        dry_run: bool = False,
    ) -> Change:
        """Let a key have the bound again that the policy declares."""
        intent = self._intent(actor, reason, dry_run)
        return await overriding.clear_limit(await self._source.opened(), queue, limit, intent, keys=keys)

    async def list_limits(self, queue: str) -> list[LimitInForce]:
        """Every limit of a queue: what the policy declares, what is in force, and who changed it for which key."""
        return await overriding.list_limits(await self._source.opened(), queue)

    async def set_weight(
        self,
        queue: str,
        weight: float,
        *,
        keys: KeyValues,
        expires_in: Duration | None = None,
        expires_at: datetime | None = None,
        reason: str = "",
        actor: str | None = None,
        dry_run: bool = False,
    ) -> Change:
        """Give a flow another weight."""
        intent = self._intent(actor, reason, dry_run, expires_in, expires_at)
        return await overriding.set_weight(await self._source.opened(), queue, weight, intent, keys=keys)

    async def boost(
        self,
        queue: str,
        factor: float,
        *,
        keys: KeyValues,
        expires_in: Duration | None = None,
        expires_at: datetime | None = None,
        reason: str = "",
        actor: str | None = None,
        dry_run: bool = False,
    ) -> Change:
        """Multiply a flow's weight."""
        intent = self._intent(actor, reason, dry_run, expires_in, expires_at)
        return await overriding.boost(await self._source.opened(), queue, factor, intent, keys=keys)

    async def clear_weight(
        self, queue: str, *, keys: KeyValues, reason: str = "", actor: str | None = None, dry_run: bool = False
    ) -> Change:
        """Let a flow have the weight again that the policy declares, and no boost."""
        intent = self._intent(actor, reason, dry_run)
        return await overriding.clear_weight(await self._source.opened(), queue, intent, keys=keys)

    async def suspend(
        self,
        queue: str,
        *,
        expires_in: Duration | None = None,
        expires_at: datetime | None = None,
        reason: str = "",
        actor: str | None = None,
        dry_run: bool = False,
    ) -> Change:
        """Let no limit of a queue hold anything back. All go on counting; pauses and turns stay."""
        intent = self._intent(actor, reason, dry_run, expires_in, expires_at)
        return await overriding.suspend(await self._source.opened(), queue, intent)

    async def unsuspend(
        self, queue: str, *, reason: str = "", actor: str | None = None, dry_run: bool = False
    ) -> Change:
        """Let the limits of a queue hold again. What runs beyond them drains first."""
        return await overriding.unsuspend(await self._source.opened(), queue, self._intent(actor, reason, dry_run))

    async def restore_overrides(
        self,
        queue: str,
        overrides: Sequence[Override],
        *,
        ending: Sequence[str] = (),
        reason: str = "",
        actor: str | None = None,
        dry_run: bool = False,
    ) -> Change:
        """Set overrides again as they were (`Change.before`), and end those that came instead, by their ids."""
        intent = self._intent(actor, reason, dry_run)
        return await overriding.restore_overrides(await self._source.opened(), queue, overrides, intent, ending=ending)

    async def list_overrides(self, queue: str | None = None) -> list[OverrideInForce]:
        """The overrides of a queue, or of all queues, and which of them have no effect."""
        return await overriding.list_overrides(await self._source.opened(), queue)

    # Policies.

    async def show_policies(self, queues: Sequence[str] = ()) -> list[PolicyInForce]:
        """The policy in force for these queues or for all, and where this app declares another one."""
        return await policies.show_policies(await self._source.opened(), self._source.declared_policies, queues)

    async def diff_policies(self, queues: Sequence[str] = ()) -> list[PolicyInForce]:
        """What applying the policies that this app declares would change."""
        return await policies.diff_policies(await self._source.opened(), self._source.declared_policies, queues)

    async def apply_policies(
        self,
        queues: Sequence[str] = (),
        *,
        accept_missing_keys: bool = False,
        reason: str = "",
        actor: str | None = None,
        dry_run: bool = False,
    ) -> list[PolicyChange]:
        """Put what this app declares in force, a transaction for each queue. Overrides stay as they are."""
        intent = self._intent(actor, reason, dry_run)
        return await policies.apply_policies(
            await self._source.opened(),
            self._source.declared_policies,
            intent,
            queues,
            accept_missing_keys=accept_missing_keys,
        )

    async def change_partitions(
        self,
        queue: str,
        to: int,
        *,
        by: Sequence[str] | None = None,
        accept_missing_keys: bool = False,
        abandon: bool = False,
        reason: str = "",
        actor: str | None = None,
        dry_run: bool = False,
    ) -> Repartitioned:
        """Change the number of a queue's partitions while it works; by these keys, if it has had only one, else by
        those that this app declares. With `abandon`, a change to another number that is under way is given up first.

        Not one transaction but many. Broken off, it leaves keys standing still that move; called again, it goes on,
        and so does any worker of the queue.
        """
        intent, clock = self._intent(actor, reason, dry_run), self._source.clock
        return await partitioning.change_partitions(
            await self._source.opened(),
            queue,
            to,
            intent,
            by=partitioning.declared_by(self._source.declared_policies.get(queue), to) if by is None else tuple(by),
            accept_missing_keys=accept_missing_keys,
            abandon=abandon,
            rest=lambda: clock.sleep_until(clock.now() + partitioning.A_MOMENT),
        )

    async def list_audit(self, queue: str | None = None, *, before: int | None = None, limit: int = 100) -> AuditPage:
        """What operators did, the newest first."""
        return await policies.list_audit(await self._source.opened(), queue, before=before, limit=limit)

    async def diagnose(self) -> list[Finding]:
        """What is wrong with this database, its queues and its workers, as far as it can be seen from outside."""
        app = self._source
        return await diagnose(await app.opened(), app.declared_policies, app.known_tasks() or None, app.forwarded)

    # Jobs.

    async def export_jobs(
        self, filter: JobFilter, *, after: str | None = None, limit: int | None = None
    ) -> AsyncIterator[JobPage]:
        """Every job that fits, or the first `limit`, the newest first, page by page."""
        async for page in documents.export_jobs(await self._source.opened(), filter, after=after, limit=limit):
            yield page

    async def list_jobs(
        self, filter: JobFilter, limit: int = 100, after: str | None = None, *, looks: int | None = None
    ) -> JobPage:
        """Jobs that fit, the newest first; in so many `looks` of ten thousand jobs, or as many as it takes."""
        return await jobs.list_jobs(
            await self._source.opened(), filter, limit, after, looks=looks, redactor=self.redactor
        )

    async def show_job(self, job: UUID) -> JobDetails:
        """Everything about one job, or `JobNotFound`."""
        return await jobs.show_job(await self._source.opened(), job, self.redactor)

    async def explain_job(self, job: UUID) -> Explanation:
        """Everything that holds a job, or `JobNotFound`."""
        return await explain_job(await self._source.opened(), job, None, self._source.forwarded)

    async def cancel_jobs(
        self,
        selection: Selection,
        *,
        limit: int = LIMIT,
        reason: str = "",
        actor: str | None = None,
        dry_run: bool = False,
    ) -> Report:
        """Cancel jobs that wait, ask those that run to stop."""
        who = self._intent(actor, reason, dry_run).actor
        store = await self._source.opened()
        return await jobs.cancel_jobs(store, selection, actor=who, reason=reason, limit=limit, dry_run=dry_run)

    async def retry_jobs(
        self,
        selection: Selection,
        *,
        limit: int = LIMIT,
        reason: str = "",
        actor: str | None = None,
        dry_run: bool = False,
    ) -> Report:
        """Let scheduled jobs be due now, whether they wait for a backoff or for their time."""
        who = self._intent(actor, reason, dry_run).actor
        store = await self._source.opened()
        return await jobs.retry_jobs(store, selection, actor=who, reason=reason, limit=limit, dry_run=dry_run)

    async def replay_jobs(
        self,
        selection: Selection,
        *,
        delay: Duration | None = None,
        on_conflict: OnReplayConflict = "reject",
        limit: int = LIMIT,
        reason: str = "",
        actor: str | None = None,
        dry_run: bool = False,
    ) -> Report:
        """Put dead jobs back, cancelled ones too if they are named or asked for.

        A job whose unique key another job holds is skipped (`report.held` counts them); with `on_conflict="replace"`
        only if that one runs, and one that waits is cancelled.
        """
        who = self._intent(actor, reason, dry_run).actor
        wait = None if delay is None else checked_time("delay", delay)
        return await jobs.replay_jobs(
            await self._source.opened(),
            selection,
            actor=who,
            reason=reason,
            delay=wait,
            on_conflict=on_conflict,
            limit=limit,
            dry_run=dry_run,
        )

    async def purge_jobs(
        self,
        selection: Selection,
        *,
        limit: int = LIMIT,
        reason: str = "",
        actor: str | None = None,
        dry_run: bool = False,
    ) -> Report:
        """Remove dead jobs for good, done and cancelled ones too if they are named or asked for."""
        who = self._intent(actor, reason, dry_run).actor
        store = await self._source.opened()
        return await jobs.purge_jobs(store, selection, actor=who, reason=reason, limit=limit, dry_run=dry_run)

    async def force_jobs(
        self, ids: Sequence[UUID], *, reason: str = "", actor: str | None = None, dry_run: bool = False
    ) -> Report:
        """Let waiting jobs start next, whatever their limits say; every limit counts them."""
        who = self._intent(actor, reason, dry_run).actor
        return await jobs.force_jobs(await self._source.opened(), ids, actor=who, reason=reason, dry_run=dry_run)

    # Schedules.

    async def list_schedules(self) -> list[ScheduleView]:
        """Every schedule, by name: when it is due, what it enqueues, and what it enqueued last."""
        return await schedules.list_schedules(await self._source.opened(), self.redactor)

    async def pause_schedule(
        self, name: str, *, reason: str = "", actor: str | None = None, dry_run: bool = False
    ) -> ScheduleView:
        """Fire a schedule no more, until it is resumed. Slots that come meanwhile are not made up for."""
        intent = self._intent(actor, reason, dry_run)
        return await schedules.pause_schedule(await self._source.opened(), name, intent, self.redactor)

    async def resume_schedule(
        self, name: str, *, reason: str = "", actor: str | None = None, dry_run: bool = False
    ) -> ScheduleView:
        """Let a schedule fire again, from its next slot on."""
        intent = self._intent(actor, reason, dry_run)
        return await schedules.resume_schedule(await self._source.opened(), name, intent, self.redactor)

    async def trigger_schedule(
        self, name: str, *, reason: str = "", actor: str | None = None, dry_run: bool = False
    ) -> ScheduleView:
        """Let a worker fire a schedule once, at once and beside its slots; also while it is paused."""
        intent = self._intent(actor, reason, dry_run)
        return await schedules.trigger_schedule(await self._source.opened(), name, intent, self.redactor)

    def _intent(
        self,
        actor: str | None,
        reason: str,
        dry_run: bool,
        expires_in: Duration | None = None,
        expires_at: datetime | None = None,
    ) -> Intent:
        return Intent(
            actor=self._source.actor if actor is None else actor,
            reason=reason,
            expires_in=None if expires_in is None else duration_of("expires_in", expires_in),
            expires_at=None if expires_at is None else _instant("expires_at", expires_at),
            dry_run=dry_run,
        )


def _instant(name: str, moment: datetime) -> Instant:
    try:
        return as_instant(moment)
    except ConfigurationError as error:
        raise ConfigurationError(f"{name}: {error}") from None
