"""Blocks are copied whole, whatever the dtype, and no other block changes."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hfpaged.runtime.attention.interface import LayerShape
from hfpaged.runtime.attention.native_backend import NativeBackend
from hfpaged.runtime.attention.torch_backend import TorchBackend
from hfpaged.runtime.kv_cache import KVCache
from hfpaged.runtime.paged_attention import SeenLayer

SHAPE = LayerShape(num_kv_heads=2, key_dim=4, value_dim=6)
BLOCKS = 6


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("backend", [NativeBackend, TorchBackend])
def test_copied_blocks_are_equal_and_the_others_as_before(backend, dtype):
    device = torch.device("cpu")
    if reason := backend.unavailable(device, dtype, [SHAPE], 16):
        pytest.skip(reason)
    cache = KVCache(backend(device, dtype, 16), [SeenLayer(nn.Identity(), SHAPE, dtype)] * 2, BLOCKS)
    tensors = [tensor for layer in cache.layers for tensor in (layer.key, layer.value)]
    for tensor in tensors:
        tensor.copy_(torch.randn(tensor.shape))
    before = [tensor.clone() for tensor in tensors]
    cache.mover.copy(((0, 3), (0, 4), (2, 1)))
    for tensor, old in zip(tensors, before, strict=True):
        assert torch.equal(tensor, old[[0, 2, 2, 0, 0, 5]])
