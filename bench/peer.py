"""Peers run in environments of their own, made on first use below `.bench/`; see bench/peers/README.md."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

__all__ = ["FOLDER", "PEERS", "POSTGRES_PEERS", "PeerFailed", "PeerRun", "run_peer"]

POSTGRES_PEERS: tuple[str, ...] = ("pgqueuer", "awa-pg", "procrastinate", "chancy", "dbos")
PEERS: tuple[str, ...] = (*POSTGRES_PEERS, "huey")

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "bench" / "peers"
GRACE_SECONDS = 30.0  # a peer ends itself when its time is over; this is for one that cannot
SETTINGS_OF_PIP = {"index-url": "UV_DEFAULT_INDEX", "cert": "SSL_CERT_FILE"}


class PeerFailed(RuntimeError):
    """A peer lost jobs, ran out of time or broke; the message says which and what it wrote."""


@dataclass(frozen=True, kw_only=True)
class PeerRun:
    """One workload as one peer did it; the figures mean nothing where `unsupported` gives a reason."""

    peer: str
    version: str
    workload: str
    jobs: int = 0
    seconds: float = 0.0
    jobs_per_second: float = 0.0
    counted_by_handlers: int = 0
    client_cpu_seconds: float = 0.0
    latencies_ms: tuple[float, ...] = ()  # pickup only
    last_small_seconds: float | None = None  # whale only
    total_seconds: float | None = None  # whale only
    configuration: Mapping[str, Any] = field(default_factory=dict)
    unsupported: str | None = None


def run_peer(peer: str, workload: str, url: str, *, jobs: int, **options: object) -> PeerRun:
    """Run a workload on an empty database (huey: a file that is not there yet) in the peer's best configuration.

    Options are those of the peers' `run.py`: `size`, `producers`, `bulk`, `timeout`.
    """
    limit = float(str(options.get("timeout", 300.0)))
    command = [str(_python(peer)), str(FOLDER / peer / "run.py"), workload, "--url", url, "--jobs", str(jobs)]
    for name, value in options.items():
        command += [f"--{name}", str(value)]
    try:
        answer = subprocess.run(
            command, check=False, capture_output=True, text=True, env=_environment(), timeout=limit + GRACE_SECONDS
        )
    except subprocess.TimeoutExpired as expired:
        raise PeerFailed(f"{peer} {workload} did not end within {expired.timeout:.0f} s") from expired
    if answer.returncode != 0:
        written = (answer.stdout + answer.stderr).strip()
        raise PeerFailed(f"{peer} {workload} ended with status {answer.returncode}:\n{written}")
    figures: dict[str, Any] = json.loads(answer.stdout.strip().splitlines()[-1])
    return PeerRun(**figures | {"latencies_ms": tuple(figures.get("latencies_ms", ()))})


def _python(peer: str) -> Path:
    home = ROOT / ".bench" / peer
    python = home / "bin" / "python"
    ready = home / ".ready"
    requirements = FOLDER / peer / "requirements.txt"
    if not ready.exists() or ready.read_text() != requirements.read_text():
        print(f"making an environment for {peer} in {home.relative_to(ROOT)} …", flush=True)
        _make(home, python, requirements)
        ready.write_text(requirements.read_text())
    return python


def _make(home: Path, python: Path, requirements: Path) -> None:
    uv = ROOT / ".uv" / "bin" / "uv"
    if uv.exists():
        settings = _environment() | _settings_of_pip(uv.parent / "pip")
        venv = [str(uv), "venv", "--quiet", "--clear", "--python", sys.executable, str(home)]
        install = [str(uv), "pip", "install", "--quiet", "--python", str(python), "-r", str(requirements)]
    else:
        settings = _environment()
        venv = [sys.executable, "-m", "venv", "--clear", str(home)]
        install = [str(python), "-m", "pip", "install", "--quiet", "-r", str(requirements)]
    subprocess.run(venv, check=True, env=settings)
    subprocess.run(install, check=True, env=settings)


def _settings_of_pip(pip: Path) -> dict[str, str]:
    """uv does not read pip's settings: the same index and certificates for it, as in the Makefile."""
    found: dict[str, str] = {}
    if shutil.which(str(pip)) is None:
        return found
    for setting, variable in SETTINGS_OF_PIP.items():
        asked = [str(pip), "config", "get", f"global.{setting}"]
        answer = subprocess.run(asked, check=False, capture_output=True, text=True).stdout.strip()
        if answer and variable not in os.environ:
            found[variable] = answer
    return found


def _environment() -> dict[str, str]:
    """This process's, without what would point a peer's Python at our packages."""
    ours = ("VIRTUAL_ENV", "PYTHONPATH", "PYTHONHOME")
    return {name: value for name, value in os.environ.items() if name not in ours}
