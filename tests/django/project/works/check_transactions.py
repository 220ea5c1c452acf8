"""Run by `manage.py test`, on every database; see tests/django/test_project.py."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

from django.db import connection, transaction
from django.test import TestCase, TransactionTestCase

from fairlane.errors import ConfigurationError, InvalidJob, JobNotFound
from fairlane.integrations.django import app
from fairlane.integrations.django.testing import captured_calls, run_jobs
from fairlane.job import JobRecord
from fairlane.store.operators import JobFilter
from works.models import Note
from works.tasks import count_in_a_process, is_connected_anew, write, write_and_go_on, write_async


def texts() -> list[str]:
    return sorted(Note.objects.values_list("text", flat=True))


def stored() -> list[JobRecord]:
    """What others see."""
    return list(app.run_blocking(app.operations.jobs.list(JobFilter())).jobs)


class WithoutCommit(TestCase):
    def test_a_job_is_seen_by_who_captures_and_by_nobody_else(self) -> None:
        with captured_calls() as calls:
            self.client.get("/place", {"text": "a"})
            app.enqueue_many_sync([write.call("b"), write.call("c")])
        self.assertEqual([call.args for call in calls], [("job of a",), ("b",), ("c",)])
        self.assertEqual(stored(), [])
        with self.assertRaisesMessage(ConfigurationError, "use a TransactionTestCase"):
            run_jobs()

    async def test_an_async_enqueue_follows_the_transaction_of_its_queries(self) -> None:
        job = await write_async.enqueue("a")
        with self.assertRaises(JobNotFound):
            await job.status()

    def test_a_call_that_cannot_be_stored_is_refused_at_once(self) -> None:
        with self.assertRaises(InvalidJob):
            write.enqueue_sync(object())

    def test_a_task_is_still_a_function(self) -> None:
        self.assertEqual(write("here"), Note.objects.get(text="here").pk)


class WithCommit(TransactionTestCase):
    def test_a_committed_job_runs(self) -> None:
        self.client.get("/place", {"text": "a"})
        self.assertEqual([ran.outcome for ran in run_jobs()], ["done"])
        self.assertEqual(texts(), ["a", "job of a"])

    def test_a_rollback_takes_the_job_along(self) -> None:
        self.client.get("/place", {"text": "a", "fails": "1"})
        self.assertEqual(run_jobs(), [])
        self.assertEqual(texts(), [])

    def test_a_savepoint_takes_only_its_own_job_along(self) -> None:
        with transaction.atomic():
            write.enqueue_sync("kept")
            with transaction.atomic():
                write.enqueue_sync("lost")
                transaction.set_rollback(True)
        run_jobs()
        self.assertEqual(texts(), ["kept"])

    def test_nothing_is_seen_before_the_commit(self) -> None:
        with transaction.atomic():
            write.enqueue_sync("a")
            app.enqueue_many_sync([write.call("b")])
            self.assertEqual(stored(), [])
        self.assertEqual(len(stored()), 2)

    def test_outside_of_a_transaction_it_is_stored_at_once(self) -> None:
        job = write.enqueue_sync("a")
        self.assertEqual(str(job.status_sync()), "ready")

    def test_an_async_view_enqueues_and_looks(self) -> None:
        answer = self.client.get("/place-async", {"text": "a", "look": "1"})
        self.assertEqual(answer.content, b"ready")

    async def test_an_async_test_enqueues_and_looks(self) -> None:
        job = await write.enqueue("a")
        self.assertEqual(str(await job.status()), "ready")
        self.assertEqual(str((await app.operations.jobs.show(job.id)).record.state), "ready")

    def test_a_handler_uses_the_orm_async_or_not(self) -> None:
        write.enqueue_sync("a")
        job = write_async.enqueue_sync("b")
        run_jobs()
        self.assertEqual(texts(), ["a", "b"])
        self.assertEqual(job.result_sync(), Note.objects.get(text="b").pk)

    def test_a_handler_enqueues_with_its_own_transaction(self) -> None:
        write_and_go_on.enqueue_sync("a", fails=False)
        write_and_go_on.enqueue_sync("b", fails=True)
        self.assertEqual(sorted(ran.task.rpartition(".")[2] for ran in run_jobs()), ["write", *["write_and_go_on"] * 2])
        self.assertEqual(texts(), ["a", "after a"])

    def test_a_thread_leaves_no_connection_behind(self) -> None:
        if connection.vendor == "sqlite" and connection.is_in_memory_db():
            self.skipTest("Django never closes a connection to a database in memory")
        jobs = [is_connected_anew.enqueue_sync() for _ in range(2)]
        run_jobs()  # the same thread twice
        self.assertEqual([job.result_sync() for job in jobs], [True, True])

    def test_no_job_of_another_test_is_there(self) -> None:
        self.assertEqual(run_jobs(), [])

    def test_on_commit_is_a_choice(self) -> None:
        with as_if(enqueue="on_commit"):
            with transaction.atomic():
                job = write.enqueue_sync("a")
                app.enqueue_many_sync([write.call("b"), write.call("c")])
                with self.assertRaises(InvalidJob):
                    write.enqueue_sync(object())
            self.assertEqual(str(job.status_sync()), "ready")
            with transaction.atomic():
                write.enqueue_sync("lost")
                transaction.set_rollback(True)
        run_jobs()
        self.assertEqual(texts(), ["a", "b", "c"])

    def test_at_once_is_a_choice(self) -> None:
        if connection.vendor == "sqlite":
            self.skipTest("the transaction holds the only write lock")
        with as_if(enqueue="at_once"), transaction.atomic():
            job = write.enqueue_sync("a")
            self.assertEqual(str(job.status_sync()), "ready")
            transaction.set_rollback(True)
        self.assertEqual(len(run_jobs()), 1)


class as_if:
    """Other settings, for a block."""

    def __init__(self, **changes: Any) -> None:
        self._changes = changes

    def __enter__(self) -> None:
        self._before = app.settings
        app.settings = replace(app.settings, **self._changes)

    def __exit__(self, *_: object) -> None:
        app.settings = self._before


class InAProcess(TransactionTestCase):
    def test_a_task_with_a_process_of_its_own_sees_the_test_database(self) -> None:
        Note.objects.create(text="of the test")
        job = count_in_a_process.enqueue_sync()
        run_jobs()
        self.assertEqual(job.result_sync(), (1, os.getpid()))
