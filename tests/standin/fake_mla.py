"""FlashInfer's wrapper for multi-head latent attention as hfpaged calls it: see fake_flashinfer."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from standin.contract import Tables, require
from standin.fake_wrappers import Wrapper

RANK, ROPE_DIM = 512, 64


@dataclass
class MLAPlanMetadata:
    """Tables in compressed form."""

    qo_indptr: torch.Tensor
    kv_indptr: torch.Tensor
    kv_indices: torch.Tensor
    kv_len_arr: torch.Tensor

    @classmethod
    def csr(cls, qo_indptr, kv_indptr, kv_indices, kv_len_arr):
        return cls(qo_indptr, kv_indptr, kv_indices, kv_len_arr)


class TablesByLength(Tables):
    """Tables with whole lengths instead of those of the last pages."""

    def __init__(self, device: Any, metadata: MLAPlanMetadata, page_size: int):
        tensors = (metadata.qo_indptr, metadata.kv_indptr, metadata.kv_indices, metadata.kv_len_arr)
        super().__init__(device, *tensors, page_size=1 << 31)
        for request in range(self.requests):
            pages = self.page_start[request + 1] - self.page_start[request]
            fits = 0 < self.length(request, page_size) - (pages - 1) * page_size <= page_size
            require(fits, "a length is not that of its pages")

    def length(self, request: int, page_size: int) -> int:
        return self.last_page_len[request]


class BatchMLAPagedAttentionWrapper(Wrapper):
    """Any number of queries a request, over one head of latents."""

    head_dims = frozenset({(RANK + ROPE_DIM, RANK)})

    def __init__(
        self,
        float_workspace_buffer,
        use_cuda_graph=False,
        qo_indptr=None,
        kv_indptr=None,
        kv_indices=None,
        kv_len_arr=None,
        backend="auto",
    ):
        require(backend != "auto", "each plan may choose another kernel")
        buffers = [qo_indptr, kv_indptr, kv_len_arr, kv_indices]
        self._start(float_workspace_buffer, "NHD", use_cuda_graph, buffers)

    def plan(
        self,
        qo_indptr=None,
        kv_indptr=None,
        kv_indices=None,
        kv_len_arr=None,
        num_heads=None,
        head_dim_ckv=None,
        head_dim_kpe=None,
        page_size=None,
        causal=None,
        sm_scale=None,
        q_data_type=None,
        kv_data_type=None,
        use_profiler=False,
        *,
        metadata=None,
        cum_seq_lens_q=None,
        block_tables=None,
        seq_lens=None,
        max_q_len=None,
        query_layout=None,
        kv_cache_layout=None,
        lse_mode="none",
        output_dtype=None,
        output_scale="none",
        scale_mode="default",
        skip_softmax=False,
        enable_pdl=None,
        use_sinks=False,
    ):
        require(metadata is not None, "flat tables are deprecated")
        require(causal is True, "causal is to be said")
        require(isinstance(sm_scale, float), "the scale is to be given")
        require((query_layout, kv_cache_layout) == ("split", "split"), "what run() is given is in parts")
        require(128 % num_heads == 0, "a tile ends inside a token")
        options = {
            "page_size": page_size,
            "pos_encoding_mode": "NONE",
            "window_left": -1,
            "logits_soft_cap": None,
            "q_data_type": q_data_type,
            "kv_data_type": kv_data_type,
            "o_data_type": output_dtype,
            "sm_scale": sm_scale,
            "non_blocking": True,
            "causal": causal,
        }
        heads = (num_heads, 1, head_dim_ckv + head_dim_kpe, head_dim_ckv)
        tables = TablesByLength(self.device, metadata, page_size)
        self._plan(tables, metadata.kv_indices, heads, options)

    def run(
        self,
        q_nope=None,
        q_pe=None,
        ckv_cache=None,
        kpe_cache=None,
        out=None,
        lse=None,
        return_lse=False,
        profiler_buffer=None,
        kv_len=None,
        page_table=None,
        return_lse_base_on_e=False,
        o_scale=None,
        *,
        query=None,
        kv_cache=None,
        ckv_scale=None,
        ckv_scale_arr=None,
        kpe_scale=None,
        sinks=None,
        skip_softmax_threshold_scale_factor=None,
        bmm1_scale=None,
        bmm2_scale=None,
    ):
        require(self._tables is not None, "run() before plan()")
        tokens, heads, page_size = self._tables.query_start[-1], self._heads[0], self._options["page_size"]
        for part, dim in zip(query, (RANK, ROPE_DIM), strict=True):
            require(part.shape == (tokens, heads, dim) and part.is_contiguous(), "queries are in two parts")
        for cache, dim in zip(kv_cache, (RANK, ROPE_DIM), strict=True):
            require(cache.shape[1:] == (page_size, dim) and cache.is_contiguous(), "the cache is in two parts")
        dtypes = {tensor.dtype for tensor in (*query, *kv_cache)}
        require(dtypes == {self._options["q_data_type"]}, "dtypes differ from the plan's")
        if self.device.recorder is not None:
            require(self._buffers is not None, "a wrapper without fixed buffers was captured")
            return self.device.recorder.run_opaque(lambda: self._compute(query, kv_cache, None, None))
        return self._compute(query, kv_cache, None, None)

    def _compute_all(self, q, kv, sinks, scale):
        latents = kv[0].unsqueeze(2)
        keys = torch.cat([latents, kv[1].unsqueeze(2)], dim=-1)
        return super()._compute_all(torch.cat(q, dim=-1), (keys, latents), sinks, scale)


def fake_mla(wrapper: type[Wrapper]) -> SimpleNamespace:
    """The module `flashinfer.mla`, with the wrapper made for one device."""
    return SimpleNamespace(BatchMLAPagedAttentionWrapper=wrapper, MLAPlanMetadata=MLAPlanMetadata)
