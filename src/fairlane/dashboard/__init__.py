"""The dashboard: an ASGI app that runs by itself (`fairlane dashboard`) or mounted in another one."""

from importlib.util import find_spec

from fairlane.errors import ConfigurationError as _ConfigurationError

if _missing := [name for name in ("jinja2", "starlette") if find_spec(name) is None]:
    raise _ConfigurationError(
        f"the dashboard needs {' and '.join(_missing)}, not installed: pip install 'fairlane[dashboard]'"
    )

from fairlane.dashboard.access import Role, Visitor
from fairlane.dashboard.site import create_dashboard

__all__ = ["Role", "Visitor", "create_dashboard"]
