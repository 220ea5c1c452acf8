"""What is refused where a program declares it: functions that no worker could call, limits that could never bind, and
names that would be overwritten."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

import pytest

from fairlane import AdaptiveConcurrency, App, Backlog, Concurrency, Limit, Rate
from fairlane.errors import ConfigurationError, InvalidJob, InvalidKey, InvalidPolicy
from fairlane.policy import partition_for, partition_number

# Functions (H2).


class Shop:
    def deliver(self, event: int) -> int:
        return event

    @staticmethod
    def charge(event: int) -> int:
        return event

    @classmethod
    def close(cls, event: int) -> int:
        return event


def deliver(event: int) -> int:
    return event


@pytest.mark.parametrize(
    ("function", "told"),
    [
        (Shop.deliver, r"Shop\.deliver is a method, and a worker has no object .* at a module's top"),
        (Shop().deliver, "is bound to an object, which no worker has; write a function"),
        (Shop.close, "is bound to an object"),
        (vars(Shop)["charge"], "is a staticmethod; define the function at a module's top"),
        (vars(Shop)["close"], "is a classmethod; define the function at a module's top"),
        (Shop, "is a class; a task is a function"),
        (functools.partial(deliver, 1), "is not a plain function; write one that calls it"),
        (lambda event: event, "<lambda> has no name of its own; write a def, or give name="),
        (5, "task: 5 is not a function"),
    ],
)
def test_what_no_worker_could_call_is_refused_where_it_is_declared(function: Any, told: str) -> None:
    with pytest.raises(ConfigurationError, match=told):
        App("sqlite://").task()(function)


def test_a_method_is_refused_in_the_body_of_its_class() -> None:
    app = App("sqlite://")
    with pytest.raises(ConfigurationError, match=r"Mailer\.send is a method"):

        class Mailer:
            @app.task
            async def send(self, to: str) -> None: ...

    assert len(app.registry) == 0


def test_a_function_that_only_lives_in_a_class_is_a_task() -> None:
    app = App("sqlite://")

    class Mail:
        @staticmethod
        @app.task
        def send(to: str) -> str:
            return to

    assert Mail.send("ada") == "ada"
    assert app.task(name="named")(lambda event: event)(5) == 5


# Keywords (H3).


@pytest.mark.parametrize("way", ["enqueue", "call", "dry_run"])
async def test_a_misspelt_keyword_is_named_with_the_one_that_is_meant(app: App, way: str) -> None:
    @app.task(name="deliver")
    async def deliver(event: int, endpoint: str) -> None: ...

    told = "task 'deliver': got an unexpected keyword argument 'endpont'; did you mean 'endpoint'?"
    ways: dict[str, Callable[..., Any]] = {
        "enqueue": deliver.enqueue,
        "call": deliver.call,
        "dry_run": deliver.dry_run,
    }
    with pytest.raises(InvalidJob) as refused:
        await ways[way](42, endpont="x")
    assert str(refused.value) == told
    with pytest.raises(InvalidJob, match=r"'color'; its parameters are \(event: 'int', endpoint: 'str'\)"):
        await ways[way](42, endpoint="x", color="red")


async def test_a_misspelt_option_is_named_with_the_one_that_is_meant(app: App) -> None:
    @app.task(name="deliver")
    async def deliver(event: int) -> None: ...

    options: Any = {"priorty": 5}
    for using in (deliver.using, deliver.call(1).using):
        with pytest.raises(ConfigurationError, match="using: there is no option priorty=; did you mean priority="):
            using(**options)
    with pytest.raises(ConfigurationError, match="there is no option color=; there are tx, priority, delay"):
        deliver.using(color="red")  # type: ignore[call-arg]


async def test_an_empty_name_is_a_name_that_was_given(app: App) -> None:
    @app.task(name="deliver")
    async def deliver() -> None: ...

    for using in (deliver.using, deliver.call().using):
        with pytest.raises(InvalidJob, match="task 'deliver': queue='' is not the name of a queue; give that of one"):
            using(queue="")
    with pytest.raises(ConfigurationError, match="App: url='' names no database"):
        App("")


# Limits that could never bind (P7).


@pytest.mark.parametrize(
    ("binding", "idle"),
    [
        (Concurrency(2), Concurrency(6)),
        (Concurrency(2, by="a"), Concurrency(6, by="a")),
        (Concurrency(2, by=("a", "b")), Concurrency(6, by=("b", "a"))),
        (AdaptiveConcurrency(max=4, by="a"), Concurrency(9, by="a")),
        (AdaptiveConcurrency(max=4), Concurrency(4)),
        (Concurrency(2), AdaptiveConcurrency(min=3)),
        (Rate(5, per="1m"), Rate(9, per="60s")),
        (Rate(5, per="1m", burst=1), Rate(5, per="1m", burst=3)),
        (Rate(5, per="1m", rolling=True), Rate(9, per="1m", rolling=True)),
        (Backlog(10), Backlog(20)),
    ],
)
def test_a_limit_that_could_never_bind_is_refused_with_the_one_that_does(binding: Limit, idle: Limit) -> None:
    told = f"{idle!r} would never hold anything back beside {binding!r}, which has the same scope; leave it out"
    for limits in ((binding, idle), (idle, binding)):
        with pytest.raises(InvalidPolicy, match=re.escape(told)):
            App("sqlite://").queue("q", limits=limits)


@pytest.mark.parametrize(
    "limits",
    [
        (Concurrency(2), Concurrency(2)),
        (Concurrency(2, by=("a", "b")), Concurrency(2, by=("b", "a"))),
        (Rate(5, per="1m", burst=2), Rate(5, per="60s", burst=2)),
        (AdaptiveConcurrency(min=4, max=4), Concurrency(4)),
    ],
)
def test_a_limit_that_is_declared_twice_is_refused_as_such(limits: tuple[Limit, ...]) -> None:
    with pytest.raises(InvalidPolicy, match="are the same limit; leave one of them out") as refused:
        App("sqlite://").queue("q", limits=limits)
    assert all(repr(limit) in str(refused.value) for limit in limits)


@pytest.mark.parametrize(
    "limits",
    [
        (Rate(10, per="1m", by="a"), Rate(600, per="1h", by="a")),  # A05
        (Rate(10, per="1m", burst=1), Rate(5, per="1m", burst=20)),
        (Rate(10, per="1m"), Rate(5, per="1m", rolling=True)),
        (Concurrency(2, by="a"), Concurrency(6)),
        (AdaptiveConcurrency(max=10, by="a"), Concurrency(9, by="a")),
        (AdaptiveConcurrency(max=4, by="a"), AdaptiveConcurrency(max=9, by="a", target="1s")),
        (Concurrency(6), Concurrency(2, name="gpu")),
        (Concurrency(6, by="a"), Concurrency({"acme": 2}, by="a")),
        (Concurrency(6, by="a"), Concurrency(lambda job: 2, by="a")),
        (Backlog(10), Backlog(20, when_full="reject")),
    ],
)
def test_limits_of_one_kind_that_can_both_bind_are_declared(limits: tuple[Limit, ...]) -> None:
    assert App("sqlite://").queue("q", limits=limits).policy.limits == limits


# Names in a context (P7).


@pytest.mark.parametrize("name", ["queue", "task", "priority"])
async def test_a_name_that_every_job_has_in_its_context_is_refused(app: App, name: str) -> None:
    @app.task
    async def work() -> None: ...

    with pytest.raises(InvalidJob, match=f"context: '{name}' is what a policy's functions find .* another name"):
        work.using(context={name: "mine"})


async def test_a_context_does_not_contradict_the_keys_of_its_job(app: App) -> None:
    app.queue("q", limits=[Concurrency(lambda job: 2, by="account")])

    @app.task(queue="q")
    async def work(account: str) -> None: ...

    await work.using(context={"account": "acme", "plan": "pro"}).enqueue("acme")
    with pytest.raises(InvalidJob, match=r"context: 'account' is also a key of the job, 'acme'.*another name"):
        await work.using(context={"account": "globex"}).enqueue("acme")


@pytest.mark.parametrize("name", ["schedule", "slot"])
async def test_a_schedule_does_not_overwrite_what_its_call_carries(app: App, name: str) -> None:
    @app.task
    async def work() -> None: ...

    with pytest.raises(ConfigurationError, match=f"schedule: context: '{name}' is what .* another name"):
        app.schedule("0 9 * * *", work.using(context={name: "mine"}))


# Functions of a task's arguments (P4).


async def test_a_failing_function_of_keys_or_of_a_unique_key_is_our_error(app: App) -> None:
    app.queue("q", keys=["account"])

    def by_account(order: dict[str, str]) -> Any:
        return {"account": order["account"]}

    @app.task(queue="q", name="keyed", keys=by_account)
    async def keyed(order: dict[str, str]) -> None: ...

    @app.task(name="unique", unique=lambda order: order["account"])
    async def unique(order: dict[str, str]) -> None: ...

    with pytest.raises(InvalidKey, match="task 'keyed': its keys= function failed: KeyError: 'account'; let it"):
        await keyed.enqueue({})
    with pytest.raises(InvalidKey, match="task 'unique': its unique= function failed: KeyError: 'account'; let it"):
        await unique.enqueue({})


# Partitions (P4, P6).


def test_the_number_that_routes_a_key_is_public() -> None:
    assert partition_number("acme") == partition_number(("acme",)) < 1 << 64
    assert partition_number(42) == partition_number("42")
    assert partition_number(None) != partition_number("None")
    wrong: list[object] = [(), 1.5, (1.5,), []]
    for refused in wrong:
        with pytest.raises(InvalidKey):
            partition_number(refused)
    with pytest.raises(InvalidKey, match=r"key=\(\) .* no value; give"):
        partition_for((), 4)


async def test_what_is_not_a_limit_is_told_each_kind_once(app: App) -> None:
    with pytest.raises(InvalidPolicy, match="limits: 5 is not a limit; use one of") as refused:
        app.queue("q", limits=5)  # type: ignore[arg-type]
    assert str(refused.value).count("Rate(…)") == 1
