"""What operators see and do, behind every surface: commands, `app.operations`, the JSON API and the dashboard."""

from fairlane.operations.diagnosis import Finding, Level, about_no_database
from fairlane.operations.documents import describe_exported, document_of, exported_columns
from fairlane.operations.jobs import LIMIT, JobDetails, Report, Selection
from fairlane.operations.keys import Ranking
from fairlane.operations.metrics import FleetMetrics
from fairlane.operations.operations import Operations
from fairlane.operations.overrides import Change, LimitInForce, OverrideInForce
from fairlane.operations.partitions import PartitionPlan, Repartitioned
from fairlane.operations.policies import AuditPage, PolicyChange, PolicyInForce
from fairlane.operations.schedules import ScheduleView
from fairlane.operations.trials import Tried
from fairlane.operations.views import (
    Hint,
    KeyList,
    KeyView,
    OneKey,
    OneQueue,
    Overview,
    QueueView,
    WorkerList,
    WorkerView,
)
from fairlane.redaction import Disclosure
from fairlane.scheduler.explain import Explanation
from fairlane.store.operators import JobFilter

__all__ = [
    "LIMIT",
    "AuditPage",
    "Change",
    "Disclosure",
    "Explanation",
    "Finding",
    "FleetMetrics",
    "Hint",
    "JobDetails",
    "JobFilter",
    "KeyList",
    "KeyView",
    "Level",
    "LimitInForce",
    "OneKey",
    "OneQueue",
    "Operations",
    "OverrideInForce",
    "Overview",
    "PartitionPlan",
    "PolicyChange",
    "PolicyInForce",
    "QueueView",
    "Ranking",
    "Repartitioned",
    "Report",
    "ScheduleView",
    "Selection",
    "Tried",
    "WorkerList",
    "WorkerView",
    "about_no_database",
    "describe_exported",
    "document_of",
    "exported_columns",
]
