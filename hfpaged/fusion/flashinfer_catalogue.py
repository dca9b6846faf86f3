"""The fused operations of FlashInfer that hfpaged uses.

Its kernels choose by the dtype of the input and read everything else as if it had that dtype, without a look: a norm
weight in fp32 beside activations in bf16 gives garbage and no error. So nothing runs but what these guards admit. A
weight is described as it is stored: the kernels, unlike the modules, add Gemma's one themselves.
"""

from __future__ import annotations

import torch

from hfpaged.fusion.catalogue import Fusion
from hfpaged.fusion.guards import (
    Guard,
    all_of,
    dtype_among,
    needs,
    nothing_in_between,
    plain_together,
    same_dtype,
    same_width,
    width_among,
)

_COMPUTED = (torch.bfloat16, torch.float16)
# Head dimensions that the rotation was compiled for.
ROTATION_DIMS = (64, 128, 256)


def _norm() -> Guard:
    return all_of(
        nothing_in_between,
        needs("x", "weight", "out"),
        plain_together("x"),
        dtype_among("x", *_COMPUTED),
        same_dtype("x", "weight", "out", "residual"),
        same_width("x", "weight", "out", "residual"),
    )


def _activation() -> Guard:
    weights = ("weight_0", "weight_1", "weight_2")
    return all_of(
        nothing_in_between,
        needs("x", "out", *weights[:2]),
        plain_together("x"),
        dtype_among("x", *_COMPUTED),
        same_dtype("x", "out", *weights),
    )


def _rotation() -> Guard:
    return all_of(
        nothing_in_between,
        needs("query", "key"),
        plain_together("query"),
        dtype_among("query", *_COMPUTED),
        same_dtype("query", "key"),
        same_width("query", "key"),
        width_among("query", *ROTATION_DIMS),
    )


def _gated(name: str, activation: str) -> Fusion:
    return Fusion(
        f"flashinfer.{name}",
        f"{activation}(gate) * up",
        f"T({activation}(gate) * up) in fp32: modules round the activation as well, so that last bits may differ",
        ("flashinfer",),
        _activation(),
    )


FLASHINFER_FUSIONS = (
    Fusion(
        "flashinfer.rms_norm",
        "weight * (x * rsqrt(mean(x^2) + eps)), rounded before the weight (Llama) or behind it (OLMo 2)",
        "T(x * r * weight) in fp32: Llama's modules round once more, so that last bits may differ",
        ("flashinfer",),
        _norm(),
    ),
    Fusion(
        "flashinfer.gemma_rms_norm",
        "(x * rsqrt(mean(x^2) + eps) * (1 + weight.float())).to(x.dtype)",
        "T(x * r * (1 + weight)) in fp32",
        ("flashinfer",),
        _norm(),
    ),
    Fusion(
        "flashinfer.fused_add_rmsnorm",
        "residual + x, and its RMS norm",
        "T(residual + x); the norm in fp32 of the sum before it was rounded, so that last bits may differ",
        ("flashinfer",),
        all_of(needs("residual"), _norm()),
    ),
    Fusion(
        "flashinfer.gemma_fused_add_rmsnorm",
        "residual + x, and its RMS norm as Gemma's",
        "T(residual + x); the norm in fp32 of the sum before it was rounded, so that last bits may differ",
        ("flashinfer",),
        all_of(needs("residual"), _norm()),
    ),
    _gated("silu_and_mul", "silu"),
    _gated("gelu_and_mul", "gelu"),
    _gated("gelu_tanh_and_mul", "gelu_tanh"),
    Fusion(
        "flashinfer.rotation",
        "q * cos + rotate_half(q) * sin, and the same for k",
        "T(q * cos + rotated * sin) in fp32: modules round both products as well, so that last bits may differ",
        ("flashinfer",),
        _rotation(),
    ),
)
