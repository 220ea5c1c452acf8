"""Values by key, in a transaction of the store's or of the caller's (`tx`)."""

from __future__ import annotations

from typing import Any, Protocol

from fairlane.store.procedures import Performer, Procedure, is_done, query


class Values(Performer, Protocol):
    """A store, as far as values are concerned."""

    async def get_value(self, key: str, tx: Any = None) -> bytes | None:
        """The value of a key; `None` where there is none. All of these take the caller's transaction as `tx`."""
        return await self._look_up(lambda: _get(key), tx)

    async def put_value(self, key: str, value: bytes, tx: Any = None) -> None:
        await self._change(lambda: is_done("put_value", key, value), tx)

    async def delete_value(self, key: str, tx: Any = None) -> bool:
        """Remove a key. Returns whether it was there."""
        return await self._change(lambda: is_done("delete_value", key), tx)

    async def compare_and_set_value(
        self, key: str, expected: bytes | None, value: bytes | None, tx: Any = None
    ) -> bool:
        """Replace a key's value if it is the expected one; `None` stands for no value. Returns whether it was."""
        # Each is one statement, which waits for whoever writes the same key and then looks at what they wrote. (And on
        # SQLite, a caller's transaction may be one that has only read so far.)
        match expected, value:
            case None, None:
                return await self.get_value(key, tx) is None
            case None, _:
                return await self._change(lambda: is_done("put_value_if_absent", key, value), tx)
            case _, None:
                return await self._change(lambda: is_done("delete_value_if_equal", key, expected), tx)
            case _:
                return await self._change(lambda: is_done("replace_value", key, expected, value), tx)

    async def scan_values(self, low: str, end: str, limit: int, tx: Any = None) -> list[tuple[str, bytes]]:
        """The keys from `low` to before `end` in the order of their bytes, with their values."""
        return await self._look_up(lambda: _scan(low, end, limit), tx)


def _get(key: str) -> Procedure[bytes | None]:
    found = yield query("select_value", key)
    return found[0][0] if found else None


def _scan(low: str, end: str, limit: int) -> Procedure[list[tuple[str, bytes]]]:
    return [(key, value) for key, value in (yield query("scan_values", low, end, limit))]
