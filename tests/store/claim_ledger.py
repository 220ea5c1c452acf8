"""What claimers wrote down of their claims, outside the queue, held against what the database saw (`witness`).

A claimer notes what it is about to ask and what it was told. A claim that it was told of is one of two things. It was
*made*: the database has seen it begin, once. Or it is *lost*: the database knows nothing of it, and then a crash took
it, which came after it was asked for and before anything that began later was acknowledged as durable. A claim over
whose asking the database crashed may be either, and the database says which. Nothing else can be.

What was made ends as whoever settled it was told, or was reaped after its lease. What was lost ends nothing.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from uuid import UUID

from fairlane.job import State
from tests.store.witness import Move

__all__ = ["ClaimLedger", "Held", "Limits", "Token"]

Token = tuple[UUID, UUID]
"""A job and the lease under which it was claimed."""
Limits = tuple[int, int]
"""How many may run of one account, and of all."""

LANDS_AS = {
    "Done": {State.DONE},
    "Released": {State.READY, State.CANCELLED},
    "Failed": {State.SCHEDULED, State.CANCELLED},
}
"""What a job is after a settlement. (Whoever was asked to cancel goes on no more.)"""


@dataclass
class Held:
    """One claim of one job, as its claimer wrote it down. Instants are nanoseconds of the machine's own clock."""

    token: Token
    account: str
    asked: int
    got: int
    until: int
    """Its lease ends then, or later."""
    ended: int | None = None
    """When its claimer was about to settle it."""
    answered: int | None = None
    """When the settlement was answered; `None`: nobody was told whether it landed."""
    outcome: str = ""
    is_refused: bool = False

    @property
    def is_settled(self) -> bool:
        """It was acknowledged: durable from then on."""
        return self.answered is not None and not self.is_refused


@dataclass
class _Process:
    path: Path
    read: int = 0
    asked: int | None = None
    """Set while a claim is asked for."""
    settling: list[Held] = field(default_factory=list)
    claimed: int = 0
    """When it was last told of a claim."""


