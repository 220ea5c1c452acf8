"""The dashboard: an ASGI app that runs by itself (`fairlane dashboard`) or mounted in another one."""

import fairlane.dashboard.extras  # noqa: F401 - says what to install, where something is missing
from fairlane.dashboard.access import Role, Visitor
from fairlane.dashboard.site import create_dashboard

__all__ = ["Role", "Visitor", "create_dashboard"]
