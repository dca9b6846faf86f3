"""The scripts that go to a machine with a GPU: that they work, as far as one without can tell."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
from engine.hooks import with_import_paths

HERE = Path(__file__).parent
REPOSITORY = HERE.parents[1]


def run(*command, **options):
    return subprocess.run(command, capture_output=True, text=True, timeout=300, **options)


@pytest.mark.parametrize("script", ["run.sh", "pack.sh"])
def test_shell_scripts_parse_and_explain_themselves(script):
    assert run("bash", "-n", str(HERE / script)).returncode == 0
    shown = run("bash", str(HERE / script), "--help")
    assert shown.returncode == 0
    assert script in shown.stdout
    assert "set -" not in shown.stdout


def test_run_refuses_what_it_does_not_know():
    assert run("bash", str(HERE / "run.sh"), "--qiuck").returncode == 2


def test_measuring_without_a_gpu_says_so_and_is_no_failure_of_ours(tmp_path):
    done = run(sys.executable, str(HERE / "measure.py"), "--help", env=with_import_paths())
    assert done.returncode == 0, done.stderr
    assert "--dry-run" in done.stdout


def packed(tmp_path, *options):
    """The archive's names, and a folder that it was unpacked to."""
    if not (REPOSITORY / ".git").exists():
        pytest.skip("not a git checkout")
    out, unpacked = tmp_path / "packed.tar.xz", tmp_path / "unpacked"
    done = run("bash", str(HERE / "pack.sh"), str(out), *options)
    assert done.returncode == 0, done.stderr
    with tarfile.open(out) as archive:
        archive.extractall(unpacked, filter="data")
        return set(archive.getnames()), unpacked


@pytest.mark.slow
def test_what_is_packed_runs_from_start_to_figures_on_the_stand_in(tmp_path):
    names, unpacked = packed(tmp_path)
    assert {"./run.sh", "./hfpaged/pyproject.toml", "./hfpaged/tests/gpu/measure.py"} <= names
    done = subprocess.run(
        ["bash", str(unpacked / "run.sh"), "--dry-run"],
        env={**os.environ, "PATH": f"{with_this_python(tmp_path)}:{os.environ['PATH']}"},
        capture_output=True, text=True, timeout=1800,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert [line.split(":")[0] for line in done.stdout.splitlines()[:3]] == ["environment", "checks", "figures"]
    assert "skipped" in done.stdout  # what needs a real device
    (result,) = json.loads((unpacked / "report" / "figures.json").read_text())["results"]
    assert [row["case"] for row in result["cases"]] == ["decode, batch 1", "decode, batch 3", "prefill"]
    for row in result["cases"]:
        for name in ("hfpaged", "hf-static", "hf-cb"):
            assert row[name].get("tokens_per_second", 0) > 0, row
        assert row["hfpaged"]["stats"]["backend"] == "flashinfer"
    assert result["cases"][0]["hfpaged"]["stats"]["captured_steps"] > 0
    assert result["launches"]["captured"]["launch_us"] > 0
    assert result["draws"]["256 rows"]["sorting"] > 0


def with_this_python(tmp_path):
    """A folder in which `python3` is the interpreter that runs the tests."""
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "python3").write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    (folder / "python3").chmod(0o755)
    return folder


def test_what_fails_or_has_no_time_is_noted_in_its_place(capsys):
    sys.path.insert(0, str(HERE.parent))
    from gpu.measure import attempt, print_table

    def broken():
        raise RuntimeError("no kernel image is available")

    launches = {"captured": attempt(broken), "uncaptured": {"launch_us": 300.0, "step_us": 400.0}}
    row = {"case": "decode, batch 1", "hfpaged": {"tokens_per_second": 1000.4}, "hf-static": attempt(broken)}
    print_table([{"shape": "tiny", "launches": launches, "cases": [row]}, {"shape": "large"}])
    shown = capsys.readouterr().out
    assert "captured     failed: RuntimeError: no kernel image is available" in shown
    assert "decode, batch 1               1000        failed       no time" in shown
    assert "large, bfloat16" in shown


@pytest.mark.slow
def test_packing_flashinfer(tmp_path):
    """As installed here: what is packed can still be imported, and its kernels could be compiled."""
    spec = importlib.util.find_spec("flashinfer")
    if spec is None or spec.origin is None:
        pytest.skip("FlashInfer is not installed")
    kernels = tmp_path / "cached_ops" / "norm"
    kernels.mkdir(parents=True)
    shutil.copy(sys.executable, kernels / "norm.so")
    names, unpacked = packed(
        tmp_path, "--flashinfer", str(Path(spec.origin).parents[1]), "--kernels", str(kernels.parent)
    )
    assert "./flashinfer/flashinfer/data/aot/norm/norm.so" in names
    code = "import flashinfer; print(flashinfer.__file__)"
    done = run(sys.executable, "-c", code, env={**os.environ, "PYTHONPATH": str(unpacked / "flashinfer")})
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(str(unpacked))
