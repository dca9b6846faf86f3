"""ReferenceAttention: one sequence from its start, in the place of paged attention."""

from __future__ import annotations

import torch
from torch import nn

from hfpaged.program.trace import AttentionCall, reference_attention
from hfpaged.runtime.attention.interface import AttentionParams, KVTensors


class ReferenceAttention:
    """Has the two methods of an `AttentionBackend` that a forward calls; keeps nothing but the last call's input."""

    def __init__(self) -> None:
        self._states: list[torch.Tensor] = []

    def write(self, kv: KVTensors, key: torch.Tensor, value: torch.Tensor) -> None:
        """key [T, Hkv, Dk], value [T, Hkv, Dv]: of all tokens that the `run` that follows is about."""
        self._states = [key, value]

    def run(self, kv: KVTensors, query: torch.Tensor, params: AttentionParams) -> torch.Tensor:
        """query [T, H, Dk]. Returns [T, H, Dv], contiguous."""
        key, value = self._states
        call = AttentionCall(
            module=nn.Module(),
            query=query,
            key=key,
            value=value,
            output=query,
            scale=params.scale,
            window=params.window or 0,
            softcap=params.softcap or 0.0,
            sinks=params.sinks,
            options={},
        )
        self._states = [query, key, value]
        return reference_attention(call)

    def take(self) -> list[torch.Tensor]:
        """Query, key and value of the last call, once; nothing if there was none since."""
        states, self._states = self._states, []
        return states
