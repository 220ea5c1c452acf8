"""Workloads to begin with, written with the keys that a policy looks at."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Example", "workload_examples"]


@dataclass(frozen=True, slots=True)
class Example:
    """A text for a field, and what it is about."""

    title: str
    text: str


def workload_examples(keys: Sequence[str]) -> list[Example]:
    """What tends to happen to queues, for jobs that carry these keys."""
    names = list(keys) or ["account"]
    hot, small, many = _keys(names, "acme", "1"), _keys(names, "small-{n}", "{n}"), _keys(names, "tenant-{n}", "{n}")
    return [
        Example(
            "one tenant floods the queue",
            "\n".join(
                [
                    "# One enqueues 3,000 jobs at once; forty others send bursts of five.",
                    *_class("hot", hot, "jobs = 3000", 'run_time = "50ms"'),
                    "",
                    *_class(
                        "small",
                        small,
                        "count = 40      # small-0 to small-39",
                        "jobs = 40       # each",
                        "burst = 5",
                        'every = "2s"',
                        'run_time = { exponential = "50ms" }',
                    ),
                ]
            ),
        ),
        Example(
            "long jobs beside short ones",
            "\n".join(
                [
                    "# As many jobs each, but those of one take thirty times as long.",
                    *_class("long", hot, "jobs = 300", 'run_time = "3s"'),
                    "",
                    *_class("short", small, "count = 10", "jobs = 300", 'run_time = "100ms"'),
                ]
            ),
        ),
        Example(
            "steady traffic, some of it failing",
            "\n".join(
                [
                    "# Arrivals at random times; one run in ten fails and is tried again.",
                    *_class(
                        "steady",
                        many,
                        "count = 100",
                        "jobs = 60",
                        "poisson = 0.5   # arrivals a second, of each",
                        'run_time = { lognormal = "400ms" }',
                        "failures = 0.1",
                        "max_attempts = 5",
                        'backoff = "2s"',
                    ),
                ]
            ),
        ),
    ]


def _keys(names: Sequence[str], first: str, others: str) -> str:
    pairs = [
        f"{_bare(name)} = {json.dumps(first if not nth else f'{name}-{others}')}" for nth, name in enumerate(names)
    ]
    return "keys = { " + ", ".join(pairs) + " }"


def _bare(name: str) -> str:
    is_bare = name.isascii() and name.replace("_", "").replace("-", "").isalnum()
    return name if is_bare else json.dumps(name)


def _class(name: str, keys: str, *lines: str) -> list[str]:
    return ["[[classes]]", f'name = "{name}"', keys, *lines]
