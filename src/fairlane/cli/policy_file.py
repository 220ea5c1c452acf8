"""A policy from a file: what `fairlane policy show --json` prints, or less where defaults will do."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from fairlane.clock import microseconds
from fairlane.errors import ConfigurationError, FairlaneError

if TYPE_CHECKING:
    from fairlane.policy.policy import Policy

__all__ = ["read_bytes", "read_policy"]

EXAMPLE = '{"fair": {"by": "account"}, "limits": [{"kind": "concurrency", "max": 5, "by": "account"}]}'


def read_bytes(option: str, path: str) -> bytes:
    """What a file holds, or an error that names the option."""
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ConfigurationError(f"{option} {path}: {error.strerror or error}") from None


def read_policy(option: str, path: str) -> Policy:
    """The policy that a file holds."""
    import msgspec

    from fairlane.policy.policy import Policy

    try:
        found = msgspec.json.decode(read_bytes(option, path))
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigurationError(
            f"{option} {path}: this is not JSON ({error}); a policy looks like {EXAMPLE}"
        ) from None
    if isinstance(found, list) and len(found) == 1:
        found = found[0]
    if not isinstance(found, dict):
        what = f"{len(found)} policies" if isinstance(found, list) else f"a {type(found).__name__}"
        raise ConfigurationError(f"{option} {path}: this holds {what}, not one policy such as {EXAMPLE}")
    try:
        policy = Policy.from_document(_whole(found))
        _refuse_unknown(found, policy)
        return policy
    except FairlaneError as error:
        raise ConfigurationError(f"{option} {path}: {error}") from None
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        reason = f"{error} is missing" if isinstance(error, KeyError) else str(error)
        raise ConfigurationError(f"{option} {path}: {reason}; a policy looks like {EXAMPLE}") from None


def _whole(document: dict[str, Any]) -> dict[str, Any]:
    """A policy as it is stored, with the defaults for what was left out."""
    from fairlane.policy.policy import PRIORITY_STEP

    fair = document.get("fair")
    return {
        "queue": document.get("queue", "simulated"),
        "fair": fair and {"weight": 1.0, "weights": {}, "charge": "time", **fair, "by": _names(fair["by"])},
        "limits": [_limit(each) for each in document.get("limits", [])],
        "keys": _names(document.get("keys", [])),
        "priority_step": document.get("priority_step", PRIORITY_STEP),
    }


def _refuse_unknown(document: dict[str, Any], policy: Policy) -> None:
    """A field that nobody reads is a mistake: what would be tried is not what was meant."""
    # What `policy show --json` says besides.
    told = {"version", "declared", "overrides", "drift"}
    unknown = sorted({*document} - {*policy.to_document()} - told)
    for given, limit in zip(document.get("limits", []), policy.limits, strict=True):
        unknown += [f"{name} (of {given['kind']})" for name in sorted({*given} - {*limit.to_document(), "burst"})]
    if unknown:
        raise ConfigurationError(f"a policy has no field {unknown[0]}; fields are {', '.join(policy.to_document())}")


def _limit(document: dict[str, Any]) -> dict[str, Any]:
    from fairlane.policy.adaptive import AdaptiveConcurrency
    from fairlane.policy.breaker import Breaker

    usual = {"adaptive": AdaptiveConcurrency, "breaker": Breaker}.get(document.get("kind", ""))
    defaults = usual().to_document() if usual else {"burst": None}
    whole = {**defaults, **document, "by": _names(document.get("by") or [])}
    # Stored times are whole microseconds; people write "1m".
    return {name: microseconds(value) if _is_time(name, value) else value for name, value in whole.items()}


def _is_time(name: str, value: object) -> bool:
    return isinstance(value, str) and name not in ("kind", "name")


def _names(by: str | list[str]) -> list[str]:
    return [by] if isinstance(by, str) else list(by)
