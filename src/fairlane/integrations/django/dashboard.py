"""The dashboard beside a Django site, in one ASGI application: staff of the site may see it."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from asgiref.sync import sync_to_async
from django.conf import settings as django_settings
from django.contrib.auth import get_user
from django.db import close_old_connections
from django.http import HttpRequest
from django.urls import NoReverseMatch, reverse
from django.utils.crypto import salted_hmac
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.routing import Mount
from starlette.types import ASGIApp, Receive, Scope, Send

from fairlane.dashboard import Role, Visitor, create_dashboard
from fairlane.dashboard.access import Authorize
from fairlane.errors import ConfigurationError
from fairlane.integrations.django.project import project_app

__all__ = ["staff_of", "with_dashboard"]


def with_dashboard(site: ASGIApp, *, authorize: Authorize | None = None) -> ASGIApp:
    """Django's ASGI application, and the dashboard at FAIRLANE['DASHBOARD_URL'].

    By Django's session, staff may look and superusers may act; others are sent to the admin's login. With `authorize`,
    that decides instead.
    """
    app = project_app()
    address = app.settings.dashboard_url
    if address is None:
        raise ConfigurationError("with_dashboard: no path is set; write FAIRLANE['DASHBOARD_URL'] = '/fairlane/'")
    # This token is never shown. It signs forms, and every process of the site derives it from Django's own secret.
    token = salted_hmac("fairlane.dashboard", "forms", algorithm="sha256").hexdigest()
    login_url = _login_of_the_admin() if authorize is None else None
    dashboard = create_dashboard(app, token=token, authorize=authorize or staff_of, login_url=login_url)
    mounted = Starlette(routes=[Mount(address.rstrip("/"), dashboard)])

    async def both(scope: Scope, receive: Receive, send: Send) -> None:
        is_ours = scope["type"] == "lifespan" or (scope["type"] == "http" and scope["path"].startswith(address))
        await (mounted if is_ours else site)(scope, receive, send)

    return both


def _login_of_the_admin() -> str | None:
    """The URL of the admin's login; `None` if the site has no admin."""
    try:
        login: str = reverse("admin:login")
        return login
    except NoReverseMatch:
        return None


async def staff_of(request: Request) -> Visitor | None:
    """The person who is logged in at Django's site, if they are staff."""
    return await sync_to_async(_staff_of)(request.cookies.get(django_settings.SESSION_COOKIE_NAME))


def _staff_of(session_key: str | None) -> Visitor | None:
    if not session_key:
        return None
    close_old_connections()
    try:
        asking = HttpRequest()
        asking.session = import_module(django_settings.SESSION_ENGINE).SessionStore(session_key)
        user: Any = get_user(asking)
        if not (user.is_active and user.is_staff):
            return None
        return Visitor(user.get_username(), Role.OPERATOR if user.is_superuser else Role.VIEWER)
    finally:
        close_old_connections()
