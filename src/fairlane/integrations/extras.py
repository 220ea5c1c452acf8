"""What an integration needs and a plain installation has not."""

from __future__ import annotations

from fairlane.errors import ConfigurationError


def missing(extra: str, error: ImportError) -> ConfigurationError:
    """What to say where the package of an integration is not installed."""
    return ConfigurationError(
        f"fairlane.integrations.{extra} needs {error.name}, not installed: pip install 'fairlane[{extra}]'"
    )
