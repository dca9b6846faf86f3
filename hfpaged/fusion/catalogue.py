"""The fused operations of the CPU kernels.

The kernels compute in fp32 and round to the dtype of the activations (T below) exactly where the replaced modules do.
Norm weights are handed to them as fp32 copies, so they cannot be read in a wrong dtype; the guards make sure that the
module's own result would have been of type T.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hfpaged.fusion.guards import (
    Guard,
    all_of,
    dtype_among,
    needs,
    nothing_in_between,
    plain_on,
    promotes_to,
    same_dtype,
    same_width,
)


@dataclass(frozen=True)
class Fusion:
    """One fused operation.

    Attributes:
        name: unique.
        replaces: the module code that it stands for.
        convention: where it rounds.
        backends: kernel libraries that have it.
        guard: the only way in.
    """

    name: str
    replaces: str
    convention: str
    backends: tuple[str, ...]
    guard: Guard


_COMPUTED = (torch.float32, torch.bfloat16, torch.float16)


def _cpu(*conditions: Guard) -> Guard:
    return all_of(nothing_in_between, plain_on("cpu"), *conditions)


def _linear(*conditions: Guard) -> Guard:
    return _cpu(
        needs("x", "weight", "out"),
        dtype_among("x", *_COMPUTED),
        same_dtype("x", "weight", "bias", "out"),
        same_width("x", "weight"),
        *conditions,
    )


def _norm(*conditions: Guard) -> Guard:
    return _cpu(
        needs("x", "out"),
        dtype_among("x", *_COMPUTED),
        same_dtype("x", "out", "residual"),
        same_width("x", "gamma", "beta", "out", "residual"),
        *conditions,
    )


def _packed(*conditions: Guard) -> Guard:
    """A product with weights in 4 bits: codes in words, scales in bytes, activations in a computed dtype."""
    return _cpu(
        needs("x", "codes", "scales", "out"),
        dtype_among("x", *_COMPUTED),
        same_dtype("x", "out"),
        dtype_among("codes", torch.int32),
        dtype_among("scales", torch.uint8),
        dtype_among("bias", *_COMPUTED),
        *conditions,
    )


FUSIONS = (
    Fusion(
        "embedding",
        "embed_tokens(ids) * scale",
        "T(row * scale)",
        ("cpu",),
        _cpu(needs("table", "out"), dtype_among("table", *_COMPUTED), same_dtype("table", "out")),
    ),
    Fusion(
        "linear",
        "act(linear(x))",
        "y = T(fp32 sum + bias); T(act(y))",
        ("cpu",),
        _linear(),
    ),
    Fusion(
        "linear_residual",
        "residual + linear(x) * multiplier",
        "y = T(fp32 sum + bias); T(residual + T(y * multiplier))",
        ("cpu",),
        _linear(needs("residual"), same_dtype("x", "residual"), same_width("out", "residual")),
    ),
    Fusion(
        "gate_up_activation",
        "act(gate_proj(x)) * up_proj(x)",
        "T(T(act(T(gate))) * T(up))",
        ("cpu",),
        _linear(needs("up_weight"), same_dtype("x", "up_weight", "up_bias"), same_width("x", "up_weight")),
    ),
    Fusion(
        "packed_linear",
        "act(packed_linear(x))",
        "y = T(fp32 sum of the groups' scaled sums + bias); T(act(y))",
        ("cpu",),
        _packed(),
    ),
    Fusion(
        "packed_linear_residual",
        "residual + packed_linear(x) * multiplier",
        "y = T(fp32 sum of the groups' scaled sums + bias); T(residual + T(y * multiplier))",
        ("cpu",),
        _packed(needs("residual"), same_dtype("x", "residual"), same_width("out", "residual")),
    ),
    Fusion(
        "packed_gate_up_activation",
        "act(gate_proj(x)) * up_proj(x), both in 4 bits",
        "T(T(act(T(gate))) * T(up))",
        ("cpu",),
        _packed(
            needs("up_codes", "up_scales"),
            dtype_among("up_codes", torch.int32),
            dtype_among("up_scales", torch.uint8),
            dtype_among("up_bias", *_COMPUTED),
        ),
    ),
    Fusion(
        "rms_norm.rounded_then_scaled",
        "weight * (x.float() * rsqrt(mean(x.float()^2) + eps)).to(x.dtype)",
        "T(T(x * r) * gamma), as Llama; PyTorch promotes it to gamma's dtype where that is not T",
        ("cpu",),
        _norm(promotes_to("x", "gamma")),
    ),
    Fusion(
        "rms_norm.scaled_then_rounded",
        "(x.float() * rsqrt(...) * gamma).to(x.dtype), gamma = weight or 1 + weight.float()",
        "T(x * r * gamma) in fp32, as Gemma and OLMo 2",
        ("cpu",),
        _norm(dtype_among("gamma", *_COMPUTED)),
    ),
    Fusion(
        "layer_norm",
        "layer_norm(x, weight, bias)",
        "T((x - mean) * r * gamma + beta) in fp32",
        ("cpu",),
        _norm(dtype_among("gamma", *_COMPUTED), dtype_among("beta", *_COMPUTED)),
    ),
    Fusion(
        "rotary_kv_write",
        "q, k = norm(q), norm(k); q, k = rotary(q, k); cache.update(k, v)",
        "with tables in T: T(T(x * cos) + T(rotated * sin)); with tables in fp32: T(x * cos + rotated * sin)",
        ("cpu",),
        _cpu(
            needs("x", "cache"),
            dtype_among("x", *_COMPUTED),
            same_dtype("x", "cache"),
            dtype_among("table", *_COMPUTED),
        ),
    ),
    Fusion(
        "paged_attention",
        "attention over the cache, with scale, window, softcap and sinks",
        "scores, softmax and sums in fp32; T(sum)",
        ("cpu",),
        _cpu(
            needs("x", "cache", "out"),
            dtype_among("x", *_COMPUTED),
            same_dtype("x", "cache", "out"),
            dtype_among("sinks", *_COMPUTED),
        ),
    ),
    Fusion(
        "router",
        "topk(softmax(logits.float()))",
        "in fp32; weights normalized in fp32, then rounded to T where the module does",
        ("cpu",),
        _cpu(needs("x"), dtype_among("x", *_COMPUTED)),
    ),
    Fusion(
        "head_argmax",
        "argmax(lm_head(x)), softcapped or divided",
        "every operation on the logits rounds to T; the first of equal ones wins",
        ("cpu",),
        _linear(),
    ),
)
