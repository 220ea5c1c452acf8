"""Peers run in environments of their own, made on first use below `.bench/`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

__all__ = ["pgqueuer_drain"]

ROOT = Path(__file__).resolve().parent.parent
PEERS = ROOT / "bench" / "peers"


def pgqueuer_drain(url: str, jobs: int) -> float:
    """Jobs per second of pgqueuer in its best configuration; see bench/peers/pgqueuer/drain.py."""
    script = PEERS / "pgqueuer" / "drain.py"
    command = [str(_python("pgqueuer")), str(script), "--url", url, "--jobs", str(jobs)]
    answer = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    result: dict[str, Any] = json.loads(answer.stdout.strip().splitlines()[-1])
    return float(result["jobs_per_second"])


def _python(peer: str) -> Path:
    home = ROOT / ".bench" / peer
    python = home / "bin" / "python"
    ready = home / ".ready"
    requirements = PEERS / peer / "requirements.txt"
    if not ready.exists() or ready.read_text() != requirements.read_text():
        print(f"making an environment for {peer} in {home.relative_to(ROOT)} …", flush=True)
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(home)], check=True)
        subprocess.run([str(python), "-m", "pip", "install", "--quiet", "-r", str(requirements)], check=True)
        ready.write_text(requirements.read_text())
    return python
