"""The vocabulary of policies: pure values and their arithmetic, without I/O and without a clock."""

from fairlane.policy.adaptive import AdaptiveConcurrency
from fairlane.policy.backlog import Backlog, FullBacklog
from fairlane.policy.breaker import Breaker
from fairlane.policy.fair import Fair
from fairlane.policy.gates import Reason
from fairlane.policy.keys import Keys, canonical_key, canonical_keys, flow_id, gate_id, lane_id
from fairlane.policy.limits import Concurrency, Limit, Rate
from fairlane.policy.partitions import partition_for, partition_number
from fairlane.policy.policy import BoundLimit, Level, Policy
from fairlane.policy.sequence import Sequence
from fairlane.policy.unique import Unique

__all__ = [
    "AdaptiveConcurrency",
    "Backlog",
    "BoundLimit",
    "Breaker",
    "Concurrency",
    "Fair",
    "FullBacklog",
    "Keys",
    "Level",
    "Limit",
    "Policy",
    "Rate",
    "Reason",
    "Sequence",
    "Unique",
    "canonical_key",
    "canonical_keys",
    "flow_id",
    "gate_id",
    "lane_id",
    "partition_for",
    "partition_number",
]
