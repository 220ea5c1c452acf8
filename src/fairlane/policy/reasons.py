"""Why a job is where it is: one list of codes for the API, metrics, commands and the dashboard."""

from __future__ import annotations

from enum import StrEnum

import msgspec

__all__ = ["Reason", "Why"]


class Reason(StrEnum):
    """What holds a job. The codes are stable: scripts and dashboards name them."""

    SCHEDULED = "scheduled"
    """Its time has not come: a delay, a retry's backoff, a snooze."""
    PAUSED = "paused"
    """An operator has paused its queue, its key or its task."""
    MOVING = "moving"
    """Its key moves to another partition of its queue."""
    CONCURRENCY = "concurrency"
    """As many run as its limit allows."""
    RATE = "rate"
    """Its rate is used up for now."""
    ADAPTIVE = "adaptive"
    """As many run as the cap allows that is learned from how runs go."""
    BREAKER = "breaker"
    """Too many runs have failed; it is tried again later."""
    SEQUENCE = "sequence"
    """The job before it in its sequence has not ended."""
    LANE = "lane"
    """Others are ahead of it in its own lane."""
    TURN = "turn"
    """Others have their turn first."""
    GIVEN_BACK = "given_back"
    """It was claimed and given back before it ran: its worker stopped, or a broker refused it."""
    NEW = "new"
    """No claim has seen it yet."""
    SLOT = "slot"
    """Nothing holds it: it starts with the next free slot."""
    NO_WORKER = "no_worker"
    """No worker serves its queue."""
    BROKER = "broker"
    """The broker of the engine that its queue is forwarded to refuses messages."""
    PUBLISHED = "published"
    """It is at the broker of its engine, and no worker of the engine has begun it."""
    UNKNOWN_TASK = "unknown_task"
    """No task of the app has its name."""
    FORCED = "forced"
    """Nothing holds it: an operator wants it to start next, whatever its limits say."""
    RUNNING = "running"
    """It runs."""
    ENDED = "ended"
    """It has ended."""


class Why(msgspec.Struct, frozen=True):
    """What a gate without room says of itself."""

    reason: Reason
    used: float
    bound: float
    """`used` of `bound`: 5 of 5 in flight, 100 of 100 starts."""
    words: str = ""
    """What there is to say besides, such as "failing since …"."""
