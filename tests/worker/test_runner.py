"""What runs jobs for a worker, spoken to as the worker speaks to it; here in the process of the test."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any
from uuid import UUID, uuid4

import msgspec

from fairlane import App, State, Task
from fairlane.clock import ManualClock
from fairlane.job import Claim
from fairlane.worker import WorkerOptions
from fairlane.worker.children import Runner
from fairlane.worker.processes import (
    Began,
    Begin,
    BlackBox,
    End,
    Ended,
    Handed,
    Interrupt,
    Leave,
    Line,
    News,
    Noted,
    Ready,
)
from fairlane.worker.runs import Stop
from tests.waiting import PATIENCE

decode = msgspec.msgpack.Decoder(News).decode


class Conversation:
    """Our end of the line."""

    def __init__(self, line: Line, heard: asyncio.Queue[News], box: BlackBox) -> None:
        self.line = line
        self.heard = heard
        self.box = box

    async def next(self) -> Any:
        return await asyncio.wait_for(self.heard.get(), PATIENCE)

    async def ends(self, count: int) -> dict[UUID, End]:
        """What became of so many jobs."""
        found: dict[UUID, End] = {}
        while len(found) < count:
            news = await self.next()
            assert isinstance(news, Ended)
            found |= {end.job: end for end in news.jobs}
        return found


@asynccontextmanager
async def runner(app: App, slots: int = 2) -> AsyncIterator[Conversation]:
    box = BlackBox.empty(slots)
    theirs_box = BlackBox(os.dup(box.descriptor), slots)
    ours, theirs = socket.socketpair()
    heard: asyncio.Queue[News] = asyncio.Queue()
    made = await app.make_worker(
        lambda program, options: Runner(program, options, theirs_box), WorkerOptions(concurrency=slots)
    )
    running = asyncio.create_task(made.run(theirs))
    line = Line(ours, lambda body: heard.put_nowait(decode(body)), lambda: None)
    talk = Conversation(line, heard, box)
    assert isinstance(await talk.next(), Ready)
    yield talk
    line.send(Leave())
    await asyncio.wait_for(running, PATIENCE)
    line.close()
    theirs.close()
    theirs_box.close()
    box.close()


def claim_of(task: Task[..., Any], *args: Any) -> Claim:
    payload = task.codec.encode_call(args, {}, 10_000_000)
    return Claim(uuid4(), uuid4(), "default", task.name, 0, {}, payload, 1, 5, 0, 0, False)


async def test_a_job_that_cannot_begin_in_time_does_not_begin_and_says_so(app: App, clock: ManualClock) -> None:
    # L24: whoever handed it over has given it to another by now.
    ran: list[int] = []

    @app.task
    async def work(number: int) -> None:
        ran.append(number)

    async with app, runner(app) as talk:
        late, early = claim_of(work, 1), claim_of(work, 2)
        now = clock.monotonic()
        talk.line.send(Begin([Handed(late, now - 1), Handed(early, now)], 0, 0))
        ends = await talk.ends(2)
        assert (ends[late.id].is_unbegun, ends[late.id].settlement) == (True, None)
        settlement = ends[early.id].settlement
        assert settlement is not None
        assert settlement.to is State.DONE
        assert ran == [2]
        assert talk.box.read() == {}


async def test_what_waits_for_a_slot_is_given_up_when_its_time_is_over(app: App, clock: ManualClock) -> None:
    going = asyncio.Event()

    @app.task
    async def work(number: int) -> None:
        await going.wait()

    async with app, runner(app, 1) as talk:
        first, second = claim_of(work, 1), claim_of(work, 2)
        by = clock.monotonic() + 1_000_000
        talk.line.send(Begin([Handed(first, by, is_paced=True), Handed(second, by)], 0, 0))
        assert await talk.next() == Began(first.id, clock.monotonic())
        assert talk.box.read() == {first.id: Noted.RUNS}
        clock.advance("2s")
        assert (await talk.ends(1))[second.id].is_unbegun
        going.set()
        assert (await talk.ends(1))[first.id].settlement is not None


async def test_a_job_is_interrupted_by_its_id_and_a_lost_one_is_not_settled(app: App, clock: ManualClock) -> None:
    @app.task
    async def hang() -> None:
        await asyncio.Event().wait()

    async with app, runner(app) as talk:
        cancelled, lost = claim_of(hang), claim_of(hang)
        by = clock.monotonic() + 1_000_000
        talk.line.send(Begin([Handed(cancelled, by, is_paced=True), Handed(lost, by, is_paced=True)], 0, 0))
        assert {(await talk.next()).job for _ in range(2)} == {cancelled.id, lost.id}
        talk.line.send(Interrupt(cancelled.id, Stop.CANCELLED))
        talk.line.send(Interrupt(lost.id, Stop.GONE))
        ends = await talk.ends(2)
        settlement = ends[cancelled.id].settlement
        assert settlement is not None
        assert settlement.to is State.CANCELLED
        assert (ends[lost.id].settlement, ends[lost.id].is_unbegun) == (None, False)


async def test_messages_of_any_size_arrive_whole(app: App, clock: ManualClock) -> None:
    app.max_payload = 10_000_000

    @app.task
    async def echo(text: str) -> str:
        return text

    async with app, runner(app, 4) as talk:
        claims = [claim_of(echo, letter * 1_000_000) for letter in "abcd"]
        talk.line.send(Begin([Handed(claim, clock.monotonic() + 60_000_000) for claim in claims], 0, 0))
        ends = await talk.ends(4)
        for claim, letter in zip(claims, "abcd", strict=True):
            settlement = ends[claim.id].settlement
            assert settlement is not None
            assert len(settlement.result or b"") > 1_000_000
            assert letter.encode() * 10 in (settlement.result or b"")
