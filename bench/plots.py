"""`python -m bench.plots`: draws the pictures of docs/how-to/try-a-policy.md, from the workload on that page."""

from __future__ import annotations

import re
from pathlib import Path

from fairlane import Concurrency, Fair, Policy
from fairlane.simulation import Workload
from fairlane.simulation.measures import measure, timeline
from fairlane.simulation.plots import plot_simulations, plot_timeline
from fairlane.simulation.replay import record

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "how-to" / "try-a-policy.md"
IMAGES = ROOT / "docs" / "images"
POLICIES = (Policy("now"), Policy("next", Fair(by="account"), (Concurrency(12, by="account"),)))
SLOTS = 20


def main() -> None:
    found = re.search(r"```toml\n(.*?)```", PAGE.read_text(), re.DOTALL)
    if found is None:
        raise SystemExit(f"{PAGE.name} declares no workload any more")
    workload = Workload.parse(found[1], PAGE.name)
    recordings = [record(policy, workload, slots=SLOTS) for policy in POLICIES]
    simulations = [measure(each, ("account",)) for each in recordings]
    (IMAGES / "simulate-waits.svg").write_text(plot_simulations(simulations))
    slots, _ = plot_timeline(timeline(recordings[1]), simulations[1].policy)
    (IMAGES / "simulate-slots-b.svg").write_text(slots)
    print(f"wrote {IMAGES.relative_to(ROOT)}/simulate-waits.svg and simulate-slots-b.svg")


if __name__ == "__main__":
    main()
