"""Imports point one way: a part of the package knows those below it and none above."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# From the bottom to the top. The package's root, which has the public names, may be imported as users do.
LAYERS = (
    "errors", "compat", "unwrap", "import_hooks", "native", "config", "core", "text", "sampling", "speculation",
    "quantization", "fusion", "program", "models", "runtime", "capabilities", "generation", "patched_model",
    "integrations", "patching", "extension", "serving", "demo", "cli",
)  # fmt: skip


def files_of(layer: str) -> list[Path]:
    """The modules of a layer: a file or a folder of the package, or one of the two folders beside it."""
    places = (ROOT / "hfpaged" / f"{layer}.py", ROOT / "hfpaged" / layer, ROOT / layer)
    return [file for place in places for file in ([place] if place.is_file() else place.rglob("*.py"))]


def imports(file: Path) -> Iterator[str]:
    """Names of all modules that a file imports, wherever in it, but for what it does as a script."""
    for top in ast.parse(file.read_text()).body:
        if isinstance(top, ast.If) and "__main__" in ast.unparse(top.test):
            continue
        for node in ast.walk(top):
            if isinstance(node, ast.Import):
                yield from (alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module == "hfpaged":
                yield from (f"hfpaged.{alias.name}" for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                yield node.module


def test_every_part_of_the_package_is_a_layer() -> None:
    entries = (ROOT / "hfpaged").iterdir()
    parts = {path.stem for path in entries if path.suffix == ".py" or (path / "__init__.py").exists()}
    assert parts - {"__init__"} | {"integrations", "demo"} == set(LAYERS)


@pytest.mark.parametrize("layer", LAYERS)
def test_a_layer_knows_only_those_below(layer: str) -> None:
    known = LAYERS[: LAYERS.index(layer) + 1]
    upwards = [
        f"{file.relative_to(ROOT)} imports {name}"
        for file in files_of(layer)
        for name in imports(file)
        if name.startswith("hfpaged.") and name.split(".")[1] not in known
    ]
    assert files_of(layer) and upwards == []


def test_the_books_are_plain_python() -> None:
    names = {name.split(".")[0] for file in files_of("core") for name in imports(file)}
    assert names <= {*sys.stdlib_module_names, "hfpaged"}
