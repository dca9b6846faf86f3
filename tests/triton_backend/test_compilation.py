"""The kernels compile for GPUs that are not here, and fit into what these have for a program.

Compiling and interpreting exclude each other in a process, so that this is a process of its own.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from engine.hooks import with_import_paths

# Bytes of shared memory for a program.
SHARED = {"sm_75": 64 << 10, "sm_89": 99 << 10, "sm_90": 227 << 10, "gfx942": 64 << 10}
DIMS = ((64, 64), (128, 128), (192, 128), (256, 256))
# Larger ones do not fit, which their trial finds.
DIMS_OF_TURING = ((64, 64), (128, 128))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("target", "dtype"),
    [("sm_90", "bf16"), ("sm_89", "bf16"), ("gfx942", "bf16"), ("sm_75", "fp32"), ("gfx942", "fp32")],
)
def test_kernels_compile_and_fit(target, dtype):
    pytest.importorskip("triton")
    script = Path(__file__).parents[1] / "standin" / "compile_triton.py"
    environment = {**with_import_paths(), "TRITON_INTERPRET": "0"}
    dims = DIMS_OF_TURING if target == "sm_75" else DIMS
    command = [sys.executable, str(script), target, dtype, json.dumps(dims)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    used = json.loads(done.stdout)
    assert len(used) == 2 * len(dims) + 1
    assert max(used.values()) <= SHARED[target], used
