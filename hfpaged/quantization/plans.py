"""Which checkpoints hfpaged loads itself, and by which plan."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hfpaged.errors import CheckpointError
from hfpaged.quantization.checkpoint import Checkpoint
from hfpaged.quantization.scheme import (
    COMPRESSED_FORMATS,
    QuantizationPlan,
    compressed_tensors_plan,
    fp8_plan,
    modelopt_plan,
)


def own_method(checkpoint: Checkpoint) -> str | None:
    """The quantization method of a checkpoint, if it is hfpaged's to load; None: Transformers loads it."""
    config = checkpoint.quantization
    method = None if config is None else config.get("quant_method")
    if method == "modelopt" or (config is None and checkpoint.modelopt is not None):
        return "modelopt"
    if method == "compressed-tensors" and _all_own_formats(config):
        return method
    if method == "fp8" and _is_ragged(checkpoint, config):
        return method
    return None


def plan_of(checkpoint: Checkpoint, config: Any) -> QuantizationPlan:
    """The plan of a checkpoint that is hfpaged's to load.

    Args:
        config: the `PackedConfig` in use; its `source_method` decides.

    Raises:
        CheckpointError: its configs contradict each other or ask for what is not supported.
    """
    if config.source_method == "compressed-tensors":
        return compressed_tensors_plan(checkpoint.quantization)
    if config.source_method == "fp8":
        return fp8_plan(checkpoint.quantization)
    if checkpoint.quantization is None and checkpoint.modelopt is None:
        raise CheckpointError("neither config.json nor hf_quant_config.json says how the weights are quantized")
    return modelopt_plan(checkpoint.quantization, checkpoint.modelopt)


def _all_own_formats(config: Mapping[str, Any]) -> bool:
    groups = (config.get("config_groups") or {}).values()
    formats = {group.get("format") or config.get("format") for group in groups}
    return bool(formats) and formats <= set(COMPRESSED_FORMATS) and all(map(_has_own_bits, groups))


def _has_own_bits(group: Mapping[str, Any]) -> bool:
    # "pack-quantized" holds other widths too, and compressed-tensors quantizes more kinds of inputs than we emulate.
    weights, inputs = group.get("weights") or {}, group.get("input_activations")
    return weights.get("num_bits") == 4 and (inputs is None or inputs.get("type") == "float")


def _is_ragged(checkpoint: Checkpoint, config: Mapping[str, Any]) -> bool:
    """Whether some weight is no whole number of blocks: Transformers derives the block from the grid of the scales."""
    block = config.get("weight_block_size")
    if block is None:
        return False
    return any(
        stored.dtype == "F8_E4M3" and any(size % part for size, part in zip(stored.shape, block, strict=True))
        for stored in checkpoint.tensors.values()
    )
