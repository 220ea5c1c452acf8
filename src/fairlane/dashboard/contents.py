"""The pages of the dashboard, in the order of the header, and what can be done from them."""

from __future__ import annotations

from fairlane.dashboard.acting import Deed
from fairlane.dashboard.page import Page
from fairlane.dashboard.pages import jobs, keys, overview, queues, schedules, trying, workers

__all__ = ["DEEDS", "PAGES"]

PAGES: tuple[Page, ...] = (
    overview.PAGE,
    queues.QUEUES,
    queues.QUEUE,
    keys.KEYS,
    keys.KEY,
    jobs.JOBS,
    jobs.JOB,
    jobs.DEAD,
    schedules.PAGE,
    workers.PAGE,
    jobs.AUDIT,
    trying.PAGE,
)
DEEDS: tuple[Deed, ...] = (*jobs.DEEDS, *queues.DEEDS, *schedules.DEEDS)
