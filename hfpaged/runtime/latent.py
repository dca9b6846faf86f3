"""Layers that keep compressed keys and values: multi-head latent attention (DeepSeek-AI, DeepSeek-V2, 2024).

Their modules compress a token to a latent and a rotated part that all heads share, and expand that to each head's keys
and values. Attention over the latents themselves gives the same, if the expansion is applied to the queries before and
to the outputs behind: (W_k c) . q = c . (W_k^T q), and sum(p (W_v c)) = W_v sum(p c). It is one KV head then, whose
values are the first part of its keys, and the cache is a fraction of the size.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import nn

from hfpaged.runtime.attention.interface import AttentionBackend, LatentShape
from hfpaged.runtime.paged_attention import LATENT_PLACE as PLACE
from hfpaged.runtime.view import EngineView

# Where Transformers' modules expand what they would cache; releases before 5.24 have no such method.
EXPANSION = "expand_kv"
_NAMES = ("num_heads", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "kv_lora_rank")
_TOLERANCE = 2.0**-6


class LatentHeads(NamedTuple):
    """The expansion of one attention module, by its live weight: [heads * (key_dim + value_dim), rank].

    Attributes:
        linear: the module that expands.
        heads: query heads.
        key_dim: of a head's expanded key, without the rotated part.
        rope_dim: of the rotated part.
        value_dim: of a head's value.
        rank: of the latent.
    """

    linear: nn.Linear
    heads: int
    key_dim: int
    rope_dim: int
    value_dim: int
    rank: int

    @property
    def shape(self) -> LatentShape:
        """What the cache holds of a token."""
        return LatentShape(1, self.rank + self.rope_dim, self.rank)

    def absorb(self, query: torch.Tensor) -> torch.Tensor:
        """Queries [T, H, key_dim + rope_dim] as they are to be multiplied with latents: [T, H, rank + rope_dim]."""
        plain, rotated = query.split([self.key_dim, self.rope_dim], dim=-1)
        absorbed = torch.bmm(plain.transpose(0, 1), self._weight()[:, : self.key_dim]).transpose(0, 1)
        return torch.cat([absorbed, rotated], dim=-1)

    def expand(self, output: torch.Tensor) -> torch.Tensor:
        """Outputs [T, H, rank] as values: [T, H, value_dim], contiguous."""
        expansion = self._weight()[:, self.key_dim :].transpose(1, 2)
        return torch.bmm(output.transpose(0, 1), expansion).transpose(0, 1).contiguous()

    def expanded(self, latent: torch.Tensor, rotated: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """What the module's own method should give for [1, 1, T, rank] and [1, 1, T, rope_dim]."""
        keys, values = torch.matmul(latent, self._weight().transpose(1, 2)).split([self.key_dim, self.value_dim], -1)
        return torch.cat([keys, rotated.expand(-1, self.heads, -1, -1)], dim=-1), values

    def _weight(self) -> torch.Tensor:
        return self.linear.weight.view(self.heads, self.key_dim + self.value_dim, self.rank)


def keep_latents(view: EngineView, backend: AttentionBackend) -> bool:
    """Make the attention modules of a view keep latents, if all have them and the backend attends to such.

    Returns:
        Whether they do.
    """
    modules = [module for module in view.model.modules() if hasattr(module, EXPANSION)]
    found = [latent_heads(module) for module in modules]
    if not found or not all(heads and backend.attends_to_latents(heads.shape, heads.heads) for heads in found):
        return False
    for module, heads in zip(modules, found, strict=True):
        vars(module).update({EXPANSION: _unexpanded, PLACE: heads})
    return True


def expand_latents(view: EngineView) -> None:
    """Have the modules of a view expand again."""
    for module in view.model.modules():
        for name in (EXPANSION, PLACE):
            vars(module).pop(name, None)


def latent_heads(module: nn.Module) -> LatentHeads | None:
    """The expansion of an attention module, if it is the plain one; it is compared with the module's own method."""
    linear = getattr(module, "kv_b_proj", None)
    sizes = [getattr(module, name, None) for name in _NAMES]
    if type(linear) is not nn.Linear or linear.bias is not None or not all(isinstance(size, int) for size in sizes):
        return None
    heads, key_dim, rope_dim, value_dim, rank = sizes
    weight = linear.weight
    if weight.shape != (heads * (key_dim + value_dim), rank) or not weight.is_floating_point():
        return None
    found = LatentHeads(linear, heads, key_dim, rope_dim, value_dim, rank)
    generator = torch.Generator(weight.device).manual_seed(1)
    latent, rotated = (
        torch.randn(1, 1, 3, dim, generator=generator, device=weight.device, dtype=torch.float32).to(weight.dtype)
        for dim in (rank, rope_dim)
    )
    with torch.no_grad():
        own, ours = getattr(module, EXPANSION)(latent, rotated), found.expanded(latent, rotated)
    return found if all(_are_close(*pair) for pair in zip(own, ours, strict=True)) else None


def _are_close(own: torch.Tensor, ours: torch.Tensor) -> bool:
    if own.shape != ours.shape:
        return False
    return bool((own.float() - ours.float()).abs().max() <= _TOLERANCE * own.float().abs().max())


def _unexpanded(latent: torch.Tensor, rotated: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """In the place of a module's expansion: one head's (key, value)."""
    return torch.cat([latent, rotated], dim=-1), latent
