"""The blocking forms: from scripts, from threads, from a WSGI server, and after a fork."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from socketserver import ThreadingMixIn
from typing import Any
from urllib.request import urlopen
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

import pytest

from fairlane import App, State
from fairlane.effects import ABSENT
from fairlane.errors import JobCancelled, JobFailed, ResultTimeout, StoreUnavailable
from fairlane.store import results as awaiting
from fairlane.task import SyncTask

WATCHDOG = 60.0


class Shop:
    """A program with tasks."""

    def __init__(self, url: str) -> None:
        self.app = App(url)

        @self.app.task(name="double", max_attempts=1)
        def double(number: int) -> int:
            return 2 * number

        @self.app.task(name="fail", max_attempts=1)
        def fail() -> None:
            raise ValueError("boom")

        self.double: SyncTask[[int], int] = double
        self.fail: SyncTask[[], None] = fail


@pytest.fixture
def shop(url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Shop]:
    monkeypatch.setattr(awaiting, "LOOK_EVERY", 1e8)  # whoever waits is woken, or waits for good
    shop = Shop(url)
    yield shop
    shop.app.close_sync()


@contextmanager
def working(url: str) -> Iterator[None]:
    """A worker in a thread with a loop and an app of its own: a process of its own, as far as the database knows."""
    started = threading.Event()
    stop: list[Any] = []

    async def work() -> None:
        async with Shop(url).app as app:
            worker = await app.worker()
            loop = asyncio.get_running_loop()
            stop.append(lambda: loop.call_soon_threadsafe(worker.stop))
            started.set()
            await worker.run()

    thread = threading.Thread(target=lambda: asyncio.run(work()))
    thread.start()
    try:
        assert started.wait(WATCHDOG)
        yield
    finally:
        stop[0]()
        thread.join()


def test_a_script_asks_waits_and_cancels_by_blocking(shop: Shop, url: str) -> None:
    job = shop.double.using(delay="1h").enqueue_sync(1)
    assert job.status_sync() is State.SCHEDULED
    with pytest.raises(ResultTimeout, match="is still scheduled after 1ms"):
        job.result_sync(timeout="1ms")
    assert job.cancel_sync() is State.CANCELLED
    with pytest.raises(JobCancelled):
        job.result_sync()
    with working(url):
        assert shop.double.enqueue_sync(21).result_sync() == 42
        with pytest.raises(JobFailed, match="boom"):
            shop.fail.enqueue_sync().result_sync(timeout=WATCHDOG)


def test_a_script_stores_many_at_once_by_blocking(shop: Shop) -> None:
    jobs = [
        *shop.app.enqueue_many_sync([shop.double.call(1), shop.double.using(priority=5).call(3)]),
        *shop.double.enqueue_many_sync([shop.double.call(2)]),
    ]
    assert [shop.app.run_blocking(job.record()).priority for job in jobs] == [0, 5, 0]


def test_values_have_blocking_forms(shop: Shop) -> None:
    values = shop.app.values
    values.put_sync("a", 1)
    assert values.compare_and_set_sync("b", ABSENT, 2) is True
    assert (values.get_sync("a"), values.get_sync("c", "none")) == (1, "none")
    assert values.scan_sync(limit=1).next == "a"
    assert (values.delete_sync("a"), values.delete_sync("a")) == (True, False)


def test_many_threads_wait_at_once_each_for_its_own_job(shop: Shop, url: str) -> None:
    together = threading.Barrier(24)

    def ask(number: int) -> int:
        together.wait(WATCHDOG)  # the first use of the app, by all of them at once
        return shop.double.enqueue_sync(number).result_sync(timeout=WATCHDOG)

    with working(url), ThreadPoolExecutor(24) as threads:
        assert list(threads.map(ask, range(24))) == [2 * number for number in range(24)]
    names = [thread.name for thread in threading.enumerate()]
    assert names.count("fairlane-blocking") == 1


class ThreadedServer(ThreadingMixIn, WSGIServer):
    """A WSGI server with a thread for each request."""

    daemon_threads = True
    request_queue_size = 64


class Quiet(WSGIRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:
        pass


def test_a_wsgi_server_with_a_thread_for_each_request_answers_with_results(shop: Shop, url: str) -> None:
    def site(environ: Any, start_response: Any) -> list[bytes]:
        number = shop.double.enqueue_sync(int(environ["PATH_INFO"][1:])).result_sync(timeout=WATCHDOG)
        start_response("200 OK", [("Content-Type", "text/plain")])
        return [str(number).encode()]

    def visit(number: int) -> int:
        with urlopen(f"http://127.0.0.1:{server.server_port}/{number}", timeout=WATCHDOG) as answer:
            return int(answer.read())

    with (
        working(url),
        make_server("127.0.0.1", 0, site, ThreadedServer, Quiet) as server,
        ThreadPoolExecutor(12) as visitors,
    ):
        serving = threading.Thread(target=server.serve_forever)
        serving.start()
        try:
            assert list(visitors.map(visit, range(36))) == [2 * number for number in range(36)]
        finally:
            server.shutdown()
            serving.join()


def test_a_thread_that_waits_when_the_app_is_closed_is_told_so(shop: Shop) -> None:
    job = shop.double.enqueue_sync(1)
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(job.result_sync)
        shop.app.close_sync()
        # It had begun to wait, or it finds the app closed and opens it again: then it is closed once more.
        while not waiting.done():
            shop.app.close_sync()
        assert isinstance(waiting.exception(), StoreUnavailable)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_process_that_has_forked_uses_a_thread_and_a_connection_of_its_own(shop: Shop) -> None:
    shop.app.values.put_sync("parent", 1)
    child = os.fork()
    if child == 0:
        status = 1
        try:
            shop.app.values.put_sync("child", shop.app.values.get_sync("parent") + 1)
            status = 0
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert [shop.app.values.get_sync(key) for key in ("parent", "child")] == [1, 2]
