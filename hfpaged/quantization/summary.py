"""What of a model is quantized, in words, for `engine.stats()`."""

from __future__ import annotations

from collections import Counter

from torch import nn

from hfpaged.quantization.packed_linear import EmulatedLinear, PackedLinear


def is_quantized(model: nn.Module) -> bool:
    """Whether a model was loaded from a quantized checkpoint, by hfpaged or by Transformers."""
    return bool(getattr(model, "is_quantized", False)) or any(
        isinstance(module, (PackedLinear, EmulatedLinear)) for module in model.modules()
    )


def quantized_modules(model: nn.Module) -> dict[str, int]:
    """How many layers run how: the format of their weights, what happens to their inputs, and what multiplies.

    On a CPU what multiplies goes without saying.
    """
    counts: Counter[str] = Counter()
    for module in model.modules():
        if isinstance(module, (PackedLinear, EmulatedLinear)):
            weight = module.format.value if isinstance(module, PackedLinear) else "dense"
            activation = module.activation
            inputs = "inputs as they are" if activation is None else f"inputs rounded to {activation.format}"
            counts[f"{weight} weights, {inputs}{_kernel_of(module)}"] += 1
    return dict(counts)


def _kernel_of(module: nn.Module) -> str:
    product = vars(module).get("forward")  # put there by runtime/device/fused_forwards.py
    if product is not None and hasattr(product, "fusion"):
        return f", by {product.fusion}"
    return ", dequantized at every call" if isinstance(module, PackedLinear) and not module.is_in_strips else ""
