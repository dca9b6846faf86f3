"""The Triton kernels on the card. Without one they are tested in Triton's interpreter (tests/triton_backend)."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from batches import random_prompts
from families import build_tiny
from gpu import ragged
from gpu.ragged import KINDS
from gpu.test_engine import compare_with_stock, texts

import hfpaged
from hfpaged.runtime.attention.triton_backend import TritonBackend

BF16, FP32 = torch.bfloat16, torch.float32
check = partial(ragged.check, TritonBackend)


@pytest.mark.parametrize("dims", [(32, 32), (64, 64), (80, 80), (128, 128), (192, 128), (256, 256)], ids=str)
@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_head_dimensions(gpu, dtype, dims):
    check(gpu, dtype, dims, 4, "plain")


@pytest.mark.parametrize("group", [1, 3, 5, 7, 16])
def test_group_sizes(gpu, group):
    check(gpu, BF16, (128, 128), group, "plain", seed=group)


@pytest.mark.parametrize("kind", KINDS)
def test_windows_caps_and_sinks(gpu, kind):
    check(gpu, BF16, (64, 64), 4, kind)


def test_float16(gpu):
    check(gpu, torch.float16, (64, 64), 4, "softcap")


@pytest.mark.parametrize("family", ["llama", "gemma2", "phi3"])
def test_tiny_families(gpu, family):
    model = build_tiny(family).to(gpu, BF16)
    counted = compare_with_stock(model, random_prompts((3, 16, 33, 47), common_prefix=16), 12, "triton")
    assert counted["captured_steps"] > 0, counted["capture_problem"]


def test_float32_runs_on_triton_and_is_exact(gpu):
    model = build_tiny("llama").to(gpu)
    prompts = random_prompts((3, 16, 33))
    want = [texts(model, [prompt], 12)[0] for prompt in prompts]
    with hfpaged.patched(model):
        assert texts(model, prompts, 12) == want
        counted = hfpaged.engine(model).stats()
    assert counted["backend"] == "triton", counted["backend_reasons"]
    assert "float32" in counted["backend_reasons"]["flashinfer"]
    assert counted["captured_steps"] > 0, counted["capture_problem"]
