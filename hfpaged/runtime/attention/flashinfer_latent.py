"""FlashInfer's wrapper for multi-head latent attention: how it is made, planned and run, and for which layers.

What it would get wrong or refuse late is settled here: tables are on the host, or its plan waits for the device; the
form of queries and keys is declared, or it guesses; the kernel is named, or each plan may choose another one; numbers
of heads are those whose tiles end between tokens, as its causal bound loses a key at others.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from hfpaged.runtime.attention.flashinfer_probe import flashinfer
from hfpaged.runtime.attention.flashinfer_wrappers import FixedTables, PlannedWrapper, Setting
from hfpaged.runtime.attention.interface import KVTensors, LatentShape
from hfpaged.runtime.attention.page_tables import PageTables

RANK, ROPE_DIM = 512, 64
# A program takes 64 or 128 rows, of whole tokens.
ROWS_OF_A_TILE = 128


class LatentGeometry(NamedTuple):
    """What layers that keep latents must have in common to share a plan: query heads and the scale of their scores."""

    num_heads: int
    scale: float


def can_attend(shape: LatentShape, num_heads: int) -> bool:
    """Whether there is a kernel."""
    return shape == (1, RANK + ROPE_DIM, RANK) and ROWS_OF_A_TILE % num_heads == 0


def stored_shape(shape: LatentShape) -> LatentShape:
    """What a layer takes in memory: the rotated part in the place of the keys, the latents in that of the values."""
    return LatentShape(1, shape.key_dim - shape.value_dim, shape.value_dim)


class LatentWrapper(PlannedWrapper):
    """For layers that keep latents. Their cache is ([pages, page size, 1, ROPE_DIM], [pages, page size, 1, RANK]).

    Args:
        fixed: where the tables go for a captured step; None: the step is not captured.
    """

    def __init__(self, geometry: LatentGeometry, setting: Setting, fixed: FixedTables | None = None):
        super().__init__(setting)
        self._geometry = geometry
        self._wrapper = flashinfer().mla.BatchMLAPagedAttentionWrapper(
            setting.workspace,
            use_cuda_graph=fixed is not None,
            qo_indptr=None if fixed is None else fixed.query_start,
            kv_indptr=None if fixed is None else fixed.page_start,
            kv_indices=None if fixed is None else fixed.pages,
            kv_len_arr=None if fixed is None else fixed.context_len,
            backend="fa2",
        )

    def _plan(self, tables: PageTables) -> None:
        setting = self._setting
        self._wrapper.plan(
            metadata=flashinfer().mla.MLAPlanMetadata.csr(
                qo_indptr=tables.query_start,
                kv_indptr=tables.page_start,
                kv_indices=tables.pages,
                kv_len_arr=tables.context_len,
            ),
            num_heads=self._geometry.num_heads,
            head_dim_ckv=RANK,
            head_dim_kpe=ROPE_DIM,
            page_size=setting.page_size,
            causal=True,
            sm_scale=self._geometry.scale,
            q_data_type=setting.dtype,
            kv_data_type=setting.dtype,
            query_layout="split",
            kv_cache_layout="split",
        )

    def _run(self, query: torch.Tensor, kv: KVTensors, sinks: torch.Tensor | None) -> torch.Tensor:
        plain, rotated = (part.contiguous() for part in query.split([RANK, ROPE_DIM], dim=-1))
        rotated_keys, latents = (cache.squeeze(2) for cache in kv)
        return self._wrapper.run(query=(plain, rotated), kv_cache=(latents, rotated_keys))
