"""Packed weights on the device: the product that was chosen for it runs, and gives what the layer's own code gives."""

from __future__ import annotations

import pytest
import torch
from quantization import formats
from quantization.checkpoints import tiny_llama

import hfpaged
from hfpaged.fusion.product_catalogue import QUANTIZED_PRODUCTS
from hfpaged.fusion.registry import FusionRegistry
from hfpaged.quantization.packed_linear import PackedLinear
from hfpaged.quantization.products import choose_product
from hfpaged.runtime.device import fused_product
from hfpaged.runtime.device.fused_forwards import FusedForwards
from hfpaged.runtime.view import EngineView

WRITERS = (
    formats.modelopt_nvfp4, formats.compressed_nvfp4, formats.compressed_mxfp4, formats.compressed_int4,
    formats.modelopt_fp8,
)  # fmt: skip


@pytest.mark.parametrize("write", WRITERS, ids=lambda write: write.__name__)
def test_the_product_for_this_device_is_that_of_the_layers_own_code(device, write, tmp_path):
    saved = write(tmp_path / "checkpoint", tiny_llama(128, 256))
    model = hfpaged.from_pretrained(saved.folder, dtype=torch.bfloat16, device_map={"": device})
    view = EngineView(model, type(model))
    forwards = FusedForwards(view, torch.bfloat16, FusionRegistry(QUANTIZED_PRODUCTS))
    capability = fused_product.compute_capability(device)
    for name, module in view.model.named_modules():
        if not isinstance(module, PackedLinear):
            continue
        weight = saved.packed[name].weight
        assert torch.allclose(module.record().dequantize().cpu(), weight, rtol=1e-6)
        x = torch.randn(9, module.in_features, device=device, dtype=torch.bfloat16)
        own = PackedLinear.forward(module, x)
        if module.activation is None:
            expected = x.float() @ weight.to(device).t()
            assert (own.float() - expected).norm() <= 1e-2 * expected.norm()
        assert (module(x).float() - own.float()).norm() <= 2e-2 * own.float().norm()
    _, reason = choose_product(model.model.layers[0].mlp.up_proj.arithmetic, capability)
    refused = {key: count for key, count in forwards.refusals.items() if key.startswith("product")}
    assert refused == ({} if reason is None else {f"product: {reason}": 14})
    assert forwards.fused["product"] == (14 if reason is None else 0)
