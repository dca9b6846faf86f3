"""The scripts that go to a machine with a GPU: that they work, as far as one without can tell."""

from __future__ import annotations

import json
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


@pytest.mark.slow
def test_measuring_goes_all_the_way_on_the_stand_in(tmp_path):
    figures = tmp_path / "figures.json"
    command = (sys.executable, str(HERE / "measure.py"), "--dry-run", "--turns", "1", "--json", str(figures))
    done = run(*command, env=with_import_paths())
    assert done.returncode == 0, done.stderr
    (result,) = json.loads(figures.read_text())["results"]
    assert [row["case"] for row in result["cases"]] == ["decode, batch 1", "decode, batch 3", "prefill"]
    for row in result["cases"]:
        assert row["hfpaged"]["tokens_per_second"] > 0, row
        assert row["hf-static"]["tokens_per_second"] > 0, row
        assert row["stats"]["backend"] == "flashinfer"
    assert result["cases"][0]["stats"]["captured_steps"] > 0
    assert result["launches"]["captured"]["launch_us"] > 0
    assert "hfpaged" in done.stdout


@pytest.mark.slow
def test_packing(tmp_path):
    if not (REPOSITORY / ".git").exists():
        pytest.skip("not a git checkout")
    extra = tmp_path / "flashinfer-tree"
    (extra / "flashinfer").mkdir(parents=True)
    (extra / "flashinfer" / "__init__.py").write_text("")
    out = tmp_path / "packed.tar.xz"
    done = run("bash", str(HERE / "pack.sh"), str(out), "--flashinfer", str(extra))
    assert done.returncode == 0, done.stderr
    with tarfile.open(out) as packed:
        names = set(packed.getnames())
    assert {"./run.sh", "./hfpaged/pyproject.toml", "./flashinfer/flashinfer/__init__.py"} <= names
