"""FlashInfer's functions without a plan: norms, activations, rotations and merging, see fake_flashinfer."""

from __future__ import annotations

from typing import Any

import torch
from standin.contract import require
from torch.nn import functional


def _as_read(weight: torch.Tensor, dtype: torch.dtype, width: int) -> torch.Tensor:
    """The weight as the kernels see it: its bytes, taken for numbers of the input's dtype."""
    return weight.contiguous().view(-1).view(torch.uint8).view(dtype)[:width]


def rmsnorm(input, weight, eps=1e-6, out=None, enable_pdl=None):
    """Chooses by the dtype of the input, and looks at no other, as the CUDA kernels do."""
    require(input.dtype in (torch.bfloat16, torch.float16), f"norms are not for {input.dtype}")
    require(input.dim() in (2, 3) and input.is_contiguous(), "norms are of contiguous rows")
    wide = input.float()
    unit = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return (unit * _as_read(weight, input.dtype, input.shape[-1]).float()).to(input.dtype)


def gemma_rmsnorm(input, weight, eps=1e-6, out=None, enable_pdl=None):
    """The same with one more than the weight."""
    return rmsnorm(input, (_as_read(weight, input.dtype, input.shape[-1]).float() + 1).to(input.dtype), eps)


def fused_add_rmsnorm(input, residual, weight, eps=1e-6, enable_pdl=None):
    """In place: the sum goes to the residual; its norm, taken before the sum was rounded, to the input."""
    _add_in_place(input, residual, _as_read(weight, input.dtype, input.shape[-1]).float(), eps)


def gemma_fused_add_rmsnorm(input, residual, weight, eps=1e-6, enable_pdl=None):
    """The same with one more than the weight."""
    _add_in_place(input, residual, _as_read(weight, input.dtype, input.shape[-1]).float() + 1, eps)


def _add_in_place(input: torch.Tensor, residual: torch.Tensor, scale: torch.Tensor, eps: float) -> None:
    require(input.dtype in (torch.bfloat16, torch.float16), f"norms are not for {input.dtype}")
    require(input.dim() == 2 and input.is_contiguous() and residual.is_contiguous(), "norms are of contiguous rows")
    require(input.data_ptr() != residual.data_ptr(), "what is added is what it is added to")
    total = input.float() + _as_read(residual, input.dtype, residual.numel()).view(input.shape).float()
    residual.copy_(total)
    input.copy_(total * torch.rsqrt(total.pow(2).mean(-1, keepdim=True) + eps) * scale)


def merge_state(v_a, s_a, v_b, s_b):
    """Of outputs [n, H, D] over two parts, with the logarithms to the base 2 of their sums of exponentials, [n, H]."""
    require(v_a.shape == v_b.shape and s_a.shape == s_b.shape == v_a.shape[:2], "the states' shapes")
    require(v_a.dtype == v_b.dtype and s_a.dtype == s_b.dtype == torch.float32, "the states' dtypes")
    require(torch.isfinite(s_a).all() and torch.isfinite(s_b).all(), "an empty part")
    s = torch.logaddexp2(s_a, s_b)
    weight_a, weight_b = (torch.exp2(one - s)[..., None] for one in (s_a, s_b))
    return (v_a.float() * weight_a + v_b.float() * weight_b).to(v_a.dtype), s


def _act_and_mul(input: torch.Tensor, activation: Any) -> torch.Tensor:
    require(input.dtype in (torch.bfloat16, torch.float16), f"activations are not for {input.dtype}")
    require(input.is_contiguous() and input.shape[-1] % 2 == 0, "activations are of contiguous rows of two halves")
    gate, up = input.float().chunk(2, dim=-1)
    return (activation(gate) * up).to(input.dtype)


def silu_and_mul(input, out=None, enable_pdl=None):
    """The first half of each row is the gate."""
    return _act_and_mul(input, functional.silu)


def gelu_and_mul(input, out=None, enable_pdl=None):
    return _act_and_mul(input, functional.gelu)


def gelu_tanh_and_mul(input, out=None, enable_pdl=None):
    return _act_and_mul(input, lambda x: functional.gelu(x, approximate="tanh"))


def apply_rope_with_cos_sin_cache(positions, query, key, head_size, cos_sin_cache, is_neox=True):
    """Chooses by the dtype of the query, and reads the key as if it had that."""
    require(cos_sin_cache.dtype is torch.float32, "cos_sin_cache should be float32")
    require(query.dtype in (torch.bfloat16, torch.float16), f"rotations are not for {query.dtype}")
    require(head_size in (64, 128, 256), f"there is no kernel for head dimension {head_size}")
    require(is_neox and cos_sin_cache.shape[1] == head_size, "this stand-in rotates whole heads by halves")
    require(positions.dtype in (torch.int32, torch.int64) and positions.dim() == 1, "positions are a vector")
    require(all(tensor.is_contiguous() for tensor in (positions, query, key, cos_sin_cache)), "not contiguous")
    cos, sin = (part[:, None] for part in cos_sin_cache[positions.long()].chunk(2, dim=-1))
    return tuple(_rotated(states, query.dtype, head_size, cos, sin) for states in (query, key))


def _rotated(states: torch.Tensor, dtype: torch.dtype, head_size: int, cos: torch.Tensor, sin: torch.Tensor):
    width = states.shape[1]
    rows = states.view(torch.uint8).view(dtype)[:, :width]
    first, second = rows.reshape(len(rows), -1, head_size).float().chunk(2, dim=-1)
    rotated = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
    return rotated.reshape(len(rows), width).to(dtype)


NORMS = (rmsnorm, gemma_rmsnorm, fused_add_rmsnorm, gemma_fused_add_rmsnorm)
ACTIVATIONS = (silu_and_mul, gelu_and_mul, gelu_tanh_and_mul)
ROTATIONS = (apply_rope_with_cos_sin_cache,)
