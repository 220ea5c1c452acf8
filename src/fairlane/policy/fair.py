"""Whose turn it is: start-time fair queueing between the flows of a queue."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Never

from fairlane.errors import InvalidPolicy
from fairlane.parameters import known_options, shown
from fairlane.policy.gates import FROM_JOB, FromJob, Source, from_job
from fairlane.policy.keys import By, normalize_by
from fairlane.policy.limits import is_number, named_numbers

Charge = Literal["time", "count"]


@known_options
@dataclass(frozen=True, slots=True, init=False)
class Fair:
    """Turns go round between the values of a key, charged by run time (or by count), in proportion to weights.

    >>> Fair(by="account", weight={"acme": 3})
    Fair(by='account', weight={'acme': 3}, charge='time')
    """

    by: By
    weight: float
    weights: Mapping[str, float] = field(hash=False)
    charge: Charge
    from_job: FromJob | None

    def __init__(
        self,
        *_misplaced: Never,
        by: str | tuple[str, ...] = (),
        weight: float | Mapping[str, float] | Source | FromJob = 1.0,
        charge: Charge = "time",
    ) -> None:
        if _misplaced:
            raise InvalidPolicy(f"Fair({shown(_misplaced[0])}): name the key, as in Fair(by={shown(_misplaced[0])})")
        what = f"Fair(by={shown(by)})"
        names = normalize_by(what, by)
        if not names:
            raise InvalidPolicy(f"{what}: name the key whose values take turns, such as by='account'")
        if charge not in ("time", "count"):
            raise InvalidPolicy(f"{what}: charge={shown(charge)} is unknown; use 'time' or 'count'")
        brought, default = from_job(weight), 1.0
        named: dict[str, float] = {}
        if isinstance(weight, Mapping) and brought is None:
            if weight:
                named = named_numbers(f"{what}: weight", names, weight, lambda each: checked_weight(what, each))
        elif brought is None:
            default = checked_weight(what, weight)
        for name, value in (("by", names), ("weight", default), ("weights", named), ("charge", charge)):
            object.__setattr__(self, name, value)
        object.__setattr__(self, "from_job", brought)

    def __repr__(self) -> str:
        by = repr(self.by[0] if len(self.by) == 1 else self.by)
        weight = self.from_job or dict(self.weights) or (f"{self.weight:g}" if self.weight != 1 else None)
        return f"Fair(by={by}{f', weight={weight}' if weight else ''}, charge={self.charge!r})"

    def weight_of(self, values: tuple[str | None, ...]) -> float:
        """The weight of the flow of these key values, as long as no job has brought another."""
        return self.weight if values[0] is None else self.weights.get(values[0], self.weight)

    def to_document(self) -> dict[str, Any]:
        """What is stored; `from_document` reads it back."""
        weight = FROM_JOB if self.from_job else self.weight
        return {"by": list(self.by), "weight": weight, "weights": dict(self.weights), "charge": self.charge}

    @classmethod
    def from_document(cls, document: Mapping[str, Any]) -> Fair:
        """What is stored, or what people wrote: see `written`."""
        weight = document.get("weights") or document.get("weight", 1.0)
        return cls(by=document["by"], weight=weight, charge=document.get("charge", "time"))

    def written(self) -> dict[str, Any]:
        """Its document as people write it: without defaults."""
        whole, usual = self.to_document(), {"weight": 1.0, "weights": {}, "charge": "time"}
        said = {name: part for name, part in whole.items() if part != usual.get(name)}
        return {**said, "by": self.by[0] if len(self.by) == 1 else list(self.by)}

    def describe(self) -> str:
        """One sentence about what it does, without the full stop."""
        charged = "for the time its jobs run" if self.charge == "time" else "for each job, however long it runs"
        weights = ", by weight" if self.from_job or self.weights else ""
        return f"Every {' and '.join(self.by)} gets its turn{weights}, charged {charged}"


def is_weight(number: float) -> bool:
    return 1e-6 <= number <= 1e6


def checked_weight(what: str, weight: object) -> float:
    """A weight as it may be given; `what` names the policy in errors."""
    if not is_number(weight):
        raise InvalidPolicy(f"{what}: a weight is a number above 0, not {shown(weight)}")
    if not is_weight(weight):
        raise InvalidPolicy(
            f"{what}: a weight lies between 0.000001 and 1,000,000, not {shown(weight)}; "
            "Concurrency(0, by=…) stops a key"
        )
    return weight
