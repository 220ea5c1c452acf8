"""Where results are kept: `bench/RESULTS.md`, under the commit and the machine that they were measured on."""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Iterable
from pathlib import Path

__all__ = ["ROOT", "append_results", "commit"]

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench" / "RESULTS.md"


def append_results(what: str, lines: Iterable[str]) -> None:
    """Append lines of Markdown under a heading that says on what they were measured."""
    if not RESULTS.exists():
        RESULTS.write_text(
            "# Results\n\nAppended by `make bench`; absolute figures mean little, ratios are what counts.\n"
            "The newest run is the last one. Older runs were judged by the bars of their time.\n"
        )
    machine = f"{os.cpu_count()} × {_processor()}, Python {platform.python_version()}"
    heading = f"\n## {commit()}: {machine}{', ' if what else ''}{what}\n"
    with RESULTS.open("a") as file:
        file.write("\n".join([heading, *lines]) + "\n")


def commit() -> str:
    """What is checked out, with a sign where it was changed since."""
    answer = subprocess.run(
        ["git", "describe", "--always", "--dirty=+changes", "--exclude=*"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=False,
    )
    return answer.stdout.strip() or "unknown commit"


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else ():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()
