"""What a page costs the database does not depend on how many queues, keys and jobs there are (O12)."""

from __future__ import annotations

from contextlib import AsyncExitStack

import pytest

from fairlane.clock import ManualClock
from fairlane.dashboard.page import watched_text
from fairlane.dashboard.pages import PAGES
from tests.dashboard.harness import ROOT, Site
from tests.dashboard.test_api_statements import Statements, a_site

WATCHED = "&".join(f"watch={watched_text('queue-0', {'account': f'account-{n}'})}" for n in range(3))


async def cost_of_looking(site: Site, statements: Statements) -> dict[str, int]:
    """Statements of each page, once whatever is found out only once is known."""
    program = site.program()
    job = (await program.get(f"{ROOT}/api/jobs")).json()["jobs"][0]["id"]
    paths = {page.path: page.path.replace("{queue}", "queue-0").replace("{job}", job) for page in PAGES}
    paths["/queues/{queue}/key"] += "?key.account=account-0"
    paths["/ watched"] = f"/?{WATCHED}"
    costs = {}
    for name, path in paths.items():
        for _ in range(2):
            statements.count = 0
            answer = await program.get(f"{ROOT}{path}")
            assert answer.status_code == 200, answer.text
            costs[name] = statements.count
    return costs


async def test_more_queues_and_keys_take_no_more_statements(
    database_url: str, clock: ManualClock, stack: AsyncExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    statements = Statements(monkeypatch)
    few = await cost_of_looking(await a_site(stack, database_url, clock, queues=2, keys=4), statements)
    many = await cost_of_looking(await a_site(stack, database_url, clock, queues=5, keys=40), statements)
    # An explanation runs the plan, which asks for what it needs in rounds: a few, however much there is.
    assert {name: (few[name], cost) for name, cost in many.items() if cost > few[name] + 2} == {}
    assert max(many.values()) <= 90  # SQLite: every transaction begins with queue time


async def test_looking_changes_nothing(
    database_url: str, clock: ManualClock, stack: AsyncExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = await a_site(stack, database_url, clock, queues=2, keys=4)
    operations = site.dashboard.operations
    before = [await operations.overview(), await operations.queues.show("queue-0"), await operations.overrides.list()]
    await cost_of_looking(site, Statements(monkeypatch))
    after = [await operations.overview(), await operations.queues.show("queue-0"), await operations.overrides.list()]
    assert after == before
