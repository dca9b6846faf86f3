"""Paged attention on any GPU that Triton compiles for: NVIDIA's without FlashInfer, and AMD's."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hfpaged.runtime.attention import triton_launch
from hfpaged.runtime.attention.interface import AheadBackend, AttentionParams, KVTensors, LayerShape, lazily_zeroed
from hfpaged.runtime.attention.tile_tables import TileTables, TileTableWriter
from hfpaged.runtime.attention.trial import trial_problem
from hfpaged.runtime.attention.triton_probe import machine_problem, model_problem
from hfpaged.runtime.batch import StepBatch

# What the tables of a captured step may take, in numbers. A step with more pages than this runs uncaptured.
FIXED_TABLES = 1 << 18


class TritonBackend(AheadBackend):
    """Keys and values are [num_blocks, block_size, Hkv, D].

    A token's result does not depend on what else is in the batch or on its blocks. It may differ in its last bits
    between a token that is the only one of its request in a step and one that is not. In fp32, products are of fp32.
    """

    name = "triton"
    device_types = frozenset({"cuda", "xpu"})

    def __init__(self, device: torch.device, dtype: torch.dtype, block_size: int):
        super().__init__(device, dtype, block_size)
        self._writer = TileTableWriter(self.accelerator)
        self._fixed: torch.Tensor | None = None
        self._tables: TileTables | None = None
        self._slots: torch.Tensor | None = None

    @classmethod
    def unavailable(
        cls, device: torch.device, dtype: torch.dtype, shapes: Sequence[LayerShape], block_size: int
    ) -> str | None:
        """See `AttentionBackend.unavailable`."""
        return (
            machine_problem(device, dtype)
            or model_problem(dtype, shapes)
            or trial_problem(cls, device, dtype, shapes, block_size)
        )

    def allocate(self, shape: LayerShape, num_blocks: int) -> KVTensors:
        """See `AttentionBackend.allocate`."""
        pages = (num_blocks, self.block_size, shape.num_kv_heads)
        return tuple(lazily_zeroed((*pages, dim), self.dtype, self.device) for dim in shape[1:])

    def begin_ahead(self, batch: StepBatch, slots: torch.Tensor, captured_size: int | None = None) -> None:
        """See `AheadBackend.begin_ahead`."""
        self.require_same_blocks(batch)
        if captured_size is not None and self._fixed is None:
            self._fixed = torch.zeros(FIXED_TABLES, dtype=torch.int32, device=self.device)
        # Captured steps of all sizes share this memory: none begins before the one before has read it.
        self._tables = self._writer.write(batch, None if captured_size is None else self._fixed)
        self._slots = slots

    def can_capture(self, batch: StepBatch, size: int) -> bool:
        """See `AheadBackend.can_capture`."""
        return self._tables is not None and TileTableWriter.size_of_singles(batch, size) <= FIXED_TABLES

    def write(self, kv: KVTensors, key: torch.Tensor, value: torch.Tensor) -> None:
        """See `AttentionBackend.write`."""
        key, value = (states.detach().to(self.dtype) for states in (key, value))
        triton_launch.write(kv, self._slots, key, value)

    def run(self, kv: KVTensors, query: torch.Tensor, params: AttentionParams) -> torch.Tensor:
        """See `AttentionBackend.run`."""
        query = query.detach().to(self.dtype)
        if query.stride(-1) != 1:
            query = query.contiguous()
        if params.sinks is not None:
            params = params._replace(sinks=params.sinks.detach().contiguous())
        return triton_launch.attend(kv, query, params, self._tables)
