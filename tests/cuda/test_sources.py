"""Nothing on the way to launching the next step makes the host wait for the device: by its source, and as it runs."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import torch
from batches import left_padded, new_tokens, random_prompts
from families import build_tiny
from internals import workspace_of
from standin.fake_accelerator import DeviceError, no_waiting_operations

import hfpaged

PACKAGE = Path(hfpaged.__file__).parent
# Whatever is added to these folders is on the way to launching a step until it is said here that it is not.
READS_THE_TOKENS = "runtime/device/settlement.py"
RUN_ON_THE_DEVICE = ("runtime/attention/triton_kernels.py", "runtime/device/draw_kernels.py")
MODULES = sorted(
    str(path.relative_to(PACKAGE))
    for path in (
        *(PACKAGE / "runtime/device").glob("*.py"),
        *(PACKAGE / "runtime/attention").glob("flashinfer_*.py"),
        *(PACKAGE / "runtime/attention").glob("triton_*.py"),
        *(PACKAGE / "runtime/attention").glob("*_tables.py"),
        PACKAGE / "sampling/device_draw.py",
    )
    if str(path.relative_to(PACKAGE)) not in (READS_THE_TOKENS, *RUN_ON_THE_DEVICE)
)
WAITING = {"item", "cpu", "tolist", "nonzero", "masked_select", "argwhere", "unique", "is_nonzero", "equal", "any"}
# Marks that are known to be long past, and what the accelerator offers for those who want to wait.
MAY_SYNCHRONIZE = {
    "runtime/device/staging.py", "runtime/attention/flashinfer_wrappers.py", "runtime/device/accelerator.py",
}  # fmt: skip
# Page-locked memory of its own, never a result.
MAY_USE_NUMPY = {"runtime/device/staging.py"}
# From one device to another, or on the host: `to` of a dtype, or of the accelerator's upload.
UPLOADS = "runtime/device/accelerator.py"


def parts_of(module, kind):
    """All syntax of one kind in a module."""
    return [node for node in ast.walk(ast.parse((PACKAGE / module).read_text())) if isinstance(node, kind)]


def method_calls(module):
    return [node for node in parts_of(module, ast.Call) if isinstance(node.func, ast.Attribute)]


def test_the_modules_are_those_that_launch():
    assert {"runtime/device/ahead_tier.py", "runtime/device/pieces.py", "sampling/device_draw.py"} <= set(MODULES)
    assert len(MODULES) >= 14


@pytest.mark.parametrize("module", MODULES)
def test_no_call_that_waits(module):
    for node in method_calls(module):
        name = node.func.attr
        assert name not in WAITING, f"line {node.lineno}: .{name}() waits for the device"
        if name == "synchronize":
            assert module in MAY_SYNCHRONIZE, f"line {node.lineno}: synchronize() waits for the device"
        if name == "numpy":
            assert module in MAY_USE_NUMPY, f"line {node.lineno}: .numpy() is for host memory"


@pytest.mark.parametrize("module", MODULES)
def test_no_tensor_is_made_from_host_data_but_by_an_upload(module):
    """`torch.tensor(..., device=...)` and `.to(device)` copy pageable memory, and block until the copy is done."""
    for node in method_calls(module):
        called = ast.unparse(node.func)
        assert called not in ("torch.tensor", "torch.as_tensor", "torch.from_numpy"), f"line {node.lineno}: {called}"
        if node.func.attr == "to" and module != UPLOADS:
            for argument in node.args:
                assert "dtype" in ast.unparse(argument) or "float" in ast.unparse(argument), ast.unparse(node)


def test_the_accelerator_copies_without_blocking():
    copies = [node for node in method_calls(UPLOADS) if node.func.attr in ("to", "copy_")]
    assert len(copies) == 4
    for node in copies:
        assert "non_blocking=True" in ast.unparse(node)


@pytest.mark.parametrize("module", MODULES)
def test_no_index_is_a_comparison(module):
    """Indexing by a mask waits to learn how many entries it has."""
    for node in parts_of(module, ast.Subscript):
        inside = [part for part in ast.walk(node.slice) if isinstance(part, (ast.Compare, ast.Invert))]
        if inside:
            # Block tables are numpy's, on the host.
            assert (module, ast.unparse(node.value)) == ("runtime/attention/page_tables.py", "tables"), node.lineno


SAMPLED = {"do_sample": True, "temperature": 1.5, "top_k": 20, "top_p": 0.9, "min_p": 0.01}


@pytest.mark.parametrize("options", [{"do_sample": False}, SAMPLED, {"do_sample": True, "temperature": 0.8}])
def test_launching_runs_no_operation_that_waits(cuda, options):
    model = build_tiny("llama")
    prompts = random_prompts((20, 5, 33))
    call = {**left_padded(prompts), "max_new_tokens": 8, "eos_token_id": -1, "pad_token_id": 0, **options}
    with hfpaged.patched(model):
        want = new_tokens(model.generate(**call, hfpaged={"seed": 3}), prompts)
        workspace = workspace_of(hfpaged.engine(model))
        run, launch = workspace.runner.run, workspace.launcher.launch
        launches = []

        def strictly(function):
            def call(*args):
                with no_waiting_operations(cuda.device):
                    launches.append(function)
                    return function(*args)

            return call

        workspace.runner.run, workspace.launcher.launch = strictly(run), strictly(launch)
        assert new_tokens(model.generate(**call, hfpaged={"seed": 3}), prompts) == want
        assert len(launches) >= 16


def test_the_watch_notices_what_waits(cuda):
    for wait in (
        lambda t: t.item(),
        lambda t: t.tolist(),
        lambda t: t.cpu(),
        lambda t: bool(t),
        lambda t: t[t > 0],
        lambda t: t.where(t > 0, 1.0),
    ):
        with no_waiting_operations(cuda.device), pytest.raises(DeviceError):
            wait(torch.ones(1))
