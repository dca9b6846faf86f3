"""FlashInfer's kernels against attention in fp64, on random ragged batches."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from gpu import ragged
from gpu.ragged import KINDS

from hfpaged.runtime.attention.flashinfer_backend import FlashInferBackend

DIMS = [(64, 64), (128, 128), (256, 256), (80, 80), (96, 96), (192, 128)]
GROUPS = [1, 2, 3, 4, 5, 7, 8, 16]
check = partial(ragged.check, FlashInferBackend)


@pytest.mark.parametrize("dims", DIMS, ids=str)
def test_head_dimensions(device, dims):
    check(device, torch.bfloat16, dims, 4, "plain")


@pytest.mark.parametrize("group", GROUPS)
def test_group_sizes(device, group):
    check(device, torch.bfloat16, (128, 128), group, "plain", seed=group)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dim", [64, 128])
def test_windows_caps_and_sinks(device, kind, dim):
    check(device, torch.bfloat16, (dim, dim), 4, kind)


def test_float16(device):
    check(device, torch.float16, (128, 128), 4, "plain")
