"""Run by `manage.py test`, on every database; see tests/django/test_project.py."""

from __future__ import annotations

import io
import re
from typing import Any

import httpx
from django.contrib.auth.models import User
from django.core.asgi import get_asgi_application
from django.core.management import call_command
from django.core.management.base import SystemCheckError
from django.test import AsyncClient, Client, TransactionTestCase, override_settings

from fairlane.errors import ConfigurationError
from fairlane.integrations.django.dashboard import with_dashboard
from fairlane.integrations.django.project import load_settings
from fairlane.integrations.django.testing import run_jobs
from works.tasks import write

BROWSER = {"accept": "text/html,application/xhtml+xml,*/*;q=0.8"}


class Admin(TransactionTestCase):
    def test_its_index_links_to_the_dashboard_for_staff_only(self) -> None:
        client = Client()
        self.assertNotContains(client.get("/admin/", follow=True), "/fairlane/")
        client.force_login(User.objects.create_user("staff", is_staff=True))
        self.assertContains(client.get("/admin/"), '<a href="/fairlane/">')


class Dashboard(TransactionTestCase):
    async def ask(self, user: User | None, method: str = "GET", path: str = "/fairlane/", **more: Any) -> Any:
        client = Client()
        cookies = {}
        if user is not None:
            await client.aforce_login(user)
            cookies = {"sessionid": client.cookies["sessionid"].value}
        site = httpx.ASGITransport(with_dashboard(get_asgi_application()))
        async with httpx.AsyncClient(transport=site, base_url="http://shop", cookies=cookies) as browser:
            return await browser.request(method, path, **more)

    async def test_staff_may_look_and_superusers_may_act(self) -> None:
        job = await write.enqueue("a")
        staff = await User.objects.acreate_user("staff", is_staff=True)
        seen = await self.ask(staff, path="/fairlane/queues")
        self.assertEqual((seen.status_code, "notes" in seen.text), (200, True))
        self.assertEqual((await self.ask(staff, path=f"/fairlane/jobs/{job.id}")).status_code, 200)
        self.assertEqual((await self.ask(staff, "POST", "/fairlane/api/queues/notes/pause", json={})).status_code, 403)
        root = await User.objects.acreate_superuser("root")
        self.assertIn("root", (await self.ask(root)).text)

    async def test_a_bearer_token_of_nobody_switches_no_check_off(self) -> None:
        """S1: with the cookie of a superuser, a junk token changes nothing about what is asked of a form."""
        root = await User.objects.acreate_superuser("root")
        path, sent = "/fairlane/api/queues/notes/pause", {"json": {"reason": "a test"}}
        form = await self.ask(root, path="/fairlane/do/pause?queue=notes")
        csrf = re.search(r'name="csrf" value="([0-9a-f]+)"', form.text)
        assert csrf is not None
        own = {"X-CSRF-Token": csrf[1]}
        for bearer in ({}, {"Authorization": "Bearer junk-token-0000"}):
            for origin in ({}, {"Origin": "http://shop"}, {"Origin": "https://evil.test"}):
                refused = await self.ask(root, "POST", path, headers=bearer | origin, **sent)
                self.assertEqual(refused.status_code, 403, (bearer, origin))
            evil = {"Origin": "https://evil.test"}
            self.assertEqual((await self.ask(root, "POST", path, headers=bearer | evil | own, **sent)).status_code, 403)
            self.assertEqual((await self.ask(root, "POST", path, headers=bearer | own, **sent)).status_code, 200)

    async def test_others_are_kept_out(self) -> None:
        customer = await User.objects.acreate_user("customer")
        dismissed = await User.objects.acreate_user("dismissed", is_staff=True, is_active=False)
        for user in (None, customer, dismissed):
            self.assertEqual((await self.ask(user)).status_code, 401)

    async def test_a_person_who_is_not_logged_in_comes_back_after_the_admins_login(self) -> None:
        await User.objects.acreate_user("staff", password="a-long-secret", is_staff=True)
        answer = await self.ask(None, path="/fairlane/jobs?state=dead", headers=BROWSER)
        self.assertEqual(answer.status_code, 303)
        self.assertEqual(answer.headers["location"], "/admin/login/?next=%2Ffairlane%2Fjobs%3Fstate%3Ddead")
        there = await AsyncClient().post(answer.headers["location"], {"username": "staff", "password": "a-long-secret"})
        self.assertEqual((there.status_code, there.headers["location"]), (302, "/fairlane/jobs?state=dead"))

    async def test_who_is_no_staff_is_told_so_by_the_admin(self) -> None:
        customer = await User.objects.acreate_user("customer")
        self.assertEqual(
            (await self.ask(customer, headers=BROWSER)).headers["location"], "/admin/login/?next=%2Ffairlane%2F"
        )

    async def test_a_program_is_told_that_it_is_not_known(self) -> None:
        for method, path, headers in (
            ("GET", "/fairlane/", {"accept": "application/json"}),
            ("GET", "/fairlane/api/queues", BROWSER),
            ("GET", "/fairlane/queues", {**BROWSER, "hx-request": "true"}),
            ("POST", "/fairlane/queues/notes/pause", BROWSER),
        ):
            self.assertEqual((await self.ask(None, method, path, headers=headers)).status_code, 401, path)

    async def test_with_a_rule_of_its_own_nobody_is_sent_to_the_admin(self) -> None:
        site = httpx.ASGITransport(with_dashboard(get_asgi_application(), authorize=lambda request: None))
        async with httpx.AsyncClient(transport=site, base_url="http://shop", headers=BROWSER) as browser:
            self.assertEqual((await browser.get("/fairlane/")).status_code, 401)

    async def test_the_site_is_beside_it(self) -> None:
        self.assertEqual((await self.ask(None, path="/admin/login/")).status_code, 200)


