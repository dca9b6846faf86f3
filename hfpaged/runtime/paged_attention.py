"""What the attention modules of an engine view see during a step, and the attention function they call.

Transformers looks the function up by the name in the view's config (`AttentionInterface`). No attention mask function
is registered under that name: Transformers then builds no mask at all, and the block tables say who sees what.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface

from hfpaged.compat import ATTENTION_NAME, CACHE_NAMES
from hfpaged.errors import HfpagedError, UnsupportedModelError
from hfpaged.runtime.attention.interface import AttentionBackend, AttentionParams, LatentShape, LayerShape

# Where an attention module that keeps latents has its `LatentHeads`.
LATENT_PLACE = "_hfpaged_latent"
# Arguments that modeling code passes along and that change nothing for a packed, causal, inference-only step.
NEUTRAL_ARGUMENTS = frozenset(
    {
        "position_ids", "position_embeddings", "use_cache", *CACHE_NAMES, "output_attentions",
        "output_hidden_states", "output_router_logits", "return_dict", "is_causal", "cache_position", "layer_idx",
        "deterministic", "target_dtype", "logits_to_keep", "num_items_in_batch", "output_router_probs",
    }
)  # fmt: skip


@dataclass
class LayerKV:
    """The paged keys and values of one attention module: backend-specific tensors, leading dimension = block."""

    key: torch.Tensor
    value: torch.Tensor


@dataclass
class SeenLayer:
    """One attention module as the probing forward met it."""

    module: nn.Module
    shape: LayerShape
    dtype: torch.dtype


@dataclass
class StepContext:
    """Shared by all attention modules of one view. `backend` is None while probing."""

    backend: AttentionBackend | None = None
    layers: dict[int, LayerKV] = field(default_factory=dict)
    seen: list[SeenLayer] = field(default_factory=list)

    def bind(self, backend: AttentionBackend, layers: list[LayerKV]) -> None:
        """Give each attention module that the probe saw its keys and values, in the order they ran."""
        self.layers = {id(layer.module): kv for layer, kv in zip(self.seen, layers, strict=True)}
        self.backend = backend
        # The modules refer to this object: holding on to them would leave the weights of a dropped model to the
        # garbage collector.
        self.seen = []

    def unbind(self) -> None:
        """Drop the references to keys and values (the pool is being released)."""
        self.backend, self.layers, self.seen = None, {}, []

    @contextmanager
    def attending_by(self, backend: AttentionBackend) -> Iterator[None]:
        """Have another backend attend meanwhile. It is given the layers that are bound, which it need not use."""
        own, self.backend = self.backend, backend
        try:
            yield
        finally:
            self.backend = own

    def attend(
        self, module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, params: AttentionParams
    ) -> torch.Tensor:
        """Write the step's keys and values and attend. query [T, H, Dk], key [T, Hkv, Dk], value [T, Hkv, Dv]."""
        layer = self.layers[id(module)]
        self.backend.write((layer.key, layer.value), key, value)
        return self.backend.run((layer.key, layer.value), query, params)

    def record(self, module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Note an attention module in a probing forward of one token, whose attention output is its own value."""
        if any(layer.module is module for layer in self.seen):
            raise UnsupportedModelError([f"{type(module).__name__} attends more than once in a forward"])
        kind = LatentShape if LATENT_PLACE in module.__dict__ else LayerShape
        self.seen.append(SeenLayer(module, kind(key.shape[1], key.shape[2], value.shape[2]), key.dtype))
        return value.repeat_interleave(query.shape[1] // key.shape[1], dim=1)


def paged_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Transformers' attention contract over paged keys and values.

    Args:
        query: [1, H, T, Dk]; key: [1, Hkv, T, Dk]; value: [1, Hkv, T, Dv]: the new tokens of all requests of the step,
            packed. What came before is in the KV pool.

    Returns:
        ([1, T, H, Dv] contiguous, None).
    """
    step: StepContext | None = module.__dict__.get("_hfpaged_step")
    if step is None:
        raise HfpagedError(f"attn_implementation={ATTENTION_NAME!r} is not for models: call model.patch() instead")
    query, key, value = (states[0].transpose(0, 1) for states in (query, key, value))
    if scaling is None:
        scaling = query.shape[-1] ** -0.5
    latent = module.__dict__.get(LATENT_PLACE)
    if latent is not None:
        query = latent.absorb(query)
    if step.backend is None:
        _require_understood(module, attention_mask, kwargs)
        output = step.record(module, query, key, value).contiguous()
    else:
        output = step.attend(module, query, key, value, AttentionParams(scaling, sliding_window, softcap, s_aux))
    if latent is not None:
        output = latent.expand(output)
    return output.unsqueeze(0), None


def _require_understood(module: nn.Module, attention_mask: torch.Tensor | None, kwargs: dict[str, Any]) -> None:
    unknown = sorted(
        name
        for name, value in kwargs.items()
        if value is not None and name not in NEUTRAL_ARGUMENTS and not name.startswith(("cu_seq_lens", "max_length"))
    )
    if attention_mask is not None:
        unknown.append("attention_mask")
    if kwargs.get("is_causal") is False or getattr(module, "is_causal", True) is False:
        unknown.append("is_causal=False")
    if unknown:
        raise UnsupportedModelError([f"{type(module).__name__} calls attention with {', '.join(unknown)}"])


AttentionInterface.register(ATTENTION_NAME, paged_attention)
