"""A policy as people write it, and read it back."""

from __future__ import annotations

import json

import pytest

from fairlane.policy import AdaptiveConcurrency, Backlog, Breaker, Concurrency, Fair, Policy, Rate, Sequence
from fairlane.policy.policy import parse_policy, policy_text, written_policy

POLICIES = [
    Policy("q"),
    Policy("q", Fair(by="account")),
    Policy("q", Fair(by=("account", "task"), charge="count")),
    Policy("q", Fair(by="account", weight={"acme": 2.0})),
    Policy("q", Fair(by="account", weight=2.5)),
    Policy("q", limits=(Concurrency(5), Concurrency({"acme": 5}, by="account"), Concurrency(9, name="gpu"))),
    Policy(
        "q",
        limits=(Rate(100, per="1m", by="endpoint"), Rate(0.5, per="90ms", burst=3), Rate(7, per="1h", rolling=True)),
    ),
    Policy("q", limits=(AdaptiveConcurrency(by="account"), AdaptiveConcurrency(start=3, max=9, target="2s"))),
    Policy("q", limits=(Breaker(by="task"), Breaker(3, within="10s", cooldown="1m", probes=2))),
    Policy("q", limits=(Sequence(by="account"), Backlog(10, by="account"), Backlog(10, when_full="reject"))),
    Policy("q", Fair(by="account"), keys=("account", "endpoint"), priority_step=5),
    Policy("q", limits=(Concurrency(lambda job: 3, by="account"),)),
]


@pytest.mark.parametrize("policy", POLICIES, ids=repr)
def test_what_is_written_is_read_back_as_the_same(policy: Policy) -> None:
    assert parse_policy({**written_policy(policy), "queue": "q"}, "it").digest == policy.digest
    assert json.loads(policy_text(policy)) == json.loads(json.dumps(written_policy(policy)))


def test_what_goes_without_saying_is_left_out() -> None:
    limits = (Concurrency(5, by="account"), Rate(100, per="1m", by="endpoint"), Breaker(by="task"))
    assert policy_text(Policy("q", Fair(by="account"), limits)) == (
        "{\n"
        '  "fair": {"by": "account"},\n'
        '  "limits": [\n'
        '    {"kind": "concurrency", "max": 5, "by": "account"},\n'
        '    {"kind": "rate", "limit": 100, "per": "1m", "by": "endpoint"},\n'
        '    {"kind": "breaker", "by": "task"}\n'
        "  ]\n"
        "}\n"
    )
    assert policy_text(Policy("q")) == "{}\n"
