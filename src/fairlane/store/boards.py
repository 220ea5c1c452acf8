"""The boards that a process holds in memory, by queue."""

from __future__ import annotations

from fairlane.scheduler.resident import MOST_RESIDENT, ResidentBoard

__all__ = ["MOST_WHOLE", "PLANS_AT_MOST", "Boards", "Raced"]

MOST_WHOLE = 2_000
"""Pieces of a kind that are read at once, so that the whole of a small board is in memory from the first claim on."""
CHECKPOINT_AT = 20_000
"""Pieces that differ from the tables, and bytes of the journal, after which the tables are written."""
CHECKPOINT_BYTES = 4 * 2**20

PLANS_AT_MOST = 50
"""How often a claim is planned anew because a job it had planned was cancelled meanwhile."""


class Raced(Exception):
    """A job that was planned is not ready any more. Its board is forgotten, and the claim is planned anew."""


class Boards:
    """Boards of queues. All together they hold some `MOST_RESIDENT` keys; whoever was not used for the longest goes."""

    def __init__(self) -> None:
        self._boards: dict[int, ResidentBoard] = {}
        self._bytes: dict[int, int] = {}

    def get(self, queue: int) -> ResidentBoard | None:
        return self._boards.get(queue)

    def put(self, queue: int, board: ResidentBoard) -> None:
        """This one is true, as of now."""
        self._boards.pop(queue, None)
        self._boards[queue] = board

    def drop(self, queue: int) -> None:
        """Forget a board: whether it is true, nobody knows."""
        self._boards.pop(queue, None)
        self._bytes.pop(queue, None)

    def noted(self, queue: int, size: int) -> None:
        """A change of so many bytes was appended to the journal."""
        self._bytes[queue] = self._bytes.get(queue, 0) + size

    def is_due(self, queue: int) -> bool:
        """Whether the tables are to be written without waiting for the next moment of rest."""
        board = self._boards.get(queue)
        return board is not None and (board.unwritten >= CHECKPOINT_AT or self._bytes.get(queue, 0) >= CHECKPOINT_BYTES)

    def unwritten(self) -> list[int]:
        """Queues whose tables do not hold everything that we know."""
        return [queue for queue, board in self._boards.items() if board.unwritten]

    def written(self, queue: int) -> None:
        """The tables hold all of it: what is too much to keep can go."""
        self._bytes[queue] = 0
        self._boards[queue].shrink()
        held = sum(len(board.flows) for board in self._boards.values())
        for other, board in list(self._boards.items()):
            if held > 2 * MOST_RESIDENT and other != queue and not board.unwritten:
                held -= len(board.flows)
                self.drop(other)
