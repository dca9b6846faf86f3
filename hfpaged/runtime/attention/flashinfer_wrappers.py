"""FlashInfer's wrappers: how they are made, planned and run.

The one place that sets, or refuses, what the library accepts and then gets wrong in silence:

- plans are told every dtype (their default is float16), that attention is causal (their default is not), and the scale
  (their default is that of the padded head dimension); all by keyword, because the order has changed between releases;
- a window counts the tokens to the left of a token, so that one of W tokens is W - 1;
- attention sinks go to the only wrapper that looks at them;
- a plan that is still being copied to the device is not overwritten;
- the CUDA-core decode kernel gets only the group sizes that it was compiled for;
- a wrapper that was planned for a captured step is planned again before every replay.

Latents have wrappers of their own (flashinfer_latent.py).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, NamedTuple

import torch

from hfpaged.errors import HfpagedError, UnsupportedModelError
from hfpaged.runtime.attention.flashinfer_probe import flashinfer
from hfpaged.runtime.attention.interface import AttentionParams, KVTensors
from hfpaged.runtime.attention.page_tables import PageTables
from hfpaged.runtime.device.accelerator import Accelerator, Mark

CUDA_CORE_GROUPS = frozenset({1, 2, 3, 4, 6, 8, 16})
TENSOR_CORES_FROM_GROUP = 4
LAYOUT = "NHD"


class Geometry(NamedTuple):
    """What layers must have in common to share a plan.

    Attributes:
        num_heads, num_kv_heads: of the layer on this device.
        key_dim, value_dim: of the kernel, after padding.
        scale, window, softcap: as in `AttentionParams`.
        has_sinks: whether its heads have sinks.
    """

    num_heads: int
    num_kv_heads: int
    key_dim: int
    value_dim: int
    scale: float
    window: int | None
    softcap: float | None
    has_sinks: bool

    @classmethod
    def of(cls, query: torch.Tensor, kv: KVTensors, params: AttentionParams) -> Geometry:
        """Of a layer, from its query [T, H, D] and its keys and values.

        Raises:
            UnsupportedModelError: no kernel of FlashInfer computes this.
        """
        if params.sinks is not None and params.softcap is not None:
            raise UnsupportedModelError(["FlashInfer has no kernel for attention sinks with a soft cap"])
        if params.window is not None and params.window < 1:
            raise UnsupportedModelError([f"its attention window of {params.window} tokens is empty"])
        return cls(
            query.shape[1],
            kv[0].shape[2],
            kv[0].shape[3],
            kv[1].shape[3],
            float(params.scale),
            params.window,
            params.softcap,
            params.sinks is not None,
        )

    @property
    def group(self) -> int:
        """Query heads that read one KV head."""
        return self.num_heads // self.num_kv_heads

    @property
    def window_left(self) -> int:
        """The window as FlashInfer counts it: tokens to the left of each token; -1: all."""
        return -1 if self.window is None else self.window - 1

    @property
    def has_decode_kernel(self) -> bool:
        """Whether the decode wrapper computes it: it knows one head dimension and no sinks."""
        return self.key_dim == self.value_dim and not self.has_sinks

    @property
    def wants_tensor_cores(self) -> bool:
        """Which of the two decode kernels to use."""
        return self.group >= TENSOR_CORES_FROM_GROUP or self.group not in CUDA_CORE_GROUPS


class Setting(NamedTuple):
    """What all wrappers of a backend share.

    Attributes:
        accelerator: the device.
        workspace: uint8 scratch memory; wrappers that run one after the other may share it.
        dtype: of queries, keys, values and outputs.
        page_size: tokens in a page.
    """

    accelerator: Accelerator
    workspace: torch.Tensor
    dtype: torch.dtype
    page_size: int


class FixedTables(NamedTuple):
    """Device memory, int32, from which a captured step of B requests reads its page tables: plans write it.

    Attributes:
        query_start: [B + 1].
        page_start: [B + 1].
        last_page_len: [B].
        context_len: [B].
        pages: as many as any step may have.
    """

    query_start: torch.Tensor
    page_start: torch.Tensor
    last_page_len: torch.Tensor
    context_len: torch.Tensor
    pages: torch.Tensor


class PlannedWrapper(ABC):
    """One wrapper of the library: planned once a step, run once a layer."""

    def __init__(self, setting: Setting):
        self._setting = setting
        self._copied: Mark | None = None
        self._tables: PageTables | None = None

    def is_planned_for(self, tables: PageTables) -> bool:
        """Whether the last plan was for these very tables."""
        return self._tables is tables

    def plan(self, tables: PageTables) -> None:
        """Schedule the step's work on the host and queue the copy of the schedule."""
        if self._copied is not None:
            # The library fills one page-locked buffer; the copy of the last schedule must have left it.
            self._copied.synchronize()
        self._plan(tables)
        self._copied = self._setting.accelerator.mark()
        self._tables = tables

    def run(self, query: torch.Tensor, kv: KVTensors, sinks: torch.Tensor | None) -> torch.Tensor:
        """Attend.

        Args:
            query: [T, H, key_dim] contiguous.
            kv: [pages, page size, Hkv, key_dim] and [..., value_dim].
            sinks: fp32 [H] for a geometry that has them.

        Returns:
            [T, H, value_dim].
        """
        if self._tables is None:
            raise HfpagedError("a FlashInfer wrapper was run without a plan; this is a bug")
        if not query.dtype == kv[0].dtype == kv[1].dtype == self._setting.dtype:
            raise HfpagedError(f"FlashInfer was planned for {self._setting.dtype}, not for {query.dtype}")
        return self._run(query, kv, sinks)

    @abstractmethod
    def _plan(self, tables: PageTables) -> None:
        """Call the library's `plan`."""

    @abstractmethod
    def _run(self, query: torch.Tensor, kv: KVTensors, sinks: torch.Tensor | None) -> torch.Tensor:
        """Call the library's `run`."""


