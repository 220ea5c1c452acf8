"""From a call to a stored job and back: arguments, results, keys, lanes."""

from __future__ import annotations

import enum
import uuid
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from fairlane import App, Concurrency, Fair, Rate, Sequence
from fairlane.clock import ManualClock
from fairlane.errors import ConfigurationError, InvalidJob, InvalidKey, InvalidPolicy, PayloadTooLarge
from fairlane.policy import lane_id
from tests.worker.harness import watched_app, working

if TYPE_CHECKING:
    from fractions import Fraction


# Arguments and results.


class Color(enum.Enum):
    RED = "red"


class Point(msgspec.Struct):
    x: int
    y: int


@dataclass
class Order:
    id: uuid.UUID
    placed: datetime
    total: Decimal
    lines: list[Point]


EVERYTHING: list[tuple[Any, Any]] = [
    (int, 3),
    (int, 3.0),
    (int, 2**63),
    (float, 1.5),
    (str, "ä\x00\U0001f600"),
    (bytes, b"\x00\xff"),
    (datetime, datetime(2030, 1, 1, 12, 30, tzinfo=UTC)),
    (date, date(2030, 1, 1)),
    (timedelta, timedelta(minutes=5)),
    (Decimal, Decimal("1.10")),
    (uuid.UUID, uuid.UUID(int=5)),
    (Color, Color.RED),
    (set[int], {1, 2}),
    (tuple[int, str], (1, "a")),
    (dict[int, str], {1: "a"}),
    (Path, Path("/tmp/x")),
    (Point | None, Point(1, 2)),
    (Point | None, None),
    (Order, Order(uuid.UUID(int=1), datetime(2030, 1, 1, tzinfo=UTC), Decimal("9.99"), [Point(1, 2)])),
    (Any, {"a": [1, None, True]}),
]


@pytest.mark.parametrize(("kind", "value"), EVERYTHING)
async def test_arguments_and_results_come_back_as_what_they_were(app: App, kind: Any, value: Any) -> None:
    got: list[Any] = []

    async def echo(value: Any, *more: Any, **named: Any) -> Any:
        got.extend([value, *more, *named.values()])
        return value

    echo.__annotations__.update({"value": kind, "more": kind, "named": kind, "return": kind})
    task = app.task(name="echo")(echo)
    async with working(app):
        result = await (await task.enqueue(value, value, other=value)).result()
    assert [*got, result] == [value] * 4
    assert {type(each) for each in got} == {int if kind is int else type(value)}


async def test_an_argument_that_cannot_be_stored_is_named(app: App) -> None:
    @app.task(name="work")
    async def work(first: object, second: object = None) -> None: ...

    with pytest.raises(InvalidJob, match=r"task 'work': argument 'second' \(object\) cannot be stored as JSON"):
        await work.enqueue(1, second=object())
    with pytest.raises(InvalidJob, match=r"argument 'first' \(list\) cannot be stored as JSON: NaN and infinity"):
        await work.enqueue([float("nan")])
    with pytest.raises(InvalidJob, match=r"argument 'first' \(str\)"):
        await work.enqueue("\ud800")


async def test_a_payload_beyond_the_limit_is_refused_with_its_size(clock: ManualClock) -> None:
    async with App("sqlite://", clock=clock, max_payload=100) as app:

        @app.task(name="work")
        async def work(text: str) -> None: ...

        await work.enqueue("x" * 91)
        with pytest.raises(PayloadTooLarge, match="its arguments take 101 bytes, more than the 100 allowed"):
            await work.enqueue("x" * 92)


async def test_an_annotation_that_cannot_be_resolved_is_refused_when_the_app_opens(app: App) -> None:
    @app.task(name="work")
    async def work(share: Fraction) -> None: ...

    with pytest.raises(ConfigurationError, match="task 'work': an annotation cannot be resolved: name 'Fraction'"):
        await work.enqueue(1)  # type: ignore[arg-type]


async def test_an_annotation_that_json_could_never_satisfy_is_refused_when_the_app_opens(app: App) -> None:
    @app.task(name="work")
    async def work(value: int | Unreadable) -> None: ...

    with pytest.raises(ConfigurationError, match="task 'work': parameter 'value' cannot be read from JSON"):
        await app.opened()


class Unreadable: ...


# Keys.


async def test_keys_are_taken_from_the_arguments_that_the_policy_looks_at(app: App) -> None:
    limits: list[Concurrency | Rate] = [Rate(100, per="1m", by="endpoint"), Concurrency(9, by="task")]
    app.queue("webhooks", fair=Fair(by="account"), limits=limits)

    @app.task(queue="webhooks", name="deliver")
    async def deliver(event: int, account: str | int, endpoint: str | None = None) -> None: ...

    first = await deliver.enqueue(1, "acme", endpoint="api.acme.com")
    assert (await first.record()).keys == {"account": "acme", "endpoint": "api.acme.com"}
    # A18: 42 and "42" are the same key, and None is one that all share.
    second = await deliver.enqueue(1, account=42)
    assert (await second.record()).keys == {"account": "42", "endpoint": None}


