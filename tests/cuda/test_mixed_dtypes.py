"""The mixed-dtype fault over FlashInfer's norms, whose stand-in reads the bytes of a weight as the library does.

Gemma's norms keep their weights in fp32 beside bf16 activations without an error. Read as bf16, a weight gives twice as
many numbers: finite ones where the low half of its bits is empty, and NaN where that half happens to be one.
"""

from __future__ import annotations

import pytest
import torch
from batches import left_padded, random_prompts
from families import build_tiny
from torch import nn
from transformers import PreTrainedModel

import hfpaged
from hfpaged.fusion.flashinfer_catalogue import FLASHINFER_FUSIONS
from hfpaged.fusion.operand import FusionValues, Operand
from hfpaged.fusion.registry import FusionRefused, FusionRegistry

NORMS = 17  # of the tiny Gemma 2
BITS = {"without low bits": 0x3F00_0000, "with low bits": 0x3F00_7FC0}  # 0.5, and a little more
PROMPTS = random_prompts((12, 5))


@pytest.fixture(autouse=True)
def machine(cuda):
    return cuda


@pytest.fixture(params=BITS)
def gemma(request) -> PreTrainedModel:
    model = build_tiny("gemma2").to(torch.bfloat16)
    value = torch.tensor(BITS[request.param], dtype=torch.int32).view(torch.float32).item()
    for norm in norms_of(model):
        norm.weight = nn.Parameter(torch.full_like(norm.weight, value, dtype=torch.float32))
    return model


def norms_of(model: PreTrainedModel) -> list[nn.Module]:
    return [module for module in model.modules() if type(module).__name__ == "Gemma2RMSNorm"]


def refused_norms(model: PreTrainedModel) -> dict[str, int]:
    refusals = hfpaged.engine(model).stats()["tier_refusals"]
    return {reason: count for reason, count in refusals.items() if reason.startswith("norm")}


def stock_logits(model: PreTrainedModel) -> torch.Tensor:
    """Behind each prompt alone."""
    with torch.no_grad():
        return torch.stack([model(torch.tensor([prompt])).logits[0, -1].float() for prompt in PROMPTS])


def test_kernels_without_a_guard_corrupt_the_output(gemma, machine, request):
    right = stock_logits(gemma)
    kernel = machine.library.norm.gemma_rmsnorm
    for norm in norms_of(gemma):
        norm.forward = lambda x, norm=norm: kernel(x.contiguous(), norm.weight.detach(), norm.eps)
    wrong = stock_logits(gemma)
    if request.node.callspec.id == "without low bits":
        assert torch.isfinite(wrong).all()
        assert (wrong - right).norm() > 0.1 * right.norm()
    else:
        assert torch.isnan(wrong).all()


def test_the_modules_own_code_runs_and_is_counted(gemma, machine, monkeypatch):
    right = stock_logits(gemma)
    calls = []
    kernel = machine.library.norm.gemma_rmsnorm
    monkeypatch.setattr(machine.library.norm, "gemma_rmsnorm", lambda *args: calls.append(args) or kernel(*args))
    with hfpaged.patched(gemma):
        output = gemma.generate(
            **left_padded(PROMPTS), max_new_tokens=1, do_sample=False, pad_token_id=0, eos_token_id=-1,
            output_logits=True, return_dict_in_generate=True,
        )  # fmt: skip
        stats, refused = hfpaged.engine(gemma).stats(), refused_norms(gemma)
    assert not calls
    assert stats["steps"] > 0 and not stats["fallbacks"]
    assert refused == {"norm: weight is float32 but x is bfloat16": NORMS}
    assert (output.logits[0].float() - right).norm() < 5e-2 * right.norm()


def test_weights_that_become_fp32_behind_the_guard_take_the_modules_own_code(machine, monkeypatch):
    model = build_tiny("gemma2").to(torch.bfloat16)
    with hfpaged.patched(model):
        inputs = left_padded(PROMPTS)
        model.generate(**inputs, max_new_tokens=1, do_sample=False, pad_token_id=0)
        assert not refused_norms(model)
        for norm in norms_of(model):
            norm.weight.data = torch.full_like(norm.weight, 0.5, dtype=torch.float32)
        right = stock_logits(model)
        output = model.generate(
            **inputs, max_new_tokens=1, do_sample=False, pad_token_id=0, output_logits=True,
            return_dict_in_generate=True,
        )  # fmt: skip
        refusals = refused_norms(model)
    assert refusals == {"norm: weight is float32 but x is bfloat16": NORMS}
    assert (output.logits[0].float() - right).norm() < 5e-2 * right.norm()


@pytest.mark.parametrize("name", [fusion.name for fusion in FLASHINFER_FUSIONS if "norm" in fusion.name])
def test_the_registry_refuses_by_name_and_counts(name):
    registry = FusionRegistry(FLASHINFER_FUSIONS)
    rows = Operand.rows(64, torch.bfloat16)
    values = FusionValues({"x": rows, "residual": rows, "out": rows, "weight": Operand(torch.float32, (64,))})
    with pytest.raises(FusionRefused, match="weight is float32 but x is bfloat16"):
        registry.admit(name, values)
    assert sum(registry.refusals.values()) == 1
