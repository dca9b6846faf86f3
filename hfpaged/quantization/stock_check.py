"""Finds what Transformers would load without an error and compute wrong numbers with."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from hfpaged.errors import CheckpointError
from hfpaged.quantization.checkpoint import Checkpoint
from hfpaged.quantization.disk_layout import KV_SCALES, is_quantization_name

_GGML_NVFP4 = 40
# Codes that stand for zero in symmetric 4-bit GPTQ: version 1 stores one less than what is subtracted.
_SYMMETRIC_ZEROS = {"gptq": 7, "gptq_v2": 8}


def check_stock_checkpoint(checkpoint: Checkpoint) -> None:
    """Refuse checkpoints that Transformers is known to misread.

    Raises:
        CheckpointError: saying which tensor or field is at fault.
    """
    config = checkpoint.quantization
    if config is None:
        _require_dense(checkpoint)
    elif config.get("quant_method") == "gptq":
        _check_gptq(checkpoint, config)


def check_loading_info(info: dict[str, Any]) -> None:
    """Refuse a model some of whose quantized tensors were missing, left over, or of another shape.

    Raises:
        CheckpointError: naming the first one.
    """
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        for key in _names(info.get(kind) or ()):
            leaf = key.rpartition(".")[2]
            if leaf not in KV_SCALES and (is_quantization_name(leaf) or kind == "mismatched_keys"):
                raise CheckpointError(f"{key} was {kind.removesuffix('_keys')} when the checkpoint was loaded")


def _names(keys: Iterable[Any]) -> list[str]:
    return sorted(key if isinstance(key, str) else key[0] for key in keys)


def _require_dense(checkpoint: Checkpoint) -> None:
    for name, stored in checkpoint.tensors.items():
        if stored.dtype.startswith("F8") or name.endswith((".weight_packed", ".qweight")):
            raise CheckpointError(f"{name} is quantized ({stored.dtype}), but no config says how")


def _check_gptq(checkpoint: Checkpoint, config: dict[str, Any]) -> None:
    if config.get("backend") == "gptq_torch_fused" and not config.get("sym", True):
        raise CheckpointError("the backend gptq_torch_fused computes asymmetric GPTQ weights wrong; leave it out")
    version = config.get("checkpoint_format") or "gptq"
    if not config.get("sym", True) or config.get("bits") != 4 or version not in _SYMMETRIC_ZEROS:
        return
    for name in checkpoint.tensors:
        if name.endswith(".qzeros"):
            zeros = checkpoint.read(name).view(torch.uint8)
            stored = set((zeros & 15).unique().tolist()) | set((zeros >> 4).unique().tolist())
            other = {7, 8} - {_SYMMETRIC_ZEROS[version]}
            if stored == other:
                raise CheckpointError(
                    f"{name} holds {stored.pop()} everywhere, which is not what checkpoint_format {version!r} stores"
                )


def check_gguf(file: Path) -> None:
    """Refuse a GGUF file with NVFP4 tensors that have a scale of their own: Transformers leaves the scale out.

    Raises:
        CheckpointError: naming the first scale.
    """
    try:
        from gguf import GGUFReader
    except ImportError:
        return  # without the package Transformers does not read the file either, and says so
    if not file.exists():
        return
    tensors = {tensor.name: tensor for tensor in GGUFReader(file).tensors}
    for name, tensor in tensors.items():
        scale = f"{name.removesuffix('.weight')}.scale"
        if int(tensor.tensor_type) == _GGML_NVFP4 and scale in tensors:
            raise CheckpointError(f"{scale} would be left out: Transformers reads NVFP4 without tensor scales")
