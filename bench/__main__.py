"""`python -m bench [drains|history|pruning|stream] …`; without a name, the drains, as `make bench` runs them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

from bench import drains, history, pruning, stream

BENCHES: dict[str, Callable[[Sequence[str]], int]] = {
    "drains": drains.main,
    "history": history.main,
    "pruning": pruning.main,
    "stream": stream.main,
}


def main(arguments: Sequence[str]) -> int:
    name = arguments[0] if arguments and arguments[0] in BENCHES else None
    return BENCHES[name or "drains"](arguments[1:] if name else arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
