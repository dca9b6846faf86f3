"""Layers that rearrange their weights in their first forward are right patched, and right again unpatched."""

from __future__ import annotations

import pytest
import torch
from oracle import assert_stock_text
from quantization.checkpoints import tiny_llama
from torch import nn

import hfpaged
from hfpaged.errors import UnsupportedModelError


class RearrangingLinear(nn.Module):
    """As GPTQModel's: the first forward transposes the weight in place of the buffer, and notes that it has."""

    __module__ = "gptqmodel.fake"

    def __init__(self, linear: nn.Linear):
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.register_buffer("qweight", linear.weight.detach().clone())
        self.linear_mode = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.linear_mode is None and not self.training:
            self.qweight = self.qweight.t().contiguous()
            self.linear_mode = "inference"
        return x @ (self.qweight if self.linear_mode == "inference" else self.qweight.t())


@pytest.fixture
def rearranging():
    llama = tiny_llama()
    for layer in llama.model.layers:
        # Not square, so that a weight that was transposed twice cannot be multiplied.
        layer.mlp.down_proj = RearrangingLinear(layer.mlp.down_proj)
    return llama.eval()


def test_patched_and_unpatched(rearranging):
    ids = torch.tensor([[5, 6, 7]])
    hfpaged.patch(rearranging)
    assert_stock_text(rearranging)
    hfpaged.unpatch(rearranging)
    with torch.no_grad():
        assert torch.isfinite(rearranging(ids).logits).all()


def test_train_mode_is_refused_before_the_weights_are_touched(rearranging):
    rearranging.train()
    with pytest.raises(UnsupportedModelError, match="train mode"):
        hfpaged.patch(rearranging)
    assert all(layer.mlp.down_proj.linear_mode is None for layer in rearranging.model.layers)
