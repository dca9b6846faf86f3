"""Shared prefixes on the card: two merged parts against attention in fp64, and text."""

from __future__ import annotations

import pytest
import torch
from batches import random_prompts
from gpu.ragged import assert_close_to_exact
from gpu.shapes import random_model
from gpu.test_engine import compare_with_stock
from native.paged_problem import PagedProblem, last_tokens, share_first_blocks

from hfpaged.runtime.attention import flashinfer_cascade
from hfpaged.runtime.attention.flashinfer_backend import FlashInferBackend
from hfpaged.runtime.attention.interface import AttentionParams, LayerShape

BF16 = torch.bfloat16


@pytest.fixture(autouse=True)
def always(monkeypatch):
    monkeypatch.setattr(flashinfer_cascade, "LEAST_SAVED_BYTES", 1)


@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("softcap", [None, 20.0])
def test_ragged_batches(device, dim, softcap):
    contexts = [500, 700, 33, 1000, 499] if device.type == "cuda" else [50, 70, 33]
    problem = PagedProblem(FlashInferBackend, BF16, LayerShape(2, dim, dim), 8, contexts, device=device)
    share_first_blocks(problem)
    pieces = last_tokens(problem, [1] * len(contexts))
    for _ in range(3):
        assert_close_to_exact(problem, pieces, AttentionParams(dim**-0.5, softcap=softcap))
    assert problem.backend.shared_prefix_steps == 2


@pytest.mark.slow
def test_text(device):
    model = random_model("tiny", device, BF16)
    counted = compare_with_stock(model, random_prompts((70, 80, 100), common_prefix=64), 12)
    assert counted["shared_prefix_steps"] > 0
