"""A loop that asks the database can be ended, whatever the database does meanwhile."""

from __future__ import annotations

import asyncio

from fairlane.errors import StoreUnavailable
from fairlane.waits import Outage
from tests.waiting import until


async def test_a_session_that_fails_while_it_is_left_does_not_keep_a_loop_that_is_to_end() -> None:
    """F8: the failure of the session must not hide that the loop was cancelled, or it would try for ever."""
    asked = 0

    async def ask() -> None:
        nonlocal asked
        asked += 1
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            raise StoreUnavailable("connection was closed in the middle of operation") from None

    outage = Outage(lambda: None)
    loop = asyncio.create_task(outage.ride_out(ask, "claiming"))
    await until(lambda: asked)
    loop.cancel()
    [ended] = await asyncio.wait_for(asyncio.gather(loop, return_exceptions=True), 60)
    assert isinstance(ended, asyncio.CancelledError)
    assert asked == 1
    assert not outage.is_lost
