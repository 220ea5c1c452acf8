"""A policy as people would write it: what `reading` reads back, without what goes without saying."""

from __future__ import annotations

import json
from typing import Any

from fairlane.clock import duration_text
from fairlane.policy.adaptive import AdaptiveConcurrency
from fairlane.policy.breaker import Breaker
from fairlane.policy.gates import Limit
from fairlane.policy.policy import PRIORITY_STEP, Policy

__all__ = ["policy_text", "written_policy"]

_TIMES = {"per", "target", "within", "cooldown"}
_FAIR = {"weight": 1.0, "weights": {}, "charge": "time"}


def written_policy(policy: Policy) -> dict[str, Any]:
    """A document of what is not the default. Its queue and its partitions are left out."""
    document: dict[str, Any] = {}
    if policy.fair is not None:
        fair = policy.fair.to_document()
        others = {name: fair[name] for name, usual in _FAIR.items() if fair[name] != usual}
        document["fair"] = {"by": _by(fair["by"]), **others}
    if policy.limits:
        document["limits"] = [_limit(each) for each in policy.limits]
    if policy.keys:
        document["keys"] = list(policy.keys)
    if policy.priority_step != PRIORITY_STEP:
        document["priority_step"] = policy.priority_step
    return document


def policy_text(policy: Policy) -> str:
    """The same as JSON, a line for each limit."""
    parts = []
    for name, value in written_policy(policy).items():
        if name == "limits":
            lines = ",\n".join(f"    {_json(each)}" for each in value)
            parts.append(f'  "limits": [\n{lines}\n  ]')
        else:
            parts.append(f"  {_json(name)}: {_json(value)}")
    return "{\n" + ",\n".join(parts) + "\n}\n" if parts else "{}\n"


def _limit(limit: Limit) -> dict[str, Any]:
    whole = limit.to_document()
    usual = {"adaptive": AdaptiveConcurrency, "breaker": Breaker}.get(whole["kind"])
    defaults: dict[str, Any] = (
        {**usual().to_document(), "kind": None} if usual else {"burst": None, "when_full": "signal", "by": []}
    )
    if whole.get("burst") == whole.get("limit"):
        defaults["burst"] = whole.get("burst")
    said = {name: value for name, value in whole.items() if name not in defaults or value != defaults[name]}
    by = said.pop("by", [])
    document = {name: duration_text(value) if _is_time(name, value) else value for name, value in said.items()}
    return {**document, "by": _by(by)} if by else document


def _is_time(name: str, value: object) -> bool:
    return name in _TIMES and isinstance(value, int) and value >= 0


def _by(names: list[str]) -> str | list[str]:
    return names[0] if len(names) == 1 else names


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)