async def test_the_lane_of_a_job_is_the_one_that_its_policy_sees(clock: ManualClock) -> None:
    # A18, A21.
    app, store = watched_app(clock)
    app.queue("webhooks", fair=Fair(by="account"))

    @app.task(queue="webhooks", priority=3)
    async def deliver(account: str) -> None: ...

    await deliver.using(keys={"label": "blue"}).enqueue("acme")
    [[new], *_] = store.arguments["enqueue"][0]
    # The task as well: it can be paused or limited at any time, whatever the policy said when its jobs came.
    assert new.lane_keys == {"account": "acme", "task": deliver.name}
    assert new.lane == lane_id("webhooks", 3, new.lane_keys)
    assert new.keys == {"account": "acme", "label": "blue"}
    await app.close()


async def test_in_a_sequence_the_lane_is_the_key_alone_and_a_priority_is_refused(clock: ManualClock) -> None:
    app, store = watched_app(clock)
    app.queue("documents", limits=[Sequence(by="document")])

    @app.task(queue="documents")
    async def change(document: str) -> None: ...

    await change.enqueue("a")
    [[new], *_] = store.arguments["enqueue"][0]
    assert new.lane_keys == {"document": "a"}
    assert new.lane == lane_id("documents", 0, {"document": "a"})
    with pytest.raises(InvalidJob, match=r"priority=3 has no effect in queue 'documents'.*leave it out"):
        await change.using(priority=3).enqueue("a")
    await app.close()


async def test_keys_may_name_arguments_or_be_a_function_of_them(app: App) -> None:
    app.queue("mail", fair=Fair(by="domain"))

    def domain_of(address: str) -> dict[str, object]:
        return {"domain": address.partition("@")[2]}

    @app.task(queue="mail", keys=domain_of)
    async def send(address: str) -> None: ...

    @app.task(queue="mail", keys=["domain", "shop"])
    async def bulk(domain: str, shop: int = 7, text: str = "") -> None: ...

    assert (await (await send.enqueue("a@b.org")).record()).keys == {"domain": "b.org"}
    assert (await (await bulk.enqueue("c.org")).record()).keys == {"domain": "c.org", "shop": "7"}
    given = await bulk.using(keys={"domain": "given.org"}).enqueue("c.org")
    assert (await given.record()).keys == {"domain": "given.org", "shop": "7"}


async def test_a_key_that_the_policy_needs_and_the_job_does_not_carry_is_an_error_with_a_remedy(app: App) -> None:
    app.queue("mail", fair=Fair(by="account"))

    @app.task(queue="mail")
    async def send(account: str) -> None: ...

    @app.task(queue="mail", name="sweep")
    async def sweep() -> None: ...

    with pytest.raises(InvalidKey, match=r"queue 'mail' needs the key 'account', which task 'sweep' .*using\(keys="):
        await sweep.enqueue()
    job = await sweep.using(keys={"account": None}).enqueue()
    assert (await job.record()).keys == {"account": None}


@pytest.mark.parametrize(
    ("keys", "reason"),
    [
        ({"account": 1.5}, "is a float"),
        ({"account": True}, "is a bool"),
        ({"account": "x" * 513}, "513 bytes is more than 512"),
        ({"account": object()}, "cannot be a key"),
        ({"task": "x"}, "'task' is built in"),
        ({"not a name": 1}, "is not a key's name"),
    ],
)
async def test_a_key_without_a_canonical_form_is_refused(app: App, keys: dict[str, object], reason: str) -> None:
    app.queue("mail", keys=["account"])

    @app.task(queue="mail")
    async def send(account: str = "acme") -> None: ...

    with pytest.raises(InvalidKey, match=reason):
        await send.using(keys=keys).enqueue()


@pytest.mark.parametrize(
    ("declaration", "what"),
    [
        ({"fair": Fair(by="acount")}, r"Fair\(by='acount'"),
        ({"limits": [Concurrency(5), Rate(1, per="1s", by=("account", "acount"))]}, r"Rate\(1"),
        ({"keys": ["account", "acount"]}, "keys="),
    ],
)
async def test_a_by_that_no_task_of_the_queue_can_provide_is_refused_when_the_app_is_built(
    app: App, declaration: dict[str, Any], what: str
) -> None:
    # A19 at its root.
    app.queue("mail", **declaration)

    @app.task(queue="mail", name="send")
    async def send(account: str) -> None: ...

    with pytest.raises(InvalidPolicy, match=f"queue 'mail': {what}.* looks at the key 'acount', which none .*send"):
        await send.enqueue("acme")


async def test_a_key_that_one_task_of_the_queue_can_provide_is_enough(app: App) -> None:
    app.queue("mail", fair=Fair(by="account"), limits=[Concurrency(1, by="priority"), Concurrency(1, by="task")])

    @app.task(queue="mail")
    async def send(account: str) -> None: ...

    @app.task(queue="mail")
    async def sweep() -> None: ...

    job = await send.enqueue("acme")  # the app is checked here
    assert (await job.record()).keys["account"] == "acme"
    with pytest.raises(InvalidKey, match="'account'"):
        await sweep.enqueue()
