"""Paged attention on NVIDIA GPUs by FlashInfer."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn import functional

from hfpaged.runtime.attention import flashinfer_cascade, flashinfer_latent
from hfpaged.runtime.attention.flashinfer_cascade import DividedWrapper, can_divide
from hfpaged.runtime.attention.flashinfer_latent import LatentGeometry, LatentWrapper
from hfpaged.runtime.attention.flashinfer_probe import kernel_dims, machine_problem, model_problem
from hfpaged.runtime.attention.flashinfer_wrappers import FixedTables, Geometry, HeadsWrapper, PlannedWrapper, Setting
from hfpaged.runtime.attention.interface import (
    AheadBackend,
    AttentionParams,
    KVTensors,
    LatentShape,
    LayerShape,
    lazily_zeroed,
)
from hfpaged.runtime.attention.page_tables import DividedTables, PageTables, PageTableWriter
from hfpaged.runtime.attention.shared_prefixes import SharedPrefixes, find_shared_prefixes
from hfpaged.runtime.attention.trial import trial_problem
from hfpaged.runtime.batch import StepBatch

WORKSPACE_BYTES = 128 << 20
# What a captured step may read at most. A step with more pages than this runs uncaptured.
FIXED_PAGES = 1 << 18


class FlashInferBackend(AheadBackend):
    """Keys and values are [num_blocks, block_size, Hkv, D], with D padded to a dimension that has a kernel. Of layers
    that keep latents, the key tensor has the rotated part and the value tensor the latents.

    Every geometry has a wrapper for steps of one token each and one for all others, and for captured steps one of each
    size. Where requests share enough of their prefixes, their common blocks are read once a step, uncaptured. A token's
    result may differ in its last bits with what else is in the batch: the kernels split long contexts
    by how much work a step has.
    """

    name = "flashinfer"
    device_types = frozenset({"cuda"})

    def __init__(self, device: torch.device, dtype: torch.dtype, block_size: int):
        super().__init__(device, dtype, block_size)
        self._writer = PageTableWriter(self.accelerator)
        self._setting = Setting(
            self.accelerator,
            torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=device),
            dtype,
            block_size,
        )
        self._wrappers: dict[tuple[Geometry | LatentGeometry, bool, int | None], PlannedWrapper] = {}
        self._fixed: dict[int, FixedTables] = {}
        self._fixed_pages: torch.Tensor | None = None
        self._value_dims: dict[int, int] = {}
        self._divided_wrappers: dict[Geometry, DividedWrapper] = {}
        # Of layers that can be divided: what a token takes in each, by the address of its keys.
        self._divisible_bytes: dict[int, int] = {}
        self._tables: PageTables | None = None
        self._divided: DividedTables | None = None
        self._slots: torch.Tensor | None = None
        self._size: int | None = None

    @classmethod
    def unavailable(
        cls, device: torch.device, dtype: torch.dtype, shapes: Sequence[LayerShape], block_size: int
    ) -> str | None:
        """See `AttentionBackend.unavailable`."""
        return (
            machine_problem(device)
            or model_problem(dtype, shapes)
            or trial_problem(cls, device, dtype, shapes, block_size)
        )

    @classmethod
    def stored_shape(cls, shape: LayerShape) -> LayerShape:
        """See `AttentionBackend.stored_shape`."""
        if isinstance(shape, LatentShape):
            return flashinfer_latent.stored_shape(shape)
        return LayerShape(shape.num_kv_heads, *kernel_dims(shape.key_dim, shape.value_dim))

    def attends_to_latents(self, shape: LatentShape, num_heads: int) -> bool:
        """See `AttentionBackend.attends_to_latents`."""
        if not flashinfer_latent.can_attend(shape, num_heads):
            return False
        return trial_problem(type(self), self.device, self.dtype, [shape], self.block_size) is None

    def allocate(self, shape: LayerShape, num_blocks: int) -> KVTensors:
        """See `AttentionBackend.allocate`."""
        stored = self.stored_shape(shape)
        pages = (num_blocks, self.block_size, stored.num_kv_heads)
        key, value = (
            lazily_zeroed((*pages, dim), self.dtype, self.device) for dim in (stored.key_dim, stored.value_dim)
        )
        self._value_dims[value.data_ptr()] = shape.value_dim
        return key, value

    def begin_ahead(self, batch: StepBatch, slots: torch.Tensor, captured_size: int | None = None) -> None:
        """See `AheadBackend.begin_ahead`."""
        self.require_same_blocks(batch)
        prefixes = self._worthwhile_prefixes(batch) if captured_size is None else None
        self.shared_prefix_steps += prefixes is not None
        self._tables, self._divided = self._writer.write(batch, prefixes)
        self._slots, self._size = slots, captured_size
        if captured_size is not None:
            # Neither a capture nor a replay can plan, so all wrappers that it may run are planned here.
            for geometry in {geometry for geometry, _, _ in self._wrappers}:
                self._planned(geometry)

    def can_capture(self, batch: StepBatch, size: int) -> bool:
        """See `AheadBackend.can_capture`."""
        pages = int((-(-batch.context_len // self.block_size)).sum()) + size - len(batch.context_len)
        return bool(self._wrappers) and pages <= FIXED_PAGES and self._worthwhile_prefixes(batch) is None

    def write(self, kv: KVTensors, key: torch.Tensor, value: torch.Tensor) -> None:
        """See `AttentionBackend.write`."""
        if _keeps_latents(kv, key):
            key = key[..., value.shape[-1] :]
        for cache, states in zip(kv, (key, value), strict=True):
            padded = _padded(states.detach().to(cache.dtype), cache.shape[-1])
            cache.flatten(0, 1).index_copy_(0, self._slots, padded)

    def run(self, kv: KVTensors, query: torch.Tensor, params: AttentionParams) -> torch.Tensor:
        """See `AttentionBackend.run`."""
        if _keeps_latents(kv, query):
            geometry = LatentGeometry(query.shape[1], float(params.scale))
            return self._planned(geometry).run(query.detach().to(self.dtype), kv, None)
        geometry = Geometry.of(query, kv, params)
        query = _padded(query.detach().to(self.dtype), geometry.key_dim).contiguous()
        sinks = None if params.sinks is None else params.sinks.detach().to(torch.float32).contiguous()
        if can_divide(geometry):
            self._divisible_bytes[kv[0].data_ptr()] = sum(cache[0, 0].nbytes for cache in kv)
        if self._divided is not None and can_divide(geometry):
            output = self._divided_wrapper(geometry).run(query, kv)
        else:
            output = self._planned(geometry).run(query, kv, sinks)
        return output[..., : self._value_dims[kv[1].data_ptr()]].contiguous()

    def _planned(self, geometry: Geometry | LatentGeometry) -> PlannedWrapper:
        """The geometry's wrapper for the present step, planned for it."""
        key = (geometry, self._tables.one_each, self._size)
        wrapper = self._wrappers.get(key)
        if wrapper is None:
            fixed = None if self._size is None else self._fixed_tables(self._size)
            if isinstance(geometry, LatentGeometry):
                wrapper = LatentWrapper(geometry, self._setting, fixed)
            else:
                wrapper = HeadsWrapper(geometry, self._setting, self._tables.one_each, fixed)
            self._wrappers[key] = wrapper
        if not wrapper.is_planned_for(self._tables):
            wrapper.plan(self._tables)
        return wrapper

    def _divided_wrapper(self, geometry: Geometry) -> DividedWrapper:
        """The geometry's wrappers for a step in two parts, planned for the present one."""
        wrapper = self._divided_wrappers.get(geometry)
        if wrapper is None:
            wrapper = self._divided_wrappers[geometry] = DividedWrapper(geometry, self._setting)
        wrapper.plan(self._divided)
        return wrapper

    def _worthwhile_prefixes(self, batch: StepBatch) -> SharedPrefixes | None:
        """What the requests of a step of one token each share, if reading it once saves enough."""
        bytes_per_token = sum(self._divisible_bytes.values())
        wanted = flashinfer_cascade.LEAST_SAVED_BYTES
        # Looking for prefixes takes longer than seeing that they could not be long enough.
        is_large = int(batch.context_len.sum()) * bytes_per_token >= wanted
        if not is_large or int(batch.query_start[-1]) != len(batch.context_len):
            return None
        prefixes = find_shared_prefixes(batch)
        if prefixes is None:
            return None
        return prefixes if prefixes.saved_blocks() * self.block_size * bytes_per_token >= wanted else None

    def _fixed_tables(self, size: int) -> FixedTables:
        """Tables for captured steps of this size; those of all sizes share the largest part."""
        if self._fixed_pages is None:
            self._fixed_pages = self._zeros(FIXED_PAGES)
        if size not in self._fixed:
            tables = [self._zeros(length) for length in (size + 1, size + 1, size, size)]
            self._fixed[size] = FixedTables(*tables, self._fixed_pages)
        return self._fixed[size]

    def _zeros(self, length: int) -> torch.Tensor:
        return torch.zeros(length, dtype=torch.int32, device=self.device)


def _keeps_latents(kv: KVTensors, states: torch.Tensor) -> bool:
    """Whether a layer keeps latents: of queries or keys [T, H, D] the key tensor has a part only."""
    return states.shape[-1] > kv[0].shape[-1]


def _padded(states: torch.Tensor, dim: int) -> torch.Tensor:
    """[..., D] with zeros up to `dim`: they change neither scores nor sums."""
    return states if states.shape[-1] == dim else functional.pad(states, (0, dim - states.shape[-1]))
