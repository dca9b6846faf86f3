"""The mixed-dtype fault: a bf16 kernel reads an fp32 gamma. Reproduced without a guard, harmless through the registry.

Gemma's norms multiply by 1 + weight.float(), so gamma is fp32 although the parameter is bf16. Values that are exact in
bf16 and values that are not fail differently: the former read as finite garbage, the latter as NaN among others.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

import hfpaged
from hfpaged.fusion.operand import FusionValues, Operand
from hfpaged.fusion.registry import FusionRefused, FusionRegistry
from hfpaged.program.abi import NormKind
from hfpaged.program.norms import gamma_of, identify_norm

PROMPT = [5, 17, 3, 99, 42, 8]
# 1 + weight: 1.5 has the low half of an fp32 number empty; 1.00390613 has bits there that read as a NaN.
WITHOUT_LOW_BITS = 0.5
NAN_BITS = 0x3F80_7FC0  # as fp32 1.00390..., whose low half is a bf16 NaN


def weight_of(form: str) -> float:
    """What to put into the weights, so that 1 + weight has the wanted bits."""
    if form == "without low bits":
        return WITHOUT_LOW_BITS
    return torch.tensor(NAN_BITS, dtype=torch.int32).view(torch.float32).item() - 1.0


def unguarded_norm(x: torch.Tensor, gamma: torch.Tensor, epsilon: float) -> torch.Tensor:
    """A fused kernel for bf16 that takes the address of gamma and asks nothing."""
    read = gamma.contiguous().view(torch.bfloat16)[: x.shape[-1]].float()
    wide = x.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + epsilon) * read).to(x.dtype)


@pytest.fixture
def gemma(tiny_model, request) -> PreTrainedModel:
    model = tiny_model("gemma2").to(torch.bfloat16).eval()
    norms = [module for module in model.modules() if type(module).__name__ == "Gemma2RMSNorm"]
    assert norms
    for norm in norms:
        # In fp32, or the low bits could not be held; a model that keeps its norms in fp32 has them.
        norm.weight = nn.Parameter(torch.full_like(norm.weight, weight_of(request.param), dtype=torch.float32))
    return model


def logits(model: PreTrainedModel) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.tensor([PROMPT])).logits[0].float()


FORMS = pytest.mark.parametrize("gemma", ["without low bits", "with low bits"], indirect=True)


@FORMS
def test_an_unguarded_kernel_corrupts_the_output(gemma, request):
    right = logits(gemma)
    for module in gemma.modules():
        if type(module).__name__ == "Gemma2RMSNorm":
            gamma = 1.0 + module.weight.float()
            module.forward = lambda x, gamma=gamma, eps=module.eps: unguarded_norm(x, gamma.detach(), eps)
    wrong = logits(gemma)
    if "without" in request.node.name:
        assert torch.isfinite(wrong).all()
        assert (wrong - right).norm() > 0.3 * right.norm()
    else:
        assert torch.isnan(wrong).all()
        assert wrong.argmax(-1).unique().tolist() == [0]  # token 0 for ever


@FORMS
def test_through_the_registry_the_logits_are_those_of_the_modules(gemma):
    right = logits(gemma)[-1]
    ids = torch.tensor([PROMPT])
    with hfpaged.patched(gemma, num_blocks=32):
        output = gemma.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=1, do_sample=False, pad_token_id=0,
            output_logits=True, return_dict_in_generate=True,
        )  # fmt: skip
        stats = hfpaged.engine(gemma).stats()
    assert (output.logits[0][0].float() - right).norm() < 5e-2 * right.norm()
    assert stats["steps"] > 0 and not stats["fallbacks"]
    assert stats["tier"] != "modules"  # the fused norms did run


@FORMS
def test_kernels_get_the_effective_gamma_in_fp32(gemma):
    norm = next(module for module in gemma.modules() if type(module).__name__ == "Gemma2RMSNorm")
    described = identify_norm(norm, norm.weight.numel(), torch.bfloat16)
    assert described.kind == NormKind.RMS_SCALED_THEN_ROUNDED and described.gamma_offset == 1.0
    assert torch.equal(gamma_of(described), 1.0 + norm.weight.float())


def test_a_norm_that_rounds_first_is_refused_an_fp32_gamma_and_counted():
    registry = FusionRegistry()
    rows = Operand.rows(8, torch.bfloat16)
    values = FusionValues({"x": rows, "out": rows, "gamma": Operand(torch.float32, (8,))})
    with pytest.raises(FusionRefused, match="gamma is float32 but x is bfloat16"):
        registry.admit("rms_norm.rounded_then_scaled", values)
    assert sum(registry.refusals.values()) == 1


@FORMS
@pytest.mark.parametrize("tier", ["program", "leaves", "modules"])
def test_each_tier_has_the_tokens_of_the_modules(gemma, tier):
    ids = torch.tensor([PROMPT])
    arguments = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 1, "do_sample": False, "pad_token_id": 0}
    wanted = gemma.generate(ids, **arguments)
    with hfpaged.patched(gemma, num_blocks=32, tier=tier):
        assert torch.equal(gemma.generate(ids, **arguments), wanted)
        stats = hfpaged.engine(gemma).stats()
    assert stats["tier"] == tier and not stats["fallbacks"]
    assert stats["fusion_refusals"] == {}  # the kernels take the effective gamma as what it is


class Wrapped(torch.Tensor):
    """What a quantization library might have put there: its numbers are not what its memory holds."""


def test_what_the_guard_of_the_program_refuses_is_counted_and_logged_once(tiny_model, caplog):
    model = tiny_model("llama").eval()
    for layer in model.model.layers:
        weight = layer.mlp.down_proj.weight
        layer.mlp.down_proj.weight = nn.Parameter(weight.detach().as_subclass(Wrapped), requires_grad=False)
    ids = torch.tensor([PROMPT])
    arguments = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    wanted = model.generate(ids, **arguments)
    with caplog.at_level("INFO", logger="hfpaged.fusion.registry"), hfpaged.patched(model, num_blocks=32):
        assert torch.equal(model.generate(ids, **arguments), wanted)
        stats = hfpaged.engine(model).stats()
    assert stats["tier"] == "leaves"  # the program asks for all of its guards
    assert "weight is a tensor subclass" in stats["tier_reason"]
    assert stats["fusion_refusals"]["linear_residual: weight is a tensor subclass"] == 1
    assert stats["fusion_refusals"]["linear: weight is a tensor subclass"] >= len(model.model.layers)
    reasons = [record.getMessage() for record in caplog.records]
    assert len(reasons) == len(set(reasons)) == len(stats["fusion_refusals"])