@dataclass
class ClaimLedger:
    lease: int
    """Nanoseconds for which a claim is held."""
    claims: int = 0
    """Calls that brought something."""
    asks: int = 0
    failures: int = 0
    """Calls that failed."""
    unheard: int = 0
    """Calls that may have been carried out although nobody heard of it."""
    held: dict[Token, Held] = field(default_factory=dict)
    crashes: list[int] = field(default_factory=list)
    """When the database crashed: everybody stood still, so that nothing was told at that time."""
    durable: list[tuple[int, int]] = field(default_factory=list)
    """What was acknowledged as durable: when it began, and when it was acknowledged."""
    _processes: dict[int, _Process] = field(default_factory=dict)
    _last_claim: int = 0
    _last_settling: int = 0

    def follow(self, process: int, path: Path) -> None:
        """A process has started, and writes there."""
        self._processes[process] = _Process(path)

    def leave(self, process: int) -> None:
        """It is dead."""
        self._read(self._processes[process])
        self.unheard += self._processes.pop(process).asked is not None

    def phase(self, process: int) -> str:
        """What a process that stands still is doing."""
        self._read(each := self._processes[process])
        return "claiming" if each.asked is not None else "settling" if each.settling else "at something else"

    def last_claimer(self) -> int:
        """The process that remembers most."""
        return max(self._processes, key=lambda each: self._processes[each].claimed)

    def read(self) -> None:
        """Take in what was written since."""
        for each in self._processes.values():
            self._read(each)

    def _read(self, process: _Process) -> None:
        if not process.path.exists():
            return  # it is not born yet
        with process.path.open("rb") as file:
            file.seek(process.read)
            # A line that a kill has cut short was never written.
            lines = file.read().rpartition(b"\n")[0]
        if lines:
            process.read += len(lines) + 1
            for line in lines.decode().split("\n"):
                at, *words = line.split()
                self._take(process, int(at), words)

    def _take(self, process: _Process, at: int, words: list[str]) -> None:
        match words:
            case ["asking"]:
                # If there was a settlement before, it has failed: nobody knows whether it landed.
                process.asked, process.settling = at, []
                self.asks += 1
            case ["claimed", lease, *jobs] if process.asked is not None:
                self.claims += 1
                process.claimed = at
                self._last_claim = max(self._last_claim, at)
                for each in jobs:
                    job, account = each.split(":")
                    token = (UUID(job), UUID(lease))
                    assert token not in self.held, "two claims of one job have one token"
                    self.held[token] = Held(token, account, process.asked, at, process.asked + self.lease)
                process.asked = None
            case ["nothing" | "failed" | "unanswered" as what]:
                process.asked = None
                self.failures += what != "nothing"
                self.unheard += what == "unanswered"
            case ["settling", *settlements]:
                self._last_settling = max(self._last_settling, at)
                for each in settlements:
                    job, lease, outcome = each.split(":")
                    held = self.held[UUID(job), UUID(lease)]
                    held.ended, held.outcome = at, outcome
                    process.settling.append(held)
            case ["settled", *refused]:
                for held in process.settling:
                    held.answered, held.is_refused = at, str(held.token[0]) in refused
                    if held.is_settled and held.ended is not None:
                        self.durable.append((held.ended, at))
                process.settling = []
            case _:
                raise AssertionError(f"{process.path.name}: {words}")

    def has_tail(self) -> bool:
        """Somebody has claimed since anybody last began to settle: perhaps that is not flushed yet."""
        return self._last_claim > self._last_settling

    def settled(self) -> set[Token]:
        """What was acknowledged to have ended."""
        return {each.token for each in self.held.values() if each.is_settled}

    def check(self, moves: Sequence[Move], accounts: Mapping[UUID, str], limits: Callable[[str], Limits]) -> Account:
        """All that claimers wrote down, and all that the database saw, is one story. `limits` reads a policy; the first
        move is to be one."""
        self.read()
        life = _replayed(moves, accounts, limits)
        crashes = _Crashes(self.crashes, self.durable)
        lost = {each.token: crashes.that_lost(each) for each in self.held.values() if each.token not in life}
        for token, crash in lost.items():
            assert crash is not None, f"{self.held[token]} was handed out and never made, and no crash can have lost it"
            assert not self.held[token].is_settled, f"{self.held[token]} was lost, and its settlement applied"
        for token, end in life.items():
            assert end is not None, f"{token} runs for ever"
            if token in self.held:
                self._check_end(self.held[token], end)
            else:
                assert end.is_reaped, f"nobody was told of {token}, and somebody has settled it: {end}"
        self._check_done()
        self._check_at_once(lost, limits(moves[0].policy or ""))
        unheard = {lease for _, lease in life.keys() - self.held.keys()}
        assert len(unheard) <= self.unheard, (
            f"{len(unheard)} claims were made and told to nobody, and only {self.unheard} calls went unanswered"
        )
        over = [each.token in life for each in self.held.values() if crashes.over(each)]
        return Account(
            lost=len(lost),
            asked_over_and_lost=over.count(False),
            asked_over_and_made=over.count(True),
            unheard=len(unheard),
            refused=sum(each.is_refused for each in self.held.values()),
            reaped=sum(end is not None and end.is_reaped for end in life.values()),
        )

    def _check_end(self, held: Held, end: Move) -> None:
        """Of a claim that was made: how the database saw it end, and what its claimer was told."""
        if end.is_reaped:
            assert not held.is_settled, f"{held} was settled, and then reaped: its end was lost"
            if held.is_refused and held.answered is not None:
                assert held.answered >= held.until, f"{held} was held, and is refused"
            return
        assert held.ended is not None, f"{held} has ended, and nobody has settled it: {end}"
        assert not held.is_refused, f"{held} is refused, and has landed: {end}"
        assert State(end.state or 0) in LANDS_AS[held.outcome], f"{held} has become {end}"

    def _check_done(self) -> None:
        """Done is done once, and never claimed again."""
        done: dict[UUID, Held] = {}
        for each in self.held.values():
            if each.is_settled and each.outcome == "Done":
                assert each.token[0] not in done, f"{each} is done a second time"
                done[each.token[0]] = each
        for each in self.held.values():
            first = done.get(each.token[0])
            assert first is None or first.answered is None or each.asked < first.answered, f"{each} was done before"

    def _check_at_once(self, lost: Mapping[Token, int | None], limits: Limits) -> None:
        """By the clock of the claimers: nobody holds what somebody else holds, and no limit is exceeded.

        A claim is held from when its claimer had it in hand until just before it was settled, or until its lease ended,
        or until it was lost: never longer than the database held it.
        """
        of_job: defaultdict[object, list[tuple[int, int]]] = defaultdict(list)
        of_account: defaultdict[object, list[tuple[int, int]]] = defaultdict(list)
        of_all: list[tuple[int, int]] = []
        for held in self.held.values():
            end = min(each for each in (held.until, held.ended, lost.get(held.token)) if each is not None)
            if end > held.got:
                for edges in (of_job[held.token[0]], of_account[held.account], of_all):
                    edges += [(held.got, 1), (end, -1)]
        assert max(map(_highest, of_job.values())) == 1, "a job was held twice"
        assert max(map(_highest, of_account.values())) <= limits[0], "an account was over its limit"
        assert _highest(of_all) <= limits[1], "the queue was over its limit"


