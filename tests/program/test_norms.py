"""Identification of normalization modules by what they compute, not by what they are called."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers.models.cohere.modeling_cohere import CohereLayerNorm
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm

from hfpaged.program.abi import NormKind
from hfpaged.program.description import NotRecognized
from hfpaged.program.norms import beta_of, gamma_of, identify_norm

WIDTH = 48
KNOWN = [
    (LlamaRMSNorm, NormKind.RMS_ROUNDED_THEN_SCALED, 0.0),
    (Olmo2RMSNorm, NormKind.RMS_SCALED_THEN_ROUNDED, 0.0),
    (Gemma3RMSNorm, NormKind.RMS_SCALED_THEN_ROUNDED, 1.0),
    (nn.LayerNorm, NormKind.LAYER_NORM, 0.0),
    (CohereLayerNorm, NormKind.LAYER_NORM, 0.0),
]


@pytest.mark.parametrize("cls, kind, offset", KNOWN, ids=lambda value: getattr(value, "__name__", None))
def test_half_precision_tells_the_rounding_conventions_apart(cls, kind, offset):
    module = cls(WIDTH).to(torch.bfloat16)
    norm = identify_norm(module, WIDTH, torch.bfloat16)
    assert (norm.kind, norm.gamma_offset, norm.width) == (kind, offset, WIDTH)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_present_weights_do_not_matter(dtype):
    plain, trained = Gemma3RMSNorm(WIDTH).to(dtype), Gemma3RMSNorm(WIDTH).to(dtype)
    trained.weight.data.normal_()
    assert identify_norm(plain, WIDTH, dtype).kind == identify_norm(trained, WIDTH, dtype).kind
    assert torch.equal(gamma_of(identify_norm(trained, WIDTH, dtype)), trained.weight.float() + 1)


def test_a_layer_norm_without_weights_has_a_gamma_of_ones_and_no_beta():
    norm = identify_norm(nn.LayerNorm(WIDTH, elementwise_affine=False), WIDTH, torch.float32)
    assert torch.equal(gamma_of(norm), torch.ones(WIDTH))
    assert beta_of(norm) is None


def test_identification_leaves_the_weights_alone():
    module = LlamaRMSNorm(WIDTH)
    before = module.weight
    identify_norm(module, WIDTH, torch.float32)
    assert module.weight is before
    assert torch.equal(before, torch.ones(WIDTH))


class MaxNorm(nn.Module):
    """Divides by the largest element: no norm of the program."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))
        self.eps = 1e-6

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x / (x.abs().amax(-1, keepdim=True) + self.eps) * self.weight


class WithoutEpsilon(LlamaRMSNorm):
    """Announces an epsilon and does not use it."""

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return self.weight * (hidden_states * torch.rsqrt(hidden_states.pow(2).mean(-1, keepdim=True)))


@pytest.mark.parametrize("module", [MaxNorm(), WithoutEpsilon(WIDTH), nn.GroupNorm(4, WIDTH)], ids=type)
def test_other_formulas_are_refused(module):
    with pytest.raises(NotRecognized):
        identify_norm(module, WIDTH, torch.float32)


def test_a_module_that_returns_another_dtype_is_refused():
    # bf16 activations times an fp32 weight are fp32 in PyTorch.
    with pytest.raises(NotRecognized, match="changes the dtype"):
        identify_norm(LlamaRMSNorm(WIDTH), WIDTH, torch.bfloat16)
