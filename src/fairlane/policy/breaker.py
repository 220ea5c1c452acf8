"""A breaker: after failures in a row it lets nothing through, then a few to try, and closes once these go well.

    closed ──failures in a row──▶ open ──cooldown over──▶ probing ──every probe good──▶ closed
                                   ▲                         │
                                   └────────a probe fails────┘

Lane events may come in any order and late, so runs are told apart by when they were claimed. A failure counts unless a
run that was claimed no earlier has gone well. What was claimed before the first probe says nothing about what the
probes are to find out: it neither closes the breaker nor keeps it open.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import assert_never

import msgspec

from fairlane.clock import SECOND, Instant, duration_text
from fairlane.parameters import known_options, shown
from fairlane.policy.gates import GateState, Reason, Release, Why
from fairlane.policy.keys import By, normalize_by, repr_by
from fairlane.policy.limits import UNBOUNDED, Limit, checked_count, duration_above_zero, time_words

MOST_FAILURES = 100
"""The gate keeps when each of them was claimed."""

REMEMBERED = 24 * 3_600 * SECOND
"""How long a breaker that has opened waits for somebody to probe, before it is forgotten and so closed."""


class Closed(msgspec.Struct, frozen=True, tag="closed"):
    """All may pass."""

    failures: tuple[Instant, ...] = ()
    """When those were claimed that have failed in a row."""
    good: Instant = -1
    """When the newest run that went well was claimed."""


class Opened(msgspec.Struct, frozen=True, tag="open"):
    """Nothing may pass for a time."""

    until: Instant


class Probing(msgspec.Struct, frozen=True, tag="probing"):
    """A few may pass, to find out."""

    since: Instant
    stragglers: int
    """Claims in flight that are older than the first probe, at least."""
    good: int = 0
    """Probes that went well, at least."""


State = Closed | Opened | Probing


@known_options
@dataclass(frozen=True, slots=True, init=False)
class Breaker(Limit):
    """Stops a key after so many failures in a row, and lets `probes` jobs try after each `cooldown`.

    >>> Breaker(5, cooldown="30s", by="endpoint")
    Breaker(5, within='10m', cooldown='30s', probes=1, by='endpoint')
    """

    failures: int
    within: int
    cooldown: int
    probes: int
    by: By

    kind = "breaker"
    times = frozenset({"within", "cooldown"})
    is_learning = True
    is_held_by_runs = False

    def __init__(
        self,
        failures: int = 5,
        *,
        within: timedelta | str | float = "10m",
        cooldown: timedelta | str | float = "30s",
        probes: int = 1,
        by: str | tuple[str, ...] | None = None,
    ) -> None:
        what = f"Breaker({shown(failures)})"
        self._set(
            failures=checked_count(what, "failures", failures, most=MOST_FAILURES),
            within=duration_above_zero(what, "within", within),
            cooldown=duration_above_zero(what, "cooldown", cooldown),
            probes=checked_count(what, "probes", probes, reason="without a probe it would stay open"),
            by=normalize_by(what, by),
        )

    def __repr__(self) -> str:
        within, cooldown = duration_text(self.within), duration_text(self.cooldown)
        parts = f"within={within!r}, cooldown={cooldown!r}, probes={self.probes}"
        return f"Breaker({self.failures}, {parts}{repr_by(self.by)})"

    def state_of(self, gate: GateState) -> State:
        """Whether this gate is closed, open or probing."""
        state: State = Closed() if gate.memo is None else msgspec.convert(gate.memo, State)
        return state

    def room_at(self, gate: GateState, now: Instant) -> int:
        if gate.memo is None or gate.memo["type"] == "closed":
            return UNBOUNDED
        match self.state_of(gate):
            case Probing(stragglers=stragglers, good=good):
                return max(0, self.probes - good - (gate.in_flight - stragglers))
            case Opened(until=until):
                return self.probes if now >= until else 0
            case _:
                return UNBOUNDED

    def take(self, gate: GateState, now: Instant, count: int) -> None:
        # Before that time only an operator starts a job: it is counted, and finds nothing out.
        if gate.memo is not None and gate.memo["type"] == "open" and now >= gate.memo["until"]:
            self._turn(gate, Probing(now, stragglers=gate.in_flight), now)
        gate.in_flight += count

    def free(self, gate: GateState, ending: Release, now: Instant, held: int | None, task: str | None) -> bool:
        Limit.free(self, gate, ending, now, held, task)
        before = self.state_of(gate)
        after = self.after(before, ending, now, gate.in_flight)
        if after != before:
            self._turn(gate, after, now)
        return True

    def after(self, state: State, ending: Release, now: Instant, in_flight: int) -> State:
        """Where it stands once these claims have ended, which leaves so many in flight."""
        match _not_ahead(state, now):
            case Closed() as closed:
                return self._counted(closed, ending, now) if ending.ended > ending.neutral else closed
            case Probing(since=since) if ending.failed and ending.latest >= since:
                return Opened(now + self.cooldown)
            case Probing() as probing:
                return self._probed(probing, ending, in_flight)
            case Opened() as opened:
                # Whatever ends now was claimed before it opened.
                return opened
            case other:
                assert_never(other)

    def _counted(self, closed: Closed, ending: Release, now: Instant) -> State:
        good, failures = closed.good, closed.failures
        if ending.failed:
            failures = tuple(sorted((*failures, *[ending.latest] * min(ending.failed, self.failures))))
        else:
            good = max(good, ending.latest)
        newest = max(failures, default=0)
        failures = tuple(at for at in failures if at > good and at >= newest - self.within)[-self.failures :]
        if len(failures) >= self.failures:
            return Opened(now + self.cooldown)
        return Closed(failures, good)

    def _probed(self, probing: Probing, ending: Release, in_flight: int) -> State:
        # Where a lane event cannot tell who ended, it is taken to be a straggler: that never lets one too many try.
        left, passed = probing.stragglers, 0
        if ending.unstarted and ending.since < probing.since:
            left -= min(left, ending.unstarted)
        if ending.latest >= probing.since:
            old = min(left, ending.ended - 1)
            left -= old
            passed = max(0, ending.ended - old - ending.neutral)
        else:
            left -= ending.ended
        if probing.good + passed >= self.probes:
            return Closed(good=ending.latest)
        return Probing(probing.since, min(max(0, left), in_flight), probing.good + passed)

    def _turn(self, gate: GateState, state: State, now: Instant) -> None:
        gate.memo = msgspec.to_builtins(state)
        match state:
            case Closed(failures=failures):
                gate.tat = now + self.within if failures else now
            case Opened(until=until):
                gate.tat = until + REMEMBERED
            case Probing():
                gate.tat = now + REMEMBERED

    def opens_again_at(self, gate: GateState) -> Instant | None:
        state = self.state_of(gate)
        # Where it is probing, the probes decide.
        return state.until if isinstance(state, Opened) else None

    def carry_over(self, gate: GateState, now: Instant) -> None:
        """An open breaker opens for probes no later than if it had just opened."""
        match self.state_of(gate):
            case Opened(until=until):
                self._turn(gate, Opened(min(until, now + self.cooldown)), now)
            case Probing(since=since, good=good) if good >= self.probes:
                # Fewer probes are asked for now, and these have gone well: nobody else will come to say so.
                self._turn(gate, Closed(good=since), now)

    def why(self, gate: GateState, now: Instant) -> Why:
        state = self.state_of(gate)
        if isinstance(state, Probing):
            out, left = gate.in_flight - state.stragglers, self.probes - state.good
            return Why(Reason.BREAKER, out, left, "probes run; it closes once all go well")
        return Why(Reason.BREAKER, self.failures, self.failures, "runs failed in a row; then it probes")

    def describe(self, where: str) -> str:
        return f"Stops {where} after {self.failures} failures in a row; probes again after {time_words(self.cooldown)}"


def _not_ahead(state: State, now: Instant) -> State:
    """A clock that was set back must not turn all that follows into old news."""
    match state:
        case Closed(failures=failures, good=good) if good > now or max(failures, default=now) > now:
            return Closed(tuple(min(at, now) for at in failures), min(good, now))
        case Probing(since=since) if since > now:
            return msgspec.structs.replace(state, since=now)
        case _:
            return state
