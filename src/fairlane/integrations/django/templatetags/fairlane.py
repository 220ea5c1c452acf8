"""The link from Django's admin to the dashboard."""

from __future__ import annotations

from typing import Any

from django.utils.html import format_html

from django import template
from fairlane.integrations.django.project import project_app

register = template.Library()


@register.simple_tag(takes_context=True)
def fairlane_dashboard(context: Any) -> str:
    """A link, for those who are let in there, and where the dashboard is mounted at all."""
    user, address = context.get("user"), project_app().settings.dashboard_url
    if not address or user is None or not (user.is_active and user.is_staff):
        return ""
    return str(
        format_html(
            '<div class="module" id="fairlane"><p><a href="{}">Fairlane: queues and jobs</a></p></div>', address
        )
    )