@dataclass(frozen=True)
class Account:
    """What became of the claims that were not simply made, told and settled."""

    lost: int
    asked_over_and_lost: int
    asked_over_and_made: int
    """The database crashed while they were asked for."""
    unheard: int
    """Made, and told to nobody."""
    refused: int
    reaped: int


class _Crashes:
    """Which crash may have lost what."""

    def __init__(self, crashes: Sequence[int], durable: Iterable[tuple[int, int]]) -> None:
        self._crashes = sorted(crashes)
        self._began: list[int] = []
        """When the last thing began that was durable at each crash."""
        acknowledged = sorted((acknowledged, began) for began, acknowledged in durable)
        latest, at = 0, 0
        for crash in self._crashes:
            while at < len(acknowledged) and acknowledged[at][0] <= crash:
                latest, at = max(latest, acknowledged[at][1]), at + 1
            self._began.append(latest)

    def that_lost(self, held: Held) -> int | None:
        """The crash that can have lost it, if there is one."""
        if (over := self.over(held)) is not None:
            return over
        at = bisect_right(self._crashes, held.got)
        # Whatever is flushed flushes all that was committed before it began.
        return self._crashes[at] if at < len(self._crashes) and self._began[at] <= held.got else None

    def over(self, held: Held) -> int | None:
        """The crash over which it was asked for."""
        at = bisect_right(self._crashes, held.asked)
        return self._crashes[at] if at < bisect_right(self._crashes, held.got) else None


def _replayed(
    moves: Sequence[Move], accounts: Mapping[UUID, str], limits: Callable[[str], Limits]
) -> dict[Token, Move | None]:
    """Every claim that was made, and how it ended; at no start is a limit exceeded that is in force."""
    life: dict[Token, Move | None] = {}
    running: dict[UUID, UUID] = {}
    by_account: Counter[str] = Counter()
    per_account = total = 0
    for move in moves:
        if move.policy is not None:
            per_account, total = limits(move.policy)
        if move.job is None:
            continue
        account = accounts[move.job]
        if move.ended is not None:
            assert running.pop(move.job, None) == move.ended, f"{move} ends what does not run"
            by_account[account] -= 1
            life[move.job, move.ended] = move
        if move.began is not None:
            assert move.job not in running, f"{move} starts what runs"
            token = (move.job, move.began)
            assert token not in life, f"{move} starts a second time under one token"
            running[move.job], life[token] = move.began, None
            by_account[account] += 1
            assert by_account[account] <= per_account, f"{move}: {by_account[account]} of account {account} run"
            assert len(running) <= total, f"{move}: {len(running)} run, and {total} may"
    return life


def _highest(moments: list[tuple[int, int]]) -> int:
    count = highest = 0
    # Ends come before starts at the same instant: what ended then did not overlap.
    for _, change in sorted(moments):
        count += change
        highest = max(highest, count)
    return highest
