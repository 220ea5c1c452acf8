"""A policy as people write it: what `fairlane policy show --json` prints, or less where defaults will do."""

from __future__ import annotations

from typing import Any

from fairlane.clock import microseconds
from fairlane.errors import ConfigurationError, FairlaneError
from fairlane.policy.adaptive import AdaptiveConcurrency
from fairlane.policy.breaker import Breaker
from fairlane.policy.policy import PRIORITY_STEP, Policy

__all__ = ["POLICY_EXAMPLE", "parse_policy"]

POLICY_EXAMPLE = '{"fair": {"by": "account"}, "limits": [{"kind": "concurrency", "max": 5, "by": "account"}]}'
_MISSHAPEN = (KeyError, TypeError, ValueError, AttributeError, OverflowError, RecursionError)


def parse_policy(document: dict[str, Any], source: str) -> Policy:
    """The policy that a document describes. `source` names it in errors."""
    try:
        policy = Policy.from_document(_whole(document))
        _refuse_unknown(document, policy)
        return policy
    except FairlaneError as error:
        raise ConfigurationError(f"{source}: {error}") from None
    except _MISSHAPEN as error:
        reason = f"{error} is missing" if isinstance(error, KeyError) else str(error)
        raise ConfigurationError(f"{source}: {reason}; a policy looks like {POLICY_EXAMPLE}") from None


def _whole(document: dict[str, Any]) -> dict[str, Any]:
    """A policy as it is stored, with the defaults for what was left out."""
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
    usual = {"adaptive": AdaptiveConcurrency, "breaker": Breaker}.get(document.get("kind", ""))
    defaults = usual().to_document() if usual else {"burst": None, "when_full": "signal"}
    whole = {**defaults, **document, "by": _names(document.get("by") or [])}
    # Stored times are whole microseconds; people write "1m".
    return {name: microseconds(value) if _is_time(name, value) else value for name, value in whole.items()}


def _is_time(name: str, value: object) -> bool:
    return isinstance(value, str) and name not in ("kind", "name", "when_full")


def _names(by: str | list[str]) -> list[str]:
    return [by] if isinstance(by, str) else list(by)
