"""`python -m bench [NAME] …`: see `--help` for the names; without one, what `make bench` runs."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

from bench import comparison, history, horizon, pages, pruning, rates, shared, stream, views

BENCHES: dict[str, tuple[str, Callable[[Sequence[str]], int]]] = {
    "history": ("claims and enqueues beside ten million finished jobs", history.main),
    "horizon": ("claims while somebody keeps the vacuum horizon where it is", horizon.main),
    "pages": ("the dashboard, over 100,000 keys and a million jobs", pages.main),
    "pruning": ("whether upkeep keeps up with ten thousand finishes a second", pruning.main),
    "rates": ("how much of a smooth rate workers give, and never more", rates.main),
    "views": ("what people look at, over 100,000 keys and a million jobs", views.main),
    "shared": ("a limit that two queues share", shared.main),
    "stream": ("a million jobs in one streamed call", stream.main),
}


def main(arguments: Sequence[str]) -> int:
    if arguments and arguments[0] in BENCHES:
        return BENCHES[arguments[0]][1](arguments[1:])
    return comparison.main(arguments, epilog=_others())


def _others() -> str:
    lines = [f"  python -m bench {name:8} {what}" for name, (what, _) in BENCHES.items()]
    return "\n".join(["other benchmarks, each with its own --help:", *lines])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
