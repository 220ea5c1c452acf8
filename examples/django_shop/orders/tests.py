from django.contrib.auth.models import User
from django.test import TestCase, TransactionTestCase

from fairlane.integrations.django.testing import captured_calls, run_jobs
from orders.models import Order
from orders.tasks import confirm, count_orders


class WhatIsEnqueued(TestCase):
    """Rolled back as a whole: nothing has to run."""

    def test_an_order_is_confirmed_by_a_job(self) -> None:
        with captured_calls() as calls:
            answer = self.client.post("/orders", {"customer": "ada", "cents": 100})
        (call,) = calls
        self.assertEqual(call.task, confirm)
        self.assertEqual(call.args, (answer.json()["order"], "ada"))

    async def test_async_code_sees_the_same_transaction(self) -> None:
        await Order.objects.acreate(customer="ada", cents=100)
        with captured_calls() as calls:
            await count_orders.enqueue("ada")
        self.assertEqual(len(calls), 1)

    def test_the_admin_links_to_the_dashboard(self) -> None:
        self.client.force_login(User.objects.create_superuser("root"))
        self.assertContains(self.client.get("/admin/"), 'href="/fairlane/"')


class WhatRuns(TransactionTestCase):
    """Transactions commit, and jobs run."""

    def test_a_job_confirms_the_order(self) -> None:
        answer = self.client.post("/orders", {"customer": "ada", "cents": 100})
        self.assertEqual([ran.outcome for ran in run_jobs()], ["done"])
        shown = self.client.get(f"/orders/{answer.json()['order']}")
        self.assertEqual(shown.json(), {"customer": "ada", "is_confirmed": True})

    def test_an_order_that_is_not_there_is_not_found(self) -> None:
        self.assertEqual(self.client.get("/orders/1").status_code, 404)

    def test_an_order_that_is_refused_leaves_no_job(self) -> None:
        answer = self.client.post("/orders", {"customer": "ada", "cents": 1_000_000})
        self.assertEqual(answer.status_code, 422)
        self.assertEqual(run_jobs(), [])
        self.assertFalse(Order.objects.exists())

    def test_an_async_task_uses_the_orm(self) -> None:
        Order.objects.create(customer="ada", cents=100)
        job = count_orders.enqueue_sync("ada")
        run_jobs()
        self.assertEqual(job.result_sync(), 1)

    def test_no_job_of_another_test_is_left(self) -> None:
        self.assertEqual(run_jobs(), [])
