"""`python -m bench [history|pruning|shared|stream] …`; without a name, the comparison that `make bench` runs."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

from bench import comparison, history, pruning, shared, stream

BENCHES: dict[str, Callable[[Sequence[str]], int]] = {
    "history": history.main,
    "pruning": pruning.main,
    "shared": shared.main,
    "stream": stream.main,
}


def main(arguments: Sequence[str]) -> int:
    name = arguments[0] if arguments and arguments[0] in BENCHES else None
    return BENCHES[name](arguments[1:]) if name else comparison.main(arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
