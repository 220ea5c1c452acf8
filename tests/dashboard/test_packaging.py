"""What the pages are made of is part of the package."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
PACKAGE = ROOT / "src" / "fairlane" / "dashboard"
KINDS = {".html", ".css", ".js", ".svg", ".LICENSE"}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """The names in a wheel that is built of this source, as an installer would build it."""
    folder = tmp_path_factory.mktemp("wheel")
    uv = ROOT / ".uv" / "bin" / "uv"
    program = str(uv) if uv.exists() else "uv"
    built = subprocess.run(
        [program, "build", "--wheel", "--quiet", "--offline", "--out-dir", str(folder), str(ROOT)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env={"PATH": str(Path(sys.executable).parent), "HOME": str(folder), "UV_CACHE_DIR": str(folder / "cache")},
    )
    assert built.returncode == 0, built.stderr
    (path,) = folder.glob("*.whl")
    with zipfile.ZipFile(path) as archive:
        return set(archive.namelist())


def test_templates_scripts_styles_and_licences_ship_with_the_wheel(wheel: set[str]) -> None:
    wanted = {
        f"fairlane/dashboard/{path.relative_to(PACKAGE).as_posix()}"
        for path in PACKAGE.rglob("*")
        if path.suffix in KINDS
    }
    assert len(wanted) > 20
    assert wanted - wheel == set()


@pytest.mark.parametrize("name", ["htmx", "uPlot", "pico"])
def test_what_others_wrote_comes_with_its_licence(name: str) -> None:
    assert "Permission" in (PACKAGE / "static" / "vendor" / f"{name}.LICENSE").read_text()
