"""What arguments and results may be, what they are stored as, and what operators see of them."""

from __future__ import annotations

import json
import zlib
from dataclasses import dataclass
from datetime import UTC, datetime
from decimal import Decimal
from itertools import count
from pathlib import Path
from typing import Any
from uuid import UUID

import msgspec
import pytest
from click.testing import CliRunner
from pydantic import BaseModel, ConfigDict, Field, computed_field, field_validator

from fairlane import App, State
from fairlane.cli.program import program
from fairlane.clock import ManualClock
from fairlane.codec import payload_type
from fairlane.errors import ConfigurationError
from fairlane.operations import Disclosure
from fairlane.testing import run_until_idle


class Money:
    """A class that has no JSON form of its own."""

    def __init__(self, cents: int) -> None:
        self.cents = cents

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Money) and other.cents == self.cents

    __hash__ = None  # type: ignore[assignment]


class Dollars(Money): ...


@dataclass
class Order:
    id: int
    total: Money
    shares: dict[str, Decimal]


class Receipt(msgspec.Struct):
    order: Order
    paid: list[Money]


class Address(BaseModel):
    street: str = Field(alias="streetName")


class Customer(BaseModel):
    """A pydantic model of what JSON has no form for, with a computed field, and a model inside that has an alias."""

    model_config = ConfigDict(extra="forbid")

    name: str
    since: datetime
    credit: Decimal
    number: UUID
    addresses: list[Address] = []

    @computed_field  # type: ignore[prop-decorator]  # as pydantic's own documentation has it
    @property
    def greeting(self) -> str:
        return f"Dear {self.name}"

    @field_validator("name")
    @classmethod
    def is_named(cls, name: str) -> str:
        if not name:
            raise ValueError("a customer without a name")
        return name


class Wallet:
    """Something of another library, that a pydantic model cannot say in JSON either."""

    def __init__(self, coins: int) -> None:
        self.coins = coins


class Account(BaseModel):
    """A pydantic model that is stored in a form of its own."""

    model_config = ConfigDict(arbitrary_types_allowed=True)

    wallet: Wallet


@dataclass(frozen=True)
class Parcel:
    """A data class that holds what the others are: each is read by its own rules."""

    receipt: Receipt
    sent: datetime
    weights: tuple[float, ...]


payload_type(Money, encode=lambda money: money.cents, decode=Money)
payload_type(Account, encode=lambda account: account.wallet.coins, decode=lambda coins: Account(wallet=Wallet(coins)))
SINCE = datetime(2030, 1, 7, 9, 30, tzinfo=UTC)


class Squeezed:
    """A codec, and one that breaks."""

    def __init__(self) -> None:
        self.is_broken = False

    def encode(self, document: bytes) -> bytes:
        return b"\xff" + zlib.compress(document)

    def decode(self, stored: bytes) -> bytes:
        if self.is_broken:
            raise ValueError("the key is gone")
        return zlib.decompress(stored[1:])


class Salted(Squeezed):
    """A codec that writes something else each time, as one that encrypts does."""

    def encode(self, document: bytes) -> bytes:
        return super().encode(document + b" " * next(_salt))


_salt = count(1)


async def test_data_classes_structs_and_taught_types_come_back_as_themselves() -> None:
    async with App("sqlite://", clock=ManualClock()) as app:

        @app.task
        async def pay(order: Order) -> Parcel:
            assert isinstance(order.shares["a"], Decimal)
            return Parcel(Receipt(order, [order.total, Money(1)]), SINCE, (0.5, 1.0))

        order = Order(7, Dollars(500), {"a": Decimal("0.10")})
        job = await pay.enqueue(order)
        (ran,) = await run_until_idle(app)
        assert ran.error is None
        receipt = Receipt(Order(7, Money(500), {"a": Decimal("0.10")}), [Money(500), Money(1)])
        assert await job.result() == Parcel(receipt, SINCE, (0.5, 1.0))


async def test_pydantic_models_come_back_as_themselves_and_are_validated() -> None:
    async with App("sqlite://", clock=ManualClock()) as app:

        @app.task
        async def greet(customers: list[Customer], by_name: dict[str, Customer]) -> Customer:
            assert by_name["first"] == customers[0]
            return customers[-1]

        given: dict[str, Any] = {"since": SINCE, "credit": Decimal("0.10"), "number": UUID(int=7)}
        ada = Customer(name="ada", addresses=[Address(streetName="Hauptstraße")], **given)
        bob = Customer(name="bob", **given)
        job = await greet.enqueue([ada, bob], {"first": ada})
        (ran,) = await run_until_idle(app)
        assert ran.error is None
        assert await job.result() == bob
        broken = await greet.enqueue([bob.model_copy(update={"name": ""})], {"first": ada})
        await run_until_idle(app)
        assert await broken.status() is State.DEAD
        assert "a customer without a name" in str((await broken.record()).error)


