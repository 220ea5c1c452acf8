"""A policy as people write and read it: as JSON with or without what goes without saying, and in sentences."""

from __future__ import annotations

import json
from typing import Any

from fairlane.clock import SECOND, duration_text, microseconds
from fairlane.errors import ConfigurationError, FairlaneError
from fairlane.policy.adaptive import AdaptiveConcurrency
from fairlane.policy.backlog import Backlog
from fairlane.policy.breaker import Breaker
from fairlane.policy.gates import Limit
from fairlane.policy.keys import By
from fairlane.policy.limits import Concurrency, Rate
from fairlane.policy.policy import PRIORITY_STEP, WEIGHT, BoundLimit, Policy
from fairlane.policy.sequence import Sequence

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
        "limits": [_read_limit(each) for each in document.get("limits", [])],
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


def _read_limit(document: dict[str, Any]) -> dict[str, Any]:
    usual = {"adaptive": AdaptiveConcurrency, "breaker": Breaker}.get(document.get("kind", ""))
    defaults = usual().to_document() if usual else {"burst": None, "when_full": "signal"}
    whole = {**defaults, **document, "by": _names(document.get("by") or [])}
    # Stored times are whole microseconds; people write "1m".
    return {name: microseconds(value) if _reads_time(name, value) else value for name, value in whole.items()}


def _reads_time(name: str, value: object) -> bool:
    return isinstance(value, str) and name not in ("kind", "name", "when_full")


def _names(by: str | list[str]) -> list[str]:
    return [by] if isinstance(by, str) else list(by)


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


def policy_words(policy: Policy) -> list[str]:
    """What it does, a sentence for each part; the order of jobs first."""
    return [_order(policy), *(_described_limit(bound) for bound in policy.bound), *_partitions(policy)]


def _order(policy: Policy) -> str:
    fair = policy.fair
    if fair is None:
        return "First come, first served, higher priorities with a head start."
    charged = "for the time its jobs run" if fair.charge == "time" else "for each job, however long it runs"
    weights = ", by weight" if policy.brought.get(WEIGHT) or fair.weights else ""
    return f"Every {_described_by(fair.by)} gets its turn{weights}, charged {charged}."


def _described_limit(bound: BoundLimit) -> str:
    limit = bound.limit
    where = f"for each {_described_by(limit.by)}" if limit.by else "in the whole queue"
    shared = f", shared by all queues that name {limit.name!r}" if limit.name is not None else ""
    match limit:
        case Concurrency() if bound.from_job is not None:
            return f"As many at the same time {where} as its jobs say{shared}."
        case Concurrency() if bound.named is not None:
            return f"At the same time {where}: {_numbers(limit.named)}{shared}."
        case Concurrency():
            return f"At most {limit.max:,} at the same time {where}{shared}."
        case Rate() if bound.from_job is not None or bound.named is not None:
            said = "as its jobs say" if bound.named is None else _numbers(limit.named)
            return f"So many starts per {_time(limit.per)} {where}: {said}{shared}."
        case Rate(rolling=True):
            return f"Never more than {limit.limit:g} starts within any {_time(limit.per)} {where}{shared}."
        case Rate():
            return f"At most {limit.limit:g} starts per {_time(limit.per)} {where}, {limit.burst:g} at once{shared}."
        case AdaptiveConcurrency():
            return f"A cap that learns, from {limit.min:,} to {limit.max:,} at the same time {where}."
        case Breaker():
            cooldown = _time(limit.cooldown)
            return f"Stops {where} after {limit.failures} failures in a row; probes again after {cooldown}."
        case Sequence():
            return f"Strictly one after the other {where}."
        case Backlog():
            full = "more are refused" if limit.when_full == "reject" else "producers are told"
            return f"At most {limit.max:,} may wait {where}; beyond that {full}."
        case _:
            return f"{limit!r}."


def _partitions(policy: Policy) -> list[str]:
    place = policy.partition
    if place is None or place.width < 2:
        return []
    by = f" by {_described_by(place.by)}" if place.by else ""
    return [f"Divided into {place.width} partitions{by}."]


def _described_by(by: By) -> str:
    return " and ".join(by)


def _numbers(named: object) -> str:
    items = dict(named).items() if named else ()  # type: ignore[call-overload]  # a mapping, or pairs
    return ", ".join(f"{value:g} for {key}" for key, value in items)


def _time(microseconds: int) -> str:
    seconds = microseconds / SECOND
    for size, unit in ((86_400, "day"), (3_600, "hour"), (60, "minute"), (1, "second")):
        if seconds >= size and seconds % size == 0:
            count = int(seconds // size)
            return unit if count == 1 else f"{count} {unit}s"
    return f"{seconds:g} seconds"
