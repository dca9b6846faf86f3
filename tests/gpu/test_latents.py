"""FlashInfer's kernel for latents against attention in fp64, and text of a model that keeps them."""

from __future__ import annotations

import pytest
import torch
from batches import random_prompts
from families import build_tiny
from gpu.ragged import assert_close_to_exact
from gpu.test_engine import compare_with_stock
from native.paged_problem import PagedProblem, last_tokens, whole
from transformers.models.deepseek_v3 import modeling_deepseek_v3

from hfpaged.runtime.attention.flashinfer_backend import FlashInferBackend
from hfpaged.runtime.attention.interface import AttentionParams, LatentShape
from hfpaged.runtime.attention.trial import trial_problem

BF16 = torch.bfloat16
SHAPE = LatentShape(1, 576, 512)


@pytest.fixture(autouse=True)
def kernel(device):
    """Skips where FlashInfer may not compile and its module for latents was not packed."""
    problem = trial_problem(FlashInferBackend, device, BF16, [SHAPE], 16)
    if problem is not None and "MissingJITCacheError" in problem:
        pytest.skip(problem)


@pytest.mark.parametrize("num_heads", [1, 16, pytest.param(128, marks=pytest.mark.slow)])
def test_ragged_batches(device, num_heads):
    contexts = [1, 15, 16, 17, 100, 333] if device.type == "cuda" else [1, 17, 40]
    problem = PagedProblem(FlashInferBackend, BF16, SHAPE, num_heads, contexts, device=device)
    for key, value in zip(problem.key, problem.value, strict=True):
        key[..., : SHAPE.value_dim] = value
    chunks = [1 + context // 3 for context in contexts]
    for pieces in (whole(problem), last_tokens(problem, [1] * len(contexts)), last_tokens(problem, chunks)):
        assert_close_to_exact(problem, pieces, AttentionParams(192**-0.5))


@pytest.mark.slow
def test_text(device):
    if not hasattr(modeling_deepseek_v3.DeepseekV3Attention, "expand_kv"):
        pytest.skip("Transformers before 5.24 has no latents to keep")
    # Without experts, in which a rounding may choose another one.
    fields = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "head_dim": 64, "first_k_dense_replace": 4}
    model = build_tiny("deepseek_v3", **fields).to(device, BF16)
    counted = compare_with_stock(model, random_prompts((3, 16, 33, 47), common_prefix=16), 12)
    assert counted["captured_steps"] > 0, counted["capture_problem"]