class HeadsWrapper(PlannedWrapper):
    """For layers that store the keys and values of their heads.

    Args:
        one_each: plan for steps in which every request has one token.
        fixed: where the tables go for a captured step; None: the step is not captured.
        causal: False if all of a request's tokens see all of its pages.
    """

    def __init__(
        self,
        geometry: Geometry,
        setting: Setting,
        one_each: bool,
        fixed: FixedTables | None = None,
        causal: bool = True,
    ):
        super().__init__(setting)
        self._geometry = geometry
        self._causal = causal
        self._decodes = one_each and geometry.has_decode_kernel
        self._wrapper = self._decode_wrapper(fixed) if self._decodes else self._prefill_wrapper(fixed)

    def _plan(self, tables: PageTables) -> None:
        geometry, setting = self._geometry, self._setting
        shared = {
            "sm_scale": geometry.scale,
            "window_left": geometry.window_left,
            "logits_soft_cap": geometry.softcap or 0.0,
            "pos_encoding_mode": "NONE",
            "q_data_type": setting.dtype,
            "kv_data_type": setting.dtype,
            "o_data_type": setting.dtype,
            "non_blocking": True,
        }
        heads = {
            "num_qo_heads": geometry.num_heads,
            "num_kv_heads": geometry.num_kv_heads,
            "page_size": setting.page_size,
        }
        if self._decodes:
            self._wrapper.plan(
                tables.page_start,
                tables.pages,
                tables.last_page_len,
                head_dim=geometry.key_dim,
                **heads,
                **shared,
            )
        else:
            self._wrapper.plan(
                tables.query_start,
                tables.page_start,
                tables.pages,
                tables.last_page_len,
                head_dim_qk=geometry.key_dim,
                head_dim_vo=geometry.value_dim,
                causal=self._causal,
                **heads,
                **shared,
            )

    def _run(self, query: torch.Tensor, kv: KVTensors, sinks: torch.Tensor | None) -> torch.Tensor:
        if self._geometry.has_sinks:
            return self._wrapper.run(query, kv, sinks, self._geometry.scale)
        return self._wrapper.run(query, kv)

    def run_with_lse(self, query: torch.Tensor, kv: KVTensors) -> tuple[torch.Tensor, torch.Tensor]:
        """`run` without sinks, and the logarithms to the base 2 of the sums of exponentials, fp32 [T, H]."""
        return self._wrapper.run(query, kv, return_lse=True)

    def _decode_wrapper(self, fixed: FixedTables | None) -> Any:
        return flashinfer().BatchDecodeWithPagedKVCacheWrapper(
            self._setting.workspace,
            LAYOUT,
            use_cuda_graph=fixed is not None,
            use_tensor_cores=self._geometry.wants_tensor_cores,
            paged_kv_indptr_buffer=None if fixed is None else fixed.page_start,
            paged_kv_indices_buffer=None if fixed is None else fixed.pages,
            paged_kv_last_page_len_buffer=None if fixed is None else fixed.last_page_len,
        )

    def _prefill_wrapper(self, fixed: FixedTables | None) -> Any:
        buffers = {
            "use_cuda_graph": fixed is not None,
            "qo_indptr_buf": None if fixed is None else fixed.query_start,
            "paged_kv_indptr_buf": None if fixed is None else fixed.page_start,
            "paged_kv_indices_buf": None if fixed is None else fixed.pages,
            "paged_kv_last_page_len_buf": None if fixed is None else fixed.last_page_len,
        }
        if not self._geometry.has_sinks:
            return flashinfer().BatchPrefillWithPagedKVCacheWrapper(self._setting.workspace, LAYOUT, **buffers)
        return flashinfer().BatchAttentionWithAttentionSinkWrapper(
            self._setting.workspace,
            LAYOUT,
            **buffers,
            q_data_type=self._setting.dtype,
            kv_data_type=self._setting.dtype,
            head_dim_qk=self._geometry.key_dim,
            head_dim_vo=self._geometry.value_dim,
            window_left=self._geometry.window_left,
        )
