"""A policy from a file: what `fairlane policy show --json` prints, or less where defaults will do."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from fairlane.errors import ConfigurationError

if TYPE_CHECKING:
    from fairlane.policy.policy import Policy

__all__ = ["read_bytes", "read_policy"]


def read_bytes(option: str, path: str) -> bytes:
    """What a file holds, or an error that names the option."""
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ConfigurationError(f"{option} {path}: {error.strerror or error}") from None


def read_policy(option: str, path: str) -> Policy:
    """The policy that a file holds."""
    import msgspec

    from fairlane.policy.documents import POLICY_EXAMPLE, parse_policy

    try:
        found = msgspec.json.decode(read_bytes(option, path))
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigurationError(
            f"{option} {path}: this is not JSON ({error}); a policy looks like {POLICY_EXAMPLE}"
        ) from None
    if isinstance(found, list) and len(found) == 1:
        found = found[0]
    if not isinstance(found, dict):
        what = f"{len(found)} policies" if isinstance(found, list) else f"a {type(found).__name__}"
        raise ConfigurationError(f"{option} {path}: this holds {what}, not one policy such as {POLICY_EXAMPLE}")
    return parse_policy(found, f"{option} {path}")
