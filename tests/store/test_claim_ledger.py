"""The ledger of the takeover test finds what it is there to find."""

from __future__ import annotations

from pathlib import Path
from uuid import UUID

import pytest

from fairlane.job import State
from tests.store.claim_ledger import Account, ClaimLedger, Limits
from tests.store.witness import Move

JOB, OTHER = UUID(int=1), UUID(int=2)
LEASE, LATER = UUID(int=11), UUID(int=12)
ACCOUNTS = {JOB: "acme", OTHER: "acme"}
HELD_FOR = 1_000
POLICY = Move(1, None, None, None, None, False, "1 of an account, 1 in all")


def limits(policy: str) -> Limits:
    return 1, 1


def began(number: int, job: UUID, lease: UUID) -> Move:
    return Move(number, job, None, State.RUNNING, lease, False, None)


def ended(number: int, job: UUID, lease: UUID, state: State = State.DONE, *, is_reaped: bool = False) -> Move:
    return Move(number, job, lease, state, None, is_reaped, None)


def claimed(at: int, job: UUID, lease: UUID, until: int | None = None) -> list[str]:
    return [f"{at} asking", f"{at + 5 if until is None else until} claimed {lease} {job}:acme"]


def settled(at: int, job: UUID, lease: UUID, outcome: str = "Done", *, is_refused: bool = False) -> list[str]:
    return [f"{at} settling {job}:{lease}:{outcome}", f"{at + 5} settled {job if is_refused else ''}"]


