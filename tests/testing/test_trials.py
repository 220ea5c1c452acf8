"""Policies on trial: what a figure says, and that it can say otherwise."""

from __future__ import annotations

from pathlib import Path

import pytest

from fairlane import AdaptiveConcurrency, App, Concurrency, Fair, Policy, Rate
from fairlane.errors import ConfigurationError
from fairlane.simulation import JobClass, Workload
from fairlane.testing import arrivals, try_policy


def test_shares_follow_weights_while_everybody_waits() -> None:
    policy = Policy("mail", Fair(by="account", weight={"acme": 3}))
    trial = try_policy(policy, arrivals(900, account="acme"), arrivals(900, account="beta"))
    assert trial.share("acme") == pytest.approx(0.75, abs=0.01)
    assert trial.share(account="beta") == pytest.approx(0.25, abs=0.01)
    assert trial.runs() == 1800
    assert trial.left() == 0


def test_without_a_policy_the_first_flood_has_it_all() -> None:
    flood, drop = arrivals(900, account="acme"), arrivals(9, at="1ms", account="beta")
    plain = try_policy(Policy("mail"), flood, drop)
    assert plain.share(account="acme") > 0.95
    assert plain.longest_wait(account="beta") > 8.0
    fair = try_policy(Policy("mail", Fair(by="account")), flood, drop)
    assert fair.longest_wait(account="beta") < 1.0


def test_a_limit_is_kept_and_the_most_in_flight_is_found() -> None:
    coming = [arrivals(50, account="acme", run_time="1s"), arrivals(50, account="beta", run_time="1s")]
    limited = try_policy(Policy("mail", limits=(Concurrency(3, by="account"),)), *coming, slots=20)
    assert limited.most_in_flight(account="acme") == limited.most_in_flight(account="beta") == 3
    assert limited.most_in_flight() == 6
    assert try_policy(Policy("mail"), *coming, slots=20).most_in_flight(account="acme") == 20
    assert "in flight at" in repr(limited.most_in_flight(account="acme"))


def test_the_most_starts_of_any_window_are_found() -> None:
    policy = Policy("mail", limits=(Rate(10, per="1m", by="endpoint", rolling=True),))
    trial = try_policy(policy, arrivals(45, endpoint="x", run_time="10ms"), slots=50)
    assert trial.starts_within("1m", endpoint="x") == 10
    assert trial.starts_within("1h", endpoint="x") == 45
    assert trial.finished_after(endpoint="x") >= 240


def test_a_trial_ends_when_it_is_told_to() -> None:
    trial = try_policy(Policy("mail"), arrivals(100, account="acme", run_time="1s"), slots=1, until="10s")
    assert (trial.runs(), trial.left()) == (10, 90)


def test_a_queue_of_an_app_and_a_declared_workload_can_be_tried() -> None:
    app = App("sqlite://")
    queue = app.queue("mail", fair=Fair(by="account"), limits=AdaptiveConcurrency(start=2, min=1, max=2))
    workload = Workload(classes=(JobClass(name="small", keys={"account": "s{n}"}, count=3, jobs=5),))
    trial = try_policy(queue, workload, arrivals(10, account="big"))
    assert trial.runs(account="s1") == 5
    assert trial.most_in_flight() <= 2


def test_questions_about_nothing_are_refused() -> None:
    trial = try_policy(Policy("mail"), arrivals(1, account="acme"), arrivals(1, at="1h", account="beta"))
    with pytest.raises(ConfigurationError, match="'acount'; they carry: account"):
        trial.most_in_flight(acount="acme")
    with pytest.raises(ConfigurationError, match="no job of this trial carries account='acm'"):
        trial.most_in_flight(account="acm")
    with pytest.raises(ConfigurationError, match="no job of this trial carries account='acm'"):
        trial.share(account="acm")
    with pytest.raises(ConfigurationError, match="give the keys"):
        trial.share("acme")
    with pytest.raises(AssertionError, match="never did all"):
        trial.share(account="acme")
    with pytest.raises(ConfigurationError, match="what arrives"):
        try_policy(Policy("mail"))
    with pytest.raises(ConfigurationError, match="above 0"):
        trial.starts_within(0)


def test_the_policy_test_of_the_docs_is_no_longer_than_twenty_lines() -> None:
    page = (Path(__file__).parents[2] / "docs" / "how-to" / "test-a-policy.md").read_text()
    _, _, rest = page.partition("```python\n# test_policy.py\n")
    snippet, fence, _ = rest.partition("```\n")
    assert fence
    assert len(snippet.splitlines()) <= 20
    assert "share(" in snippet
    assert "most_in_flight(" in snippet


def test_o16_jobs_on_trial_bring_their_numbers_or_are_refused() -> None:
    app = App("sqlite://")
    mail = app.queue("mail", limits=[Concurrency(lambda context: context["slots"], by="account")])
    coming = arrivals(20, account="acme", numbers={"concurrency:account": 5})
    assert try_policy(mail, coming).longest_wait() == pytest.approx(0.3)
    with pytest.raises(ConfigurationError, match="takes 'concurrency:account' from its jobs"):
        try_policy(mail, arrivals(20, account="acme"))
    with pytest.raises(ConfigurationError, match="numbers: concurrency:account"):
        try_policy(mail, arrivals(20, account="acme", numbers={"concurrency:account": -1}))
