"""What lands when a job dies, where every store agrees: nobody is there to hear of a refusal, so it is logged.

Whoever settles may be a worker that knows nothing of what a job has declared for its death, or the reaper. The store
looks it up, and nothing that is wrong with it keeps a job from dying or another one from being settled.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from uuid import UUID

from fairlane.clock import Instant
from fairlane.job import NewJob, Outcome, new_job_ids
from fairlane.policy.unique import Conflict
from fairlane.scheduler.settlement import Settlement

log = logging.getLogger("fairlane.store")


def dying(settlement: Settlement, stored: bytes, now: Instant) -> Settlement:
    """A death with what its job has declared for it."""
    death = settlement.with_on_dead(stored, lambda count: new_job_ids(now, count))
    if death.error != settlement.error:
        log.error("job %s is dead, and what it declared for that cannot be read", settlement.job)
    return death


def refused(settlement: Settlement, error: Exception) -> Settlement:
    """The same death without its effects, which the database would not take."""
    log.error(
        "job %s is dead, and its on_dead effects were refused: %s: %s", settlement.job, type(error).__name__, error
    )
    return settlement.without_effects(error)


def not_taken(settlement: Settlement, jobs: tuple[NewJob, ...], taken: UUID) -> tuple[NewJob, ...]:
    """These follow-ups without the one whose id another job has."""
    log.warning("job %s is dead; there is a job %s already, so that follow-up is skipped", settlement.job, taken)
    return tuple(job for job in jobs if job.id != taken)


def tell_of_conflicts(settlement: Settlement, follow_ups: Sequence[NewJob], conflicts: Mapping[UUID, Conflict]) -> None:
    """Say which follow-ups were not stored because their unique keys are held: as after a job that is done."""
    for follow_up in follow_ups:
        conflict = conflicts.get(follow_up.id)
        if conflict is not None and not conflict.outcome.is_stored:
            log.log(
                logging.WARNING if conflict.outcome is Outcome.REFUSED else logging.INFO,
                "job %s is dead; its follow-up (%s) was not stored (%s): job %s holds its unique key",
                settlement.job,
                follow_up.task,
                conflict.outcome,
                conflict.holder,
            )