class Commands(TransactionTestCase):
    def test_they_are_about_the_app_of_the_project(self) -> None:
        write.enqueue_sync("a")
        told = io.StringIO()
        with self.assertRaises(SystemExit):
            call_command("fairlane", "jobs", "show", "nonsense", stdout=told)
        call_command("fairlane", "version", stdout=told)
        self.assertIn("fairlane 0", told.getvalue())

    def test_without_a_command_all_are_listed(self) -> None:
        told = io.StringIO()
        call_command("fairlane", stdout=told)
        self.assertIn("Usage: manage.py fairlane", told.getvalue())
        self.assertIn("doctor", told.getvalue())

    def test_migrate_has_nothing_to_do_twice(self) -> None:
        told = io.StringIO()
        call_command("migrate", stdout=told)
        self.assertNotIn("Applying", told.getvalue())
        self.assertEqual(run_jobs(), [])

    def test_check_tells_of_a_setting_that_is_unknown(self) -> None:
        with (
            override_settings(FAIRLANE={"RETENTIONS": "1d"}),
            self.assertRaisesMessage(SystemCheckError, "did you mean 'RETENTION'?"),
        ):
            call_command("check")


class Settings(TransactionTestCase):
    def test_what_is_wrong_is_named_with_a_remedy(self) -> None:
        wrong: dict[str, Any] = {
            "write a dict": [],
            "known are URL, DATABASE": {"COLOUR": "red"},
            "write one of in_transaction, on_commit, at_once": {"ENQUEUE": "maybe"},
            "there are 'default'": {"DATABASE": "other"},
            "such as '/fairlane/'": {"DASHBOARD_URL": "fairlane"},
            "not a list of names": {"TASK_MODULES": "tasks"},
            "cannot be imported": {"CODEC": "no.such.codec"},
        }
        for told, given in wrong.items():
            with self.subTest(told), self.assertRaisesMessage(ConfigurationError, told):
                load_settings(given)

    def test_a_store_elsewhere_waits_for_the_commit_and_is_left_alone_by_tests(self) -> None:
        settings = load_settings({"URL": "postgresql://elsewhere/jobs"})
        self.assertEqual(settings.mode("postgresql://elsewhere/jobs"), "on_commit")
        self.assertEqual(settings.address(), "sqlite://")
