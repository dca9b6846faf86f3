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
)

_COMPUTED = (torch.bfloat16, torch.float16)


def _norm() -> Guard:
    return all_of(
        nothing_in_between,
        needs("x", "weight", "out"),
        plain_together("x"),
        dtype_among("x", *_COMPUTED),
        same_dtype("x", "weight", "out"),
        same_width("x", "weight", "out"),
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
)
