"""Scales of quantized keys and values: kept with the model, because a checkpoint's user will want them."""

from __future__ import annotations

from transformers import PreTrainedModel

from hfpaged.quantization.checkpoint import Checkpoint
from hfpaged.quantization.disk_layout import KV_SCALES


def attach_kv_scales(model: PreTrainedModel, checkpoint: Checkpoint) -> None:
    """Register the scales that Transformers' own loaders drop as buffers of the modules that they are stored with."""
    for name, module in model.named_modules():
        for leaf in KV_SCALES:
            stored = f"{name}.{leaf}"
            if stored in checkpoint.tensors and not hasattr(module, leaf):
                module.register_buffer(leaf, checkpoint.read(stored).float(), persistent=False)
