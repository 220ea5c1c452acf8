"""What claimers wrote down of their claims, outside the queue: one file each, appended to before and after every call.

A claim is held from when the claimer had it in hand until just before it was settled, or until its lease ended: never
longer than the database holds it. A crash of the database loses claims that were not flushed; whoever wrote those down
holds them until the crash, and no longer. So limits are checked exactly, with what a crash may hand out again.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from uuid import UUID

__all__ = ["ClaimLedger", "Held", "Token"]

Token = tuple[UUID, UUID]
"""A job and the lease under which it was claimed."""


@dataclass
class Held:
    """One claim of one job, as its claimer wrote it down. Instants are nanoseconds of the machine's own clock."""

    token: Token
    account: str
    asked: int
    got: int
    until: int
    """When it was certainly held no longer: its lease's end, or earlier."""
    ended: int | None = None
    """When its claimer was about to settle it."""
    answered: int | None = None
    """When the settlement was answered; `None`: nobody knows whether it landed."""
    outcome: str = ""
    is_refused: bool = False
    lost_at: int | None = None
    """The crash of the database that lost it."""
    asked_over: int | None = None
    """A crash while it was asked for: it was handed out before, and lost, or after. Its settlement tells."""

    @property
    def end(self) -> int:
        is_held = self.answered is not None and not self.is_refused
        asked_over = None if is_held else self.asked_over
        return min(each for each in (self.until, self.ended, self.lost_at, asked_over) if each is not None)

    @property
    def is_done(self) -> bool:
        """The database has acknowledged that it is done."""
        return self.outcome == "Done" and self.answered is not None and not self.is_refused


@dataclass
class ClaimLedger:
    folder: Path
    lease: int
    """Nanoseconds for which a claim is held."""
    claims: int = 0
    """Calls that brought something."""
    held: dict[Token, Held] = field(default_factory=dict)
    crashes: list[tuple[int, set[Token]]] = field(default_factory=list)
    """When the database crashed, and what it held to run after that."""
    _read: dict[Path, int] = field(default_factory=dict)
    _asked: dict[Path, list[Held]] = field(default_factory=dict)

    def read(self) -> None:
        """Take in what was written since. A line that a kill has cut short was never written."""
        for path in sorted(self.folder.iterdir()):
            with path.open("rb") as file:
                file.seek(self._read.get(path, 0))
                lines = file.read().rpartition(b"\n")[0]
            if lines:
                self._read[path] = self._read.get(path, 0) + len(lines) + 1
                for line in lines.decode().split("\n"):
                    self._take(path, line.split())

    def _take(self, path: Path, words: list[str]) -> None:
        match words:
            case ["claimed", asked, got, lease, *jobs]:
                self.claims += 1
                for each in jobs:
                    job, account = each.split(":")
                    token = (UUID(job), UUID(lease))
                    assert token not in self.held, "two claims of one job have one token"
                    self.held[token] = Held(token, account, int(asked), int(got), int(asked) + self.lease)
                    for crash in self.crashes:
                        self._crash(self.held[token], *crash)
            case ["settling", at, *settlements]:
                self._asked[path] = []
                for each in settlements:
                    job, lease, outcome = each.split(":")
                    held = self.held[UUID(job), UUID(lease)]
                    held.ended, held.outcome = int(at), outcome
                    self._asked[path].append(held)
            case ["settled", at, *refused]:
                for held in self._asked.pop(path):
                    held.answered = int(at)
                    held.is_refused = str(held.token[0]) in refused
            case _:
                raise AssertionError(f"{path.name}: {words}")

    def has_tail(self) -> bool:
        """Somebody has claimed since anybody last began to settle: perhaps that is not flushed yet."""
        flushed = max((each.ended for each in self.held.values() if each.ended is not None), default=0)
        return any(each.got > flushed for each in self.held.values())

    def crash(self, at: int, running: set[Token]) -> None:
        """The database has crashed, while nobody went on, and says what runs."""
        self.read()
        self.crashes.append((at, running))
        for each in self.held.values():
            self._crash(each, at, running)

    def _crash(self, held: Held, at: int, running: set[Token]) -> None:
        """A claimer may write down only afterwards what it was handed before."""
        if held.asked < at < held.end and held.ended is None and held.token not in running:
            if held.got < at:
                held.lost_at = at
            else:
                held.asked_over = at

    @property
    def lost(self) -> int:
        return sum(each.lost_at is not None for each in self.held.values())

    def end_all(self, at: int) -> None:
        """Every claimer is dead."""
        for each in self.held.values():
            each.until = min(each.until, at)

    def done(self) -> set[UUID]:
        return {each.token[0] for each in self.held.values() if each.is_done}

    def most_at_once(self, of: Callable[[Held], object]) -> int:
        """The highest number of claims of one kind that were held at one instant."""
        edges: defaultdict[object, list[tuple[int, int]]] = defaultdict(list)
        for each in self.held.values():
            if each.end > each.got:
                edges[of(each)] += [(each.got, 1), (each.end, -1)]
        return max((_highest(moments) for moments in edges.values()), default=0)

    def check_fences(self) -> None:
        """What a crash has lost cannot be settled; what was held can. Done is done once, and never claimed again."""
        done: dict[UUID, int] = {}
        for each in sorted(self.held.values(), key=lambda each: each.answered or 0):
            if each.lost_at is not None and each.answered is not None:
                assert each.is_refused, f"{each} was lost, and its settlement applied"
            is_sure = each.lost_at is None and each.asked_over is None
            if each.answered is not None and each.answered < each.until and is_sure:
                # A crash between the two may have lost the claim just before its settlement came.
                assert not each.is_refused or self._crashed_between(each), f"{each} was held, and is refused"
            if each.is_done and each.answered is not None:
                assert each.token[0] not in done, f"{each} is done a second time"
                done[each.token[0]] = each.answered
        for each in self.held.values():
            assert each.asked < done.get(each.token[0], each.asked + 1), f"{each} was claimed after it was done"

    def _crashed_between(self, held: Held) -> bool:
        assert held.ended is not None
        assert held.answered is not None
        return any(held.ended <= crash <= held.answered for crash, _ in self.crashes)

    def check_ends(self, ended: Iterable[tuple[UUID, bool]]) -> None:
        """Every job that the database holds to be done (or not: cancelled) was so by somebody's hand."""
        tried = {each.token[0] for each in self.held.values() if each.outcome == "Done" and not each.is_refused}
        done = self.done()
        for job, is_done in ended:
            if is_done:
                assert job in tried, f"nobody has done job {job}"
            else:
                assert job not in done, f"job {job} was done, and is not"


def _highest(moments: list[tuple[int, int]]) -> int:
    count = highest = 0
    # Ends come before starts at the same instant: what ended then did not overlap.
    for _, change in sorted(moments):
        count += change
        highest = max(highest, count)
    return highest
