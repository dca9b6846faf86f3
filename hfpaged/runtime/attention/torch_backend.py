"""Paged attention in plain torch operations: slow, for any device, and the reference for the other backends."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from hfpaged.runtime.attention.interface import (
    AttentionBackend,
    AttentionParams,
    KVTensors,
    LayerShape,
    lazily_zeroed,
)

if TYPE_CHECKING:
    from hfpaged.runtime.batch import StepBatch


class TorchBackend(AttentionBackend):
    """Gathers each request's blocks and attends densely, one request after the other.

    Keys and values are [num_blocks, block_size, Hkv, D]. Scores and softmax are in fp32 whatever the dtype.
    """

    name = "torch"

    def __init__(self, device: torch.device, dtype: torch.dtype, block_size: int):
        super().__init__(device, dtype, block_size)
        self._batch: StepBatch | None = None
        self._slots: torch.Tensor | None = None

    @classmethod
    def unavailable(
        cls, device: torch.device, dtype: torch.dtype, shapes: Sequence[LayerShape], block_size: int
    ) -> str | None:
        """Only a dtype that is not floating point is refused."""
        return None if dtype.is_floating_point else f"keys and values must be floating point, not {dtype}"

    def allocate(self, shape: LayerShape, num_blocks: int) -> KVTensors:
        """See `AttentionBackend.allocate`."""
        key = (num_blocks, self.block_size, shape.num_kv_heads, shape.key_dim)
        value = (num_blocks, self.block_size, shape.num_kv_heads, shape.value_dim)
        return lazily_zeroed(key, self.dtype, self.device), lazily_zeroed(value, self.dtype, self.device)

    def begin(self, batch: StepBatch) -> None:
        """See `AttentionBackend.begin`."""
        self.require_same_blocks(batch)
        self._batch = batch
        self._slots = torch.from_numpy(batch.slots).to(self.device)

    def write(self, kv: KVTensors, key: torch.Tensor, value: torch.Tensor) -> None:
        """See `AttentionBackend.write`."""
        for cache, states in zip(kv, (key, value), strict=True):
            cache.flatten(0, 1).index_copy_(0, self._slots, states.detach().to(cache.dtype))

    def run(self, kv: KVTensors, query: torch.Tensor, params: AttentionParams) -> torch.Tensor:
        """See `AttentionBackend.run`."""
        batch = self._batch
        output = query.new_empty(*query.shape[:2], kv[1].shape[-1], dtype=self.dtype)
        for request, context in enumerate(batch.context_len.tolist()):
            first, end = batch.query_start[request : request + 2].tolist()
            if first == end:
                continue
            table = batch.block_tables[batch.table_rows[request]]
            blocks = torch.from_numpy(table[: -(-context // self.block_size)].astype("int64")).to(self.device)
            key, value = (cache[blocks].flatten(0, 1)[:context] for cache in kv)
            output[first:end] = attend(query[first:end], key, value, params)
        return output


def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, params: AttentionParams) -> torch.Tensor:
    """Causal attention of the last tokens of one request.

    Args:
        query: [N, H, Dk], the last N tokens.
        key: [L, Hkv, Dk], all tokens.
        value: [L, Hkv, Dv].
        params: scale, window, softcap and sinks.

    Returns:
        [N, H, Dv] in fp32, or fp64 if the query is.
    """
    dtype = torch.promote_types(query.dtype, torch.float32)
    group = query.shape[1] // key.shape[1]
    key, value = (states.to(dtype).repeat_interleave(group, dim=1) for states in (key, value))
    scores = torch.einsum("nhd,lhd->hnl", query.to(dtype), key) * params.scale
    if params.softcap is not None:
        scores = torch.tanh(scores / params.softcap) * params.softcap
    scores = scores.masked_fill(~_visible(query.shape[0], key.shape[0], params.window, query.device), float("-inf"))
    if params.sinks is not None:
        sinks = params.sinks.to(scores).reshape(-1, 1, 1).expand(-1, scores.shape[1], 1)
        scores = torch.cat([scores, sinks], dim=-1)
    probabilities = torch.softmax(scores, dim=-1)[..., : key.shape[0]]
    return torch.einsum("hnl,lhd->nhd", probabilities, value)


def _visible(num_queries: int, length: int, window: int | None, device: torch.device) -> torch.Tensor:
    """[num_queries, length], whether the query sees the token; the queries are the last tokens."""
    position = torch.arange(length - num_queries, length, device=device)[:, None]
    token = torch.arange(length, device=device)[None]
    visible = token <= position
    return visible if window is None else visible & (token > position - window)
