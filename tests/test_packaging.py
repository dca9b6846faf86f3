from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

tomllib = pytest.importorskip("tomllib", reason="the standard library reads TOML from Python 3.11 on")

ROOT = Path(__file__).parents[1]
SETUPTOOLS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]


def packages_in_the_tree() -> set[str]:
    folders = [file.parent.relative_to(ROOT) for top in ("hfpaged", "integrations", "demo") for file in find(top)]
    names = {".".join(folder.parts) for folder in folders}
    return {name if name.split(".")[0] == "hfpaged" else f"hfpaged.{name}" for name in names}


def find(top: str) -> list[Path]:
    return list((ROOT / top).rglob("__init__.py"))


def test_every_package_is_installed() -> None:
    assert set(SETUPTOOLS["packages"]) == packages_in_the_tree()


def test_the_kernel_sources_are_installed() -> None:
    csrc = ROOT / "hfpaged" / "native" / "csrc"
    matched = {path for pattern in SETUPTOOLS["package-data"]["hfpaged.native"] for path in csrc.parent.glob(pattern)}
    assert matched == {path for path in csrc.iterdir() if path.is_file()}


def test_what_the_demo_reads_is_installed() -> None:
    matched = {path for pattern in SETUPTOOLS["package-data"]["hfpaged.demo"] for path in (ROOT / "demo").glob(pattern)}
    assert matched == {path for path in (ROOT / "demo").iterdir() if path.is_file() and path.suffix != ".py"}


def test_folders_beside_the_package_import_as_its_subpackages(tmp_path: Path) -> None:
    code = "import hfpaged.demo, hfpaged.integrations as i; print(i.__doc__)"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "hfpaged.integrations" in done.stdout