async def test_a_pydantic_model_can_be_taught_a_form_of_its_own() -> None:
    async with App("sqlite://", clock=ManualClock()) as app:

        @app.task
        async def sum_up(accounts: list[Account]) -> Account:
            return Account(wallet=Wallet(sum(each.wallet.coins for each in accounts)))

        job = await sum_up.enqueue([Account(wallet=Wallet(3)), Account(wallet=Wallet(4))])
        assert json.loads((await job.record()).payload) == [[[3, 4]], {}]
        await run_until_idle(app)
        assert (await job.result()).wallet.coins == 7


async def test_what_a_codec_seals_is_not_shown_by_a_schedule_and_is_known_again() -> None:
    clock = ManualClock()
    async with App("sqlite://", clock=clock, codec=Salted()) as app:

        @app.task
        async def double(number: int) -> int:
            return 2 * number

        app.schedule(double, 21, every="1h", name="hourly")
        digest = app.schedules["hourly"].digest
        assert digest == app.schedules["hourly"].digest, "what seals may do so in another way each time"
        app.schedules.clear()
        assert app.schedule(double, 22, every="1h", name="hourly").digest != digest
        await app.fire_schedules()
        clock.advance("1h")
        await app.fire_schedules()
        (view,) = await app.operations.schedules.list()
        assert view.call is None
        (ran,) = await run_until_idle(app)
        assert ran.error is None


def test_only_a_class_can_be_taught() -> None:
    with pytest.raises(ConfigurationError, match="payload_type: kind='Money' cannot be used; give a class"):
        payload_type("Money", encode=str, decode=str)  # type: ignore[arg-type]


async def test_a_codec_decides_what_is_stored_and_a_job_it_cannot_read_is_set_aside() -> None:
    codec = Squeezed()
    async with App("sqlite://", clock=ManualClock(), codec=codec) as app:

        @app.task
        async def double(number: int) -> int:
            return 2 * number

        job = await double.enqueue(21)
        assert (await job.record()).payload == codec.encode(b"[[21],{}]")
        await run_until_idle(app)
        assert (await job.record()).result == codec.encode(b"42")
        assert await job.result() == 42
        assert (await app.operations.jobs.show(job.id)).call == "(18 bytes that are no text)"

        broken = await double.enqueue(1)
        codec.is_broken = True
        await run_until_idle(app)
        assert await broken.status() is State.DEAD
        assert "the key is gone" in str((await broken.record()).error)


def hide(value: Any, disclosure: Disclosure) -> Any:
    if disclosure.job.keys.get("account") == "secret":
        raise KeyError("no rule for it")
    if isinstance(value, list):
        args, kwargs = value
        return [args, {name: "…" if name == "card" else each for name, each in kwargs.items()}]
    return "…"


async def test_operators_see_what_the_app_lets_them_see() -> None:
    async with App("sqlite://", clock=ManualClock(), redact=hide) as app:

        @app.task(keys=("account",))
        async def pay(account: str, card: str) -> str:
            return card

        job = await pay.enqueue("acme", card="4111")
        hidden = await pay.enqueue("secret", card="4111")
        assert (await app.operations.jobs.show(job.id)).result is None
        await run_until_idle(app)
        seen = await app.operations.jobs.show(job.id)
        assert (seen.call, seen.result) == ([["acme"], {"card": "…"}], "…")
        # A rule that breaks shows nothing, and the program still gets its own.
        broken = await app.operations.jobs.show(hidden.id)
        assert "4111" not in f"{broken.call} {broken.result}"
        assert "redact failed" in broken.call
        assert await hidden.result() == "4111"


SHOP = """
from fairlane import App

app = App("sqlite:///shop.db", redact=lambda value, disclosure: "hidden")

@app.task(name="pay")
async def pay(card: str) -> None: ...
"""


def test_the_command_line_shows_and_exports_no_more_than_that(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "redacting_shop.py").write_text(SHOP)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delenv("FAIRLANE_URL", raising=False)
    run = CliRunner().invoke
    stored = run(program, ["enqueue", "redacting_shop:app", "pay", "--args", '["4111"]', "--json"])
    assert stored.exit_code == 0, stored.output
    listed = run(program, ["jobs", "list", "--app", "redacting_shop:app", "--json"]).output
    job = json.loads(listed)["jobs"][0]["id"]
    for command in (["show", job, "--json"], ["export", "--with-payload"]):
        shown = run(program, ["jobs", *command, "--app", "redacting_shop:app"])
        assert shown.exit_code == 0, shown.output
        assert json.loads(shown.output)["call"] == "hidden"
        assert "4111" not in shown.output
