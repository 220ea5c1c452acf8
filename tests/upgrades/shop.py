"""A program that both versions run. Its handlers write every run into a ledger; as a program it enqueues jobs."""

from __future__ import annotations

import asyncio
import os
import sys

from fairlane import App, Concurrency, Fair, Rate, Sequence, context

app = App(os.environ["FAIRLANE_URL"])
LEDGER = os.environ["SHOP_LEDGER"]

app.queue(
    "webhooks",
    fair=Fair(by="account"),
    limits=[Concurrency(3, by="account"), Rate(2_000, per="1s", by="endpoint"), Concurrency(20, name="outgoing")],
)
app.queue("ledgers", limits=[Sequence(by="account")])


def note(what: str) -> None:
    ledger = os.open(LEDGER, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    os.write(ledger, f"{what}\n".encode())
    os.close(ledger)


async def work(seconds: float) -> None:
    loop = asyncio.get_running_loop()
    done = loop.create_future()
    loop.call_later(seconds, done.set_result, None)
    await done


@app.task(queue="webhooks", name="deliver", max_attempts=3)
async def deliver(number: int, account: str, endpoint: str) -> int:
    note(f"deliver {number}")
    await work(0.002)
    if number % 10 == 0:
        context().enqueue(book.call(number, account))
        context().put(f"delivered/{number}", account)
    if number % 25 == 1 and context().attempt == 1:
        raise RuntimeError("the first attempt fails")
    return number


@app.task(queue="ledgers", name="book")
async def book(number: int, account: str) -> None:
    note(f"book {number}")


async def produce(first: int, count: int) -> None:
    async with app:
        calls = [
            deliver.using(unique=f"delivery-{number}", delay="1s" if number % 7 == 0 else None).call(
                number, account=f"account-{number % 5}", endpoint=f"endpoint-{number % 3}"
            )
            for number in range(first, first + count)
        ]
        await deliver.enqueue_many(calls)


if __name__ == "__main__":
    asyncio.run(produce(int(sys.argv[1]), int(sys.argv[2])))
