"""What the dashboard needs and a plain installation has not."""

from __future__ import annotations

from importlib.util import find_spec

from fairlane.errors import ConfigurationError

_missing = [name for name in ("jinja2", "starlette") if find_spec(name) is None]
if _missing:
    raise ConfigurationError(
        f"the dashboard needs {' and '.join(_missing)}, not installed: pip install 'fairlane[dashboard]'"
    )
