"""Statements on SQLite keep to their indexes: none walks over the backlog, or over the history."""

from __future__ import annotations

import re
import sqlite3
from pathlib import Path

import pytest

from fairlane.store.sqlite import SqliteStore
from fairlane.store.sqlite.database import STATEMENTS

INDEXES = {
    "walk_jobs": {"sqlite_autoindex_jobs_1"},
    "walk_jobs_of_queue": {"jobs_by_queue"},
    "walk_running_jobs": {"leases_by_end"},
    "walk_finished": {"jobs_by_end"},
    "select_fitting": {"sqlite_autoindex_jobs_1"},
    "select_ended": {"sqlite_autoindex_jobs_1"},
    "replay_job": set(),
    "hurry_job": set(),
    "count_beyond": {"jobs_by_end"},
    "select_finished": {"jobs_by_end"},
    "has_flow": set(),
    "has_gate": set(),
    "select_waiters": set(),
    "select_heads": {"jobs_by_lane"},
    "select_heads_of_lanes": {"jobs_by_lane"},
    "scan_flows": {"flows_in_turn"},
    "select_ready_lanes": {"lanes_in_turn"},
    "select_parked_lanes": {"lanes_parked"},
    "select_parked_flows": {"flows_parked"},
    "select_alarms": {"gates_by_alarm"},
    "select_gates_in_doubt": {"gates_by_alarm", "sqlite_autoindex_queues_1"},
    "select_unseen": {"arrivals_by_queue", "jobs_by_due", "sqlite_autoindex_queues_1"},
    "select_unseen_given": {"arrivals_by_queue", "jobs_by_due", "sqlite_autoindex_queues_1"},
    "select_resumed": {"arrivals_by_queue", "jobs_keeping_place", "sqlite_autoindex_queues_1"},
    "select_unseen_lanes": {"arrivals_by_queue", "jobs_by_due", "sqlite_autoindex_queues_1"},
    "select_key_sums": {"sqlite_autoindex_queues_1"},
    "select_all_lanes": set(),
    "select_all_flows": set(),
    "select_all_gates": set(),
    "select_deltas": set(),
    "has_delta": set(),
    "delete_deltas": set(),
    "store_journal": set(),
    "note_change": set(),
    "walk_idle_lanes": set(),
    "walk_idle_flows": {"lanes_of_flow"},
    "walk_gates": set(),
    "select_lanes": set(),
    "select_flows": set(),
    "select_gates": set(),
    "select_releases": {"releases_by_queue"},
    "select_due_jobs": {"jobs_by_due"},
    "next_due_job": {"jobs_by_due"},
    "claim_jobs": set(),
    "claim_alike": set(),
    "select_places_kept": {"jobs_keeping_place"},
    "select_kept_places": {"jobs_keeping_place"},
    "select_running": {"sqlite_autoindex_jobs_1"},
    "select_claims": {"sqlite_autoindex_jobs_1"},
    "finish_job": set(),
    "finish_jobs": set(),
    "finish_with_result": set(),
    "select_held": {"sqlite_autoindex_jobs_1"},
    "delete_job": set(),
    "delete_attempts": {"attempts_by_job"},
    "delete_uniques_of_job": {"uniques_of_job"},
    "prune_uniques": {"uniques_by_end"},
}


@pytest.mark.parametrize("statement", sorted(INDEXES))
async def test_a_statement_keeps_to_its_indexes(statement: str, tmp_path: Path) -> None:
    store = SqliteStore(str(tmp_path / "jobs.db"))
    await store.open()
    await store.close()
    connection = sqlite3.connect(tmp_path / "jobs.db")
    try:
        text = STATEMENTS[statement]
        numbers = [int(number) for number in re.findall(r"\?(\d+)", text)]
        parameters = [None] * (max(numbers) if numbers else text.count("?"))
        plan = [row[3] for row in connection.execute(f"explain query plan {text}", parameters)]
    finally:
        connection.close()
    assert [step for step in plan if re.match(r"SCAN (jobs|flows|lanes|gates|journal|releases)\b", step)] == []
    # A row's own number is looked up without an index.
    assert {name for step in plan for name in re.findall(r"USING (?:COVERING )?INDEX (\w+)", step)} == INDEXES[
        statement
    ]


async def test_every_walk_is_in_the_order_of_its_index(tmp_path: Path) -> None:
    store = SqliteStore(str(tmp_path / "jobs.db"))
    await store.open()
    await store.close()
    connection = sqlite3.connect(tmp_path / "jobs.db")
    try:
        for statement, count in (
            ("walk_jobs", 2),
            ("walk_jobs_of_queue", 3),
            ("walk_finished", 5),
            ("select_finished", 3),
            ("select_heads", 3),
            ("scan_flows", 3),
            ("select_ready_lanes", 1),
            ("select_parked_lanes", 1),
            ("select_parked_flows", 1),
            ("select_alarms", 2),
            ("select_deltas", 2),
        ):
            plan = connection.execute(f"explain query plan {STATEMENTS[statement]}", [None] * count).fetchall()
            assert [row[3] for row in plan if "TEMP B-TREE" in row[3]] == [], statement
    finally:
        connection.close()


WALKS_A_QUEUE = {"walk_jobs_of_queue"}
"""A stretch at a time, in the order of the index."""


async def test_no_statement_walks_over_all_jobs_or_over_those_of_a_queue(tmp_path: Path) -> None:
    # The census of who holds what read the whole history of a queue: the planner began with the jobs, not the leases.
    store = SqliteStore(str(tmp_path / "jobs.db"))
    await store.open()
    await store.close()
    connection = sqlite3.connect(tmp_path / "jobs.db")
    found: set[str] = set()
    looked_at = 0
    try:
        for name, text in STATEMENTS.items():
            if not re.search(r"\bjobs\b", text) or re.match(r"(--.*\n)*(create|drop|pragma)", text):
                continue
            numbers = [int(number) for number in re.findall(r"\?(\d+)", text)]
            parameters = [None] * (max(numbers) if numbers else text.count("?"))
            plan = [row[3] for row in connection.execute(f"explain query plan {text}", parameters)]
            looked_at += 1
            if any(re.match(r"SCAN (j|jobs)\b|SEARCH (j|jobs) .*jobs_by_queue \(queue=\?\)$", step) for step in plan):
                found.add(name)
    finally:
        connection.close()
    assert looked_at > 40
    assert found - WALKS_A_QUEUE == set()
