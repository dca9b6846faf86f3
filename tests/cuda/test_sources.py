"""Nothing on the way to launching the next step makes the host wait for the device: by its source, and as it runs."""

from __future__ import annotations

import ast
import inspect

import pytest
import torch
from batches import left_padded, new_tokens, random_prompts
from families import build_tiny
from standin.fake_accelerator import DeviceError, no_waiting_operations

import hfpaged
from hfpaged.runtime.attention import flashinfer_backend, flashinfer_wrappers, page_tables
from hfpaged.runtime.device import accelerator, ahead_tier, captured_steps, inputs, launched_step, staging
from hfpaged.sampling import device_draw

MODULES = (
    accelerator, ahead_tier, captured_steps, inputs, launched_step, staging,
    flashinfer_backend, flashinfer_wrappers, page_tables, device_draw,
)  # fmt: skip
WAITING = {"item", "cpu", "tolist", "nonzero", "masked_select", "argwhere", "unique", "is_nonzero", "equal"}
# The device's own marks are what may be waited for, where it is known that they are long past.
MAY_SYNCHRONIZE = {staging.__name__, flashinfer_wrappers.__name__}


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__)
def test_no_call_that_waits(module):
    for node in ast.walk(ast.parse(inspect.getsource(module))):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        name = node.func.attr
        assert name not in WAITING, f"line {node.lineno}: .{name}() waits for the device"
        if name == "synchronize":
            assert module.__name__ in MAY_SYNCHRONIZE, f"line {node.lineno}: synchronize() waits for the device"
        if name == "numpy":
            # Page-locked memory of its own, never a result.
            assert module is staging, f"line {node.lineno}: .numpy() is for host memory"


@pytest.mark.parametrize("module", [ahead_tier, captured_steps, launched_step, device_draw, flashinfer_backend])
def test_no_tensor_is_made_from_host_data_but_by_an_upload(module):
    """`torch.tensor(..., device=...)` and `.to(device)` copy pageable memory, and block until the copy is done."""
    for node in ast.walk(ast.parse(inspect.getsource(module))):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        called = ast.unparse(node.func)
        assert called not in ("torch.tensor", "torch.as_tensor", "torch.from_numpy"), f"line {node.lineno}: {called}"
        if node.func.attr == "to":
            for argument in node.args:
                assert "dtype" in ast.unparse(argument) or "float" in ast.unparse(argument), ast.unparse(node)


@pytest.mark.parametrize("module", [ahead_tier, launched_step, device_draw])
def test_no_index_is_a_comparison(module):
    """Indexing by a mask waits to learn how many entries it has."""
    for node in ast.walk(ast.parse(inspect.getsource(module))):
        if isinstance(node, ast.Subscript):
            inside = [part for part in ast.walk(node.slice) if isinstance(part, (ast.Compare, ast.Invert))]
            assert not inside, f"line {node.lineno}: {ast.unparse(node)}"


SAMPLED = {"do_sample": True, "temperature": 1.5, "top_k": 20, "top_p": 0.9, "min_p": 0.01}


@pytest.mark.parametrize("options", [{"do_sample": False}, SAMPLED, {"do_sample": True, "temperature": 0.8}])
def test_launching_runs_no_operation_that_waits(cuda, options):
    model = build_tiny("llama")
    prompts = random_prompts((20, 5, 33))
    call = {**left_padded(prompts), "max_new_tokens": 8, "eos_token_id": -1, "pad_token_id": 0, **options}
    with hfpaged.patched(model):
        want = new_tokens(model.generate(**call, hfpaged={"seed": 3}), prompts)
        workspace = hfpaged.engine(model)._stepper.workspaces.current
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
    for wait in (lambda t: t.item(), lambda t: t.tolist(), lambda t: t.cpu(), lambda t: bool(t), lambda t: t[t > 0]):
        with no_waiting_operations(cuda.device), pytest.raises(DeviceError):
            wait(torch.ones(1))
