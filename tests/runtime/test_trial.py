"""A backend whose kernels do not compile, or are wrong, is found out before it is chosen."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace

import pytest
import torch

from hfpaged.runtime.attention.interface import LayerShape
from hfpaged.runtime.attention.torch_backend import TorchBackend
from hfpaged.runtime.attention.trial import trial_problem

CPU = torch.device("cpu")
SHAPES = [LayerShape(2, 16, 8), LayerShape(2, 16, 8), LayerShape(1, 32, 32)]


def backend_that(answers):
    """A class of backends, another one each time, whose results are what `answers` makes of the right ones."""

    class Backend(TorchBackend):
        accelerator = SimpleNamespace(active=contextlib.nullcontext)
        made = 0

        def __init__(self, *args):
            super().__init__(*args)
            type(self).made += 1

        def run(self, *args):
            return answers(super().run(*args))

    return Backend


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("block_size", [1, 16])
def test_what_is_right_passes_and_is_tried_once_a_shape(dtype, block_size):
    backend = backend_that(lambda output: output)
    for _ in range(2):
        assert trial_problem(backend, CPU, dtype, SHAPES, block_size) is None
    assert backend.made == 2


def fail(output):
    raise RuntimeError("ninja: build stopped\nnvcc fatal: no such file")


@pytest.mark.parametrize(
    ("answers", "reason"),
    [
        (fail, "RuntimeError: ninja: build stopped)"),
        (lambda output: output * 1.1, "their results are wrong"),
        (lambda output: output * float("nan"), "their results are wrong"),
        (lambda output: output.flip(0) if len(output) > 1 else output, "their results are wrong"),
    ],
)
def test_what_is_not_is_a_reason_in_one_line(answers, reason):
    found = trial_problem(backend_that(answers), CPU, torch.float32, SHAPES, 16)
    assert reason in found
    assert "\n" not in found
