"""Run by `manage.py test`, on every database; see tests/django/test_project.py."""

from __future__ import annotations

from datetime import timedelta
from typing import Any
from uuid import UUID, uuid4

from django.db import transaction
from django.test import TestCase, TransactionTestCase
from django.utils import timezone

from fairlane.integrations.django import app
from fairlane.integrations.django.testing import captured_calls, run_jobs
from fairlane.job import JobRecord
from fairlane.store.operators import JobFilter
from works.framework import InvalidTask, exceptions, framework, signals
from works.models import Note
from works.tasks import double, fail, greet, note_down, tell_attempt, write


class Backend(TransactionTestCase):
    def test_a_task_runs_and_its_result_comes_back(self) -> None:
        result = double.enqueue(21)
        self.assertEqual((result.status, result.args, result.attempts), ("READY", [21], 0))
        run_jobs()
        result.refresh()
        self.assertEqual((result.status, result.return_value, result.attempts), ("SUCCESSFUL", 42, 1))
        self.assertTrue(result.enqueued_at <= result.started_at <= result.finished_at)
        self.assertEqual(double.get_result(result.id), result)

    def test_an_async_task_runs_in_its_queue_with_its_priority(self) -> None:
        result = greet.enqueue(name="ada")
        (job,) = app.run_blocking(_records())
        self.assertEqual((job.queue, job.priority, job.task), ("mail", 7, "works.tasks.greet"))
        run_jobs()
        self.assertEqual(greet.get_result(result.id).return_value, "hello ada, 0 notes")

    async def test_async_code_enqueues_and_asks(self) -> None:
        result = await double.aenqueue(1)
        found = await double.aget_result(result.id)
        self.assertEqual((found.status, found.args), ("READY", [1]))

    def test_a_task_waits_for_its_time(self) -> None:
        later = timezone.now() + timedelta(hours=1)
        result = double.using(run_after=later).enqueue(1)
        self.assertEqual(run_jobs(), [])
        found = double.get_result(result.id)
        self.assertEqual((found.status, found.task.run_after), ("READY", later))

    def test_what_a_task_raises_is_its_end(self) -> None:
        result = fail.enqueue(3)
        run_jobs()
        result.refresh()
        (error,) = result.errors
        self.assertEqual((result.status, error.exception_class), ("FAILED", ValueError))
        self.assertIn("not 3", error.traceback)
        with self.assertRaises(ValueError):
            _ = result.return_value

    def test_what_is_named_in_retry_on_is_tried_again_with_its_context(self) -> None:
        result = tell_attempt.enqueue("hm")
        for attempt in (1, 2):
            run_jobs()
            result.refresh()
            self.assertEqual((result.status, result.attempts), ("READY", attempt))
            app.run_blocking(_hurry(result.id))
        run_jobs()
        result.refresh()
        self.assertEqual(result.return_value, ["hm", 3, 2])
        self.assertEqual(result.errors[0].exception_class_path, "works.tasks.Busy")

    def test_a_cancelled_task_has_failed(self) -> None:
        result = double.enqueue(1)
        app.job(result.id).cancel_sync()
        result.refresh()
        self.assertEqual(result.status, "FAILED")

    def test_a_rollback_takes_the_task_along(self) -> None:
        with transaction.atomic():
            note_down.enqueue("lost")
            transaction.set_rollback(True)
        with transaction.atomic():
            note_down.enqueue("kept")
        run_jobs()
        self.assertEqual([note.text for note in Note.objects.all()], ["kept"])

    def test_results_that_are_not_there(self) -> None:
        for unknown in (str(uuid4()), "nonsense", str(write.enqueue_sync("no task of Django's").id)):
            with self.assertRaises(exceptions.TaskResultDoesNotExist):
                framework.default_task_backend.get_result(unknown)
        with self.assertRaises(exceptions.TaskResultMismatch):
            double.get_result(greet.enqueue("ada").id)

    def test_signals_tell_of_its_life(self) -> None:
        told: list[tuple[str, str]] = []

        def hear(name: str) -> Any:
            def heard(sender: Any, task_result: Any, **_: Any) -> None:
                told.append((name, str(task_result.status)))

            signal = getattr(signals, name)
            signal.connect(heard)
            self.addCleanup(signal.disconnect, heard)
            return heard

        kept = [hear(name) for name in ("task_enqueued", "task_started", "task_finished")]
        double.enqueue(1)
        fail.enqueue(1)
        run_jobs()
        del kept
        self.assertEqual(
            told,
            [
                *[("task_enqueued", "READY")] * 2,
                *[("task_started", "RUNNING"), ("task_finished", "SUCCESSFUL")],
                *[("task_started", "RUNNING"), ("task_finished", "FAILED")],
            ],
        )

    def test_a_worker_finds_a_task_that_it_has_not_registered(self) -> None:
        result = double.enqueue(4)
        del app.registry._tasks["works.tasks.double"]  # as in a process that never enqueued it
        run_jobs()
        result.refresh()
        self.assertEqual(result.return_value, 8)


class Refusals(TestCase):
    def test_a_queue_that_is_not_named_in_the_settings(self) -> None:
        with self.assertRaisesMessage(InvalidTask, "Queue 'other' is not valid for backend"):
            double.using(queue_name="other")

    def test_arguments_that_have_no_json(self) -> None:
        with self.assertRaises(TypeError):
            double.enqueue(object())

    def test_a_test_case_sees_what_is_enqueued(self) -> None:
        with captured_calls() as calls:
            double.enqueue(2)
        self.assertEqual([(call.task.name, call.args) for call in calls], [("works.tasks.double", (2,))])

    def test_the_backend_supports_what_it_says(self) -> None:
        backend = framework.default_task_backend
        for feature in ("defer", "async_task", "get_result", "priority"):
            self.assertTrue(getattr(backend, f"supports_{feature}"), feature)


async def _records() -> list[JobRecord]:
    return list((await app.operations.jobs.list(JobFilter())).jobs)


async def _hurry(job: str) -> None:
    await app.operations.jobs.retry([UUID(job)])
