"""FlashInfer's wrappers for keys and values in pages: see fake_flashinfer."""

from __future__ import annotations

import math
from typing import Any

import torch
from standin.contract import Tables, require
from standin.fake_accelerator import FakeAccelerator

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
HEAD_DIMS = frozenset({(64, 64), (128, 128), (256, 256), (192, 128)})
CUDA_CORE_GROUPS = {1, 2, 3, 4, 6, 8, 16}
# Arguments of every plan() that attention depends on.
PLAN_OPTIONS = (
    "page_size",
    "pos_encoding_mode",
    "window_left",
    "logits_soft_cap",
    "q_data_type",
    "kv_data_type",
    "o_data_type",
    "sm_scale",
    "non_blocking",
)


def plan_options(arguments: dict[str, Any], causal: bool) -> dict[str, Any]:
    """What a wrapper remembers of its plan's arguments."""
    options = {name: arguments[name] for name in PLAN_OPTIONS}
    return {**options, "kv_data_type": options["kv_data_type"] or options["q_data_type"], "causal": causal}


class Wrapper:
    """What the wrappers have in common."""

    device: FakeAccelerator  # set on subclasses made for one device
    head_dims = HEAD_DIMS

    def _start(self, workspace: torch.Tensor, kv_layout: str, use_cuda_graph: bool, buffers: list) -> None:
        require(workspace.dtype is torch.uint8 and workspace.numel() >= 1 << 20, "the workspace is too small")
        require(kv_layout == "NHD", "this stand-in knows NHD only")
        self._buffers = buffers if use_cuda_graph else None
        if use_cuda_graph:
            require(all(buffer is not None for buffer in buffers), "a captured step needs all its buffers")
            require(all(buffer.dtype is torch.int32 for buffer in buffers), "buffers are int32")
        self._tables: Tables | None = None
        self._plan_copy: int | None = None
        self._consumers: dict[int, int] = {}

    def _plan(self, tables: Tables, pages: torch.Tensor, heads: tuple, options: dict[str, Any]) -> None:
        self.device.forbid_while_capturing("plan()")
        require(
            self._plan_copy is None or self.device.is_done(self._plan_copy),
            "the last plan is still being copied to the device",
        )
        num_qo_heads, num_kv_heads, key_dim, value_dim = heads
        has_kernel = (key_dim, value_dim) in self.head_dims
        require(has_kernel, f"there is no kernel for head dimensions {key_dim}, {value_dim}")
        require(num_qo_heads % num_kv_heads == 0, "query heads are no multiple of KV heads")
        require(options["q_data_type"] in DTYPES, f"q_data_type is {options['q_data_type']}")
        require(options["kv_data_type"] is options["q_data_type"], "kv_data_type differs")
        require(options["o_data_type"] in (None, options["q_data_type"]), "o_data_type differs")
        require(options["pos_encoding_mode"] == "NONE", "positions are encoded before caching")
        require(options["non_blocking"], "a blocking plan")
        if self._buffers is not None:
            *small, fixed_pages = self._buffers
            if self._tables is not None:
                require(tables.requests == self._tables.requests, "the batch size of a captured step is fixed")
            require(all(len(buffer) in (tables.requests, tables.requests + 1) for buffer in small), "buffer sizes")
            count = tables.page_start[-1]
            require(count <= len(fixed_pages), "the pages do not fit the buffer of a captured step")
            fixed_pages[:count].copy_(pages[:count])
            pages = fixed_pages
        self._tables, self._pages, self._heads, self._options = tables, pages, heads, options
        self._plan_copy, self._consumers = self.device.queue(), {}

    def _attend(self, q: torch.Tensor, kv: tuple, sinks: torch.Tensor | None, scale: float | None) -> torch.Tensor:
        require(self._tables is not None, "run() before plan()")
        require(isinstance(kv, tuple) and len(kv) == 2, "the cache is a tuple of keys and values, not a list")
        num_qo_heads, num_kv_heads, key_dim, value_dim = self._heads
        dtype = self._options["q_data_type"]
        require(q.dtype == kv[0].dtype == kv[1].dtype == dtype, "dtypes differ from the plan's")
        require(q.is_contiguous() and all(cache.is_contiguous() for cache in kv), "not contiguous")
        require(q.shape == (self._tables.query_start[-1], num_qo_heads, key_dim), f"queries are {tuple(q.shape)}")
        for cache, dim in zip(kv, (key_dim, value_dim), strict=True):
            require(cache.shape[1:] == (self._options["page_size"], num_kv_heads, dim), "the cache's shape")
        require(kv[0].shape[0] == kv[1].shape[0], "keys and values have different numbers of pages")
        if self.device.recorder is not None:
            require(self._buffers is not None, "a wrapper without fixed buffers was captured")
            return self.device.recorder.run_opaque(lambda: self._compute(q, kv, sinks, scale))
        return self._compute(q, kv, sinks, scale)

    def _result(self, q: torch.Tensor, kv: tuple, return_lse: bool) -> Any:
        output = self._attend(q, kv, None, None)
        if not return_lse:
            return output
        require(self.device.recorder is None, "states are not captured")
        return output, self._lse

    def _compute(self, q: torch.Tensor, kv: tuple, sinks: torch.Tensor | None, scale: float | None) -> torch.Tensor:
        if self._buffers is not None and self.device.replaying is not None:
            recording, number = self.device.replaying
            first = self._consumers.setdefault(recording, number)
            require(first == number, "a replay with the plan of the one before")
        # What the library does inside is not the engine's doing: whoever watches for operations that wait looks away.
        with torch._C.DisableTorchFunction():
            return self._compute_all(q, kv, sinks, scale)

    def _compute_all(self, q: torch.Tensor, kv: tuple, sinks: torch.Tensor | None, scale: float | None) -> torch.Tensor:
        tables, page_size = self._tables, self._options["page_size"]
        output = q.new_empty(q.shape[0], q.shape[1], self._heads[3])
        self._lse = torch.empty(q.shape[:2], dtype=torch.float32)
        for request in range(tables.requests):
            first, end = tables.query_start[request : request + 2]
            pages = self._pages[tables.page_start[request] : tables.page_start[request + 1]].long()
            require(0 <= int(pages.min()) and int(pages.max()) < len(kv[0]), "a page id is out of range")
            key, value = (cache[pages].flatten(0, 1)[: tables.length(request, page_size)] for cache in kv)
            output[first:end], self._lse[first:end] = self._attend_one(q[first:end], key, value, sinks, scale)
        return output

    def _attend_one(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        sinks: torch.Tensor | None,
        scale: float | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        options = self._options
        scale = options["sm_scale"] if scale is None else scale
        scale = 1 / math.sqrt(self._heads[2]) if scale is None else scale
        group = self._heads[0] // self._heads[1]
        key, value = (states.float().repeat_interleave(group, dim=1) for states in (key, value))
        scores = torch.einsum("nhd,lhd->hnl", query.float(), key) * scale
        cap = options["logits_soft_cap"] or 0.0
        if cap > 0:
            scores = cap * torch.tanh(scores / cap)
        position = torch.arange(len(key) - len(query), len(key))[:, None]
        token = torch.arange(len(key))[None]
        hidden = token > position if options["causal"] else torch.zeros(len(query), len(key), dtype=torch.bool)
        if options["window_left"] >= 0:
            hidden = hidden | (token < position - options["window_left"])
        scores = scores.masked_fill(hidden, -math.inf)
        if sinks is not None:
            scores = torch.cat([scores, sinks.float().reshape(-1, 1, 1).expand(-1, scores.shape[1], 1)], dim=-1)
        output = torch.einsum("hnl,lhd->nhd", scores.softmax(dim=-1)[..., : len(key)], value)
        return output, scores.logsumexp(dim=-1).T / math.log(2)


class BatchDecodeWithPagedKVCacheWrapper(Wrapper):
    """One query a request."""

    def __init__(
        self,
        float_workspace_buffer,
        kv_layout="NHD",
        use_cuda_graph=False,
        use_tensor_cores=False,
        paged_kv_indptr_buffer=None,
        paged_kv_indices_buffer=None,
        paged_kv_last_page_len_buffer=None,
        backend="auto",
        jit_args=None,
    ):
        buffers = [paged_kv_indptr_buffer, paged_kv_last_page_len_buffer, paged_kv_indices_buffer]
        self._start(float_workspace_buffer, kv_layout, use_cuda_graph, buffers)
        self._tensor_cores = use_tensor_cores

    def plan(
        self,
        indptr,
        indices,
        last_page_len,
        num_qo_heads,
        num_kv_heads,
        head_dim,
        page_size,
        *,
        pos_encoding_mode="NONE",
        window_left=-1,
        window_right=0,
        logits_soft_cap=None,
        q_data_type="float16",
        kv_data_type=None,
        o_data_type=None,
        data_type=None,
        sm_scale=None,
        rope_scale=None,
        rope_theta=None,
        non_blocking=True,
        block_tables=None,
        seq_lens=None,
        fixed_split_size=None,
        disable_split_kv=False,
        q_len_per_req=1,
        is_causal=None,
    ):
        group = num_qo_heads // num_kv_heads
        require(self._tensor_cores or group in CUDA_CORE_GROUPS, f"Unsupported group_size: {group}")
        tables = Tables(self.device, None, indptr, indices, last_page_len, page_size)
        options = plan_options(locals(), causal=True)
        self._plan(tables, indices, (num_qo_heads, num_kv_heads, head_dim, head_dim), options)

    def run(
        self,
        q,
        paged_kv_cache,
        *args,
        q_scale=None,
        k_scale=None,
        v_scale=None,
        out=None,
        lse=None,
        return_lse=False,
        enable_pdl=None,
        window_left=None,
        sinks=None,
        q_len_per_req=None,
        skip_softmax_threshold_scale_factor=None,
        kv_cache_sf=None,
    ):
        require(not args and sinks is None, "this wrapper ignores sinks")
        return self._result(q, paged_kv_cache, return_lse)


class BatchPrefillWithPagedKVCacheWrapper(Wrapper):
    """Any number of queries a request."""

    takes_sinks = False

    def __init__(
        self,
        float_workspace_buffer,
        kv_layout="NHD",
        use_cuda_graph=False,
        qo_indptr_buf=None,
        paged_kv_indptr_buf=None,
        paged_kv_indices_buf=None,
        paged_kv_last_page_len_buf=None,
        custom_mask_buf=None,
        mask_indptr_buf=None,
        backend="auto",
        jit_args=None,
        jit_kwargs=None,
        variant_owns_mask=False,
    ):
        buffers = [qo_indptr_buf, paged_kv_indptr_buf, paged_kv_last_page_len_buf, paged_kv_indices_buf]
        self._start(float_workspace_buffer, kv_layout, use_cuda_graph, buffers)

    def plan(
        self,
        qo_indptr,
        paged_kv_indptr,
        paged_kv_indices,
        paged_kv_last_page_len,
        num_qo_heads,
        num_kv_heads,
        head_dim_qk,
        page_size,
        head_dim_vo=None,
        custom_mask=None,
        packed_custom_mask=None,
        causal=False,
        pos_encoding_mode="NONE",
        use_fp16_qk_reduction=False,
        sm_scale=None,
        window_left=-1,
        logits_soft_cap=None,
        rope_scale=None,
        rope_theta=None,
        q_data_type="float16",
        kv_data_type=None,
        o_data_type=None,
        non_blocking=True,
        prefix_len_ptr=None,
        token_pos_in_items_ptr=None,
        token_pos_in_items_len=0,
        max_item_len_ptr=None,
        seq_lens=None,
        seq_lens_q=None,
        block_tables=None,
        max_token_per_sequence=None,
        max_sequence_kv=None,
        fixed_split_size=None,
        disable_split_kv=False,
        uniform_q_len=None,
    ):
        require(custom_mask is None and packed_custom_mask is None, "masks are not used")
        tables = Tables(self.device, qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, page_size)
        options = plan_options(locals(), causal=causal)
        dims = (head_dim_qk, head_dim_qk if head_dim_vo is None else head_dim_vo)
        self._plan(tables, paged_kv_indices, (num_qo_heads, num_kv_heads, *dims), options)

    def run(
        self,
        q,
        paged_kv_cache,
        *args,
        q_scale=None,
        k_scale=None,
        v_scale=None,
        out=None,
        lse=None,
        return_lse=False,
        lse_base="log2",
        lse_layout="NH",
        enable_pdl=None,
        window_left=None,
        sinks=None,
        kv_cache_sf=None,
        skip_softmax_threshold_scale_factor=None,
        use_fp16_softmax=None,
        uses_spcompress=None,
    ):
        require(sinks is None, "this argument is ignored")
        if not self.takes_sinks:
            require(not args, "this wrapper takes no further arguments")
            require(self._options["causal"] or return_lse, "causal is False unless it is asked for")
            require(lse_base == "log2", "states are merged to the base 2")
            return self._result(q, paged_kv_cache, return_lse)
        sink, scale = args
        require(sink.dtype is torch.float32 and sink.shape == (self._heads[0],), "sinks are fp32, one a query head")
        require(isinstance(scale, float), "the scale is a float")
        return self._attend(q, paged_kv_cache, sink, scale)


class BatchAttentionWithAttentionSinkWrapper(BatchPrefillWithPagedKVCacheWrapper):
    """The one that looks at sinks."""

    takes_sinks = True

    def __init__(
        self,
        float_workspace_buffer,
        kv_layout="NHD",
        use_cuda_graph=False,
        qo_indptr_buf=None,
        paged_kv_indptr_buf=None,
        paged_kv_indices_buf=None,
        paged_kv_last_page_len_buf=None,
        custom_mask_buf=None,
        mask_indptr_buf=None,
        backend="auto",
        pos_encoding_mode="NONE",
        use_fp16_qk_reduction=False,
        q_data_type=torch.bfloat16,
        kv_data_type=torch.bfloat16,
        head_dim_qk=128,
        head_dim_vo=128,
        window_left=-1,
    ):
        super().__init__(
            float_workspace_buffer,
            kv_layout,
            use_cuda_graph,
            qo_indptr_buf,
            paged_kv_indptr_buf,
            paged_kv_indices_buf,
            paged_kv_last_page_len_buf,
        )
        self._made_for = (q_data_type, kv_data_type, head_dim_qk, head_dim_vo, window_left >= 0)

    def _plan(self, tables, pages, heads, options):
        planned = (options["q_data_type"], options["kv_data_type"], *heads[2:], options["window_left"] >= 0)
        require(planned == self._made_for, f"planned for {planned}, but the kernel was made for {self._made_for}")
        super()._plan(tables, pages, heads, options)


WRAPPERS = (
    BatchDecodeWithPagedKVCacheWrapper,
    BatchPrefillWithPagedKVCacheWrapper,
    BatchAttentionWithAttentionSinkWrapper,
)
