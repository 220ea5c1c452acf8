"""Sessions of the dashboard that were ended before their time."""

from __future__ import annotations

from fairlane.clock import ManualClock, microseconds
from fairlane.store import records
from fairlane.store.protocol import Retention, Store
from fairlane.store.upkeep import CLOCKS_DIFFER_BY

KEPT = Retention(done=microseconds("1d"), dead=microseconds("1d"))


async def test_an_ended_session_is_remembered_until_no_clock_takes_it_for_valid(
    store: Store, clock: ManualClock
) -> None:
    """S2: and then it is forgotten, so that the table holds no more than the logouts of half a day."""
    expires_at = await store.now() + microseconds("12h")
    await store.run(records.end_session("ann", expires_at))
    await store.run(records.end_session("ann", expires_at))
    assert await store.run(records.is_session_ended("ann"))
    assert not await store.run(records.is_session_ended("bob"))
    clock.advance("12h")
    await store.prune(KEPT)
    assert await store.run(records.is_session_ended("ann")), "the clock of a dashboard may be behind the database's"
    clock.advance(f"{CLOCKS_DIFFER_BY}us")
    await store.prune(KEPT)
    assert not await store.run(records.is_session_ended("ann"))