class Story:
    """What one process wrote down, or several."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.ledger = ClaimLedger(HELD_FOR)

    def process(self, *lines: str, is_dead: bool = False) -> None:
        number = len(list(self._folder.iterdir()))
        path = self._folder / str(number)
        path.write_text("".join(f"{line}\n" for line in lines))
        self.ledger.follow(number, path)
        if is_dead:
            self.ledger.leave(number)

    def check(self, *moves: Move) -> Account:
        return self.ledger.check([POLICY, *moves], ACCOUNTS, limits)


@pytest.fixture
def story(tmp_path: Path) -> Story:
    return Story(tmp_path)


def test_a_claim_that_was_made_told_and_settled_is_nothing_special(story: Story) -> None:
    story.process(*claimed(10, JOB, LEASE), *settled(20, JOB, LEASE))
    assert story.check(began(2, JOB, LEASE), ended(3, JOB, LEASE)) == Account(0, 0, 0, 0, 0, 0)


def test_a_claim_that_nobody_made_is_found_where_no_crash_can_have_lost_it(story: Story) -> None:
    story.process(*claimed(10, JOB, LEASE))
    with pytest.raises(AssertionError, match="no crash can have lost it"):
        story.check()
    story.ledger.crashes.append(100)
    assert story.check().lost == 1


def test_a_crash_loses_no_claim_that_was_made_before_something_durable(story: Story) -> None:
    story.process(*claimed(10, JOB, LEASE))
    story.ledger.crashes.append(100)
    story.ledger.durable.append((50, 60))
    with pytest.raises(AssertionError, match="no crash can have lost it"):
        story.check()


@pytest.mark.parametrize("durable", [(12, 60), (50, 160)], ids=["begun before", "acknowledged after"])
def test_what_was_durable_at_another_time_says_nothing(story: Story, durable: tuple[int, int]) -> None:
    story.process(*claimed(10, JOB, LEASE))
    story.ledger.crashes.append(100)
    story.ledger.durable.append(durable)
    assert story.check().lost == 1


def test_a_claim_asked_for_over_a_crash_is_lost_or_made_as_the_database_says(story: Story) -> None:
    story.process(*claimed(90, JOB, LEASE, until=110), *settled(120, JOB, LEASE))
    story.ledger.crashes.append(100)
    assert story.check(began(2, JOB, LEASE), ended(3, JOB, LEASE)).asked_over_and_made == 1
    with pytest.raises(AssertionError, match="was lost, and its settlement applied"):
        story.check()


def test_a_claim_asked_for_over_a_crash_and_made_is_held(story: Story) -> None:
    """It was excused once: refused, it was taken for lost."""
    story.process(*claimed(90, JOB, LEASE, until=110), *settled(200, JOB, LEASE, is_refused=True))
    story.process(*claimed(130, JOB, LATER), *settled(300, JOB, LATER))
    story.ledger.crashes.append(100)
    story_of_two = [began(2, JOB, LEASE), ended(3, JOB, LEASE, State.READY, is_reaped=True)]
    with pytest.raises(AssertionError, match="was held, and is refused"):
        story.check(*story_of_two, began(4, JOB, LATER), ended(5, JOB, LATER))


def test_a_claim_asked_for_over_a_crash_and_lost_may_be_refused(story: Story) -> None:
    story.process(*claimed(90, JOB, LEASE, until=110), *settled(200, JOB, LEASE, is_refused=True))
    story.process(*claimed(130, JOB, LATER), *settled(300, JOB, LATER))
    story.ledger.crashes.append(100)
    assert story.check(began(2, JOB, LATER), ended(3, JOB, LATER)) == Account(1, 1, 0, 0, 1, 0)


def test_a_settlement_that_was_acknowledged_is_never_lost(story: Story) -> None:
    story.process(*claimed(10, JOB, LEASE), *settled(20, JOB, LEASE))
    with pytest.raises(AssertionError, match="its end was lost"):
        story.check(began(2, JOB, LEASE), ended(3, JOB, LEASE, State.READY, is_reaped=True))


def test_a_settlement_that_is_refused_has_not_landed(story: Story) -> None:
    story.process(*claimed(10, JOB, LEASE), *settled(20, JOB, LEASE, is_refused=True))
    with pytest.raises(AssertionError, match="is refused, and has landed"):
        story.check(began(2, JOB, LEASE), ended(3, JOB, LEASE))


def test_nobody_ends_a_claim_that_nobody_settled(story: Story) -> None:
    story.process(*claimed(10, JOB, LEASE))
    with pytest.raises(AssertionError, match="nobody has settled it"):
        story.check(began(2, JOB, LEASE), ended(3, JOB, LEASE))


def test_a_claim_does_not_become_what_its_settlement_did_not_say(story: Story) -> None:
    story.process(*claimed(10, JOB, LEASE), *settled(20, JOB, LEASE, "Released"))
    with pytest.raises(AssertionError, match="has become"):
        story.check(began(2, JOB, LEASE), ended(3, JOB, LEASE, State.DONE))


def test_nothing_runs_for_ever(story: Story) -> None:
    story.process(*claimed(10, JOB, LEASE))
    with pytest.raises(AssertionError, match="runs for ever"):
        story.check(began(2, JOB, LEASE))


def test_a_claim_that_nobody_was_told_of_belongs_to_a_call_that_nobody_answered(story: Story) -> None:
    moves = [began(2, JOB, LEASE), ended(3, JOB, LEASE, State.READY, is_reaped=True)]
    story.process(*claimed(10, OTHER, LATER), *settled(20, OTHER, LATER))
    moves += [began(4, OTHER, LATER), ended(5, OTHER, LATER)]
    with pytest.raises(AssertionError, match="told to nobody"):
        story.check(*moves)
    story.process("10 asking", is_dead=True)
    assert story.check(*moves).unheard == 1


def test_the_limit_in_force_holds_at_every_start(story: Story) -> None:
    with pytest.raises(AssertionError, match="2 of account acme run"):
        story.check(began(2, JOB, LEASE), began(3, OTHER, LEASE))


def test_a_limit_holds_by_the_clock_of_the_claimers_too(story: Story) -> None:
    """Although the database has seen one after the other."""
    story.process(*claimed(10, JOB, LEASE), *settled(100, JOB, LEASE))
    story.process(*claimed(20, OTHER, LATER), *settled(110, OTHER, LATER))
    one_by_one = [began(2, JOB, LEASE), ended(3, JOB, LEASE), began(4, OTHER, LATER), ended(5, OTHER, LATER)]
    with pytest.raises(AssertionError, match="over its limit"):
        story.check(*one_by_one)


def test_a_token_is_used_once(story: Story) -> None:
    moves = [began(2, JOB, LEASE), ended(3, JOB, LEASE, State.READY), began(4, JOB, LEASE)]
    with pytest.raises(AssertionError, match="a second time under one token"):
        story.check(*moves)


def test_what_is_done_is_not_claimed_again(story: Story) -> None:
    story.process(*claimed(10, JOB, LEASE), *settled(20, JOB, LEASE))
    story.process(*claimed(30, JOB, LATER), *settled(40, JOB, LATER, "Released"))
    again = [began(4, JOB, LATER), ended(5, JOB, LATER, State.READY)]
    with pytest.raises(AssertionError, match="was done before"):
        story.check(began(2, JOB, LEASE), ended(3, JOB, LEASE), *again)


def test_a_line_that_a_kill_has_cut_short_was_never_written(story: Story, tmp_path: Path) -> None:
    path = tmp_path / "cut"
    path.write_text(f"10 asking\n15 claimed {LEASE} {str(JOB)[:8]}")
    story.ledger.follow(0, path)
    story.ledger.leave(0)
    assert (story.ledger.claims, story.ledger.unheard) == (0, 1)
