"""Drives a StepProgram in tests: requests, blocks and steps, without the scheduler."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch

from hfpaged.native.kv_layout import KVLayout
from hfpaged.program.program import StepProgram
from hfpaged.program.step_arrays import StepArrays


@dataclass
class Request:
    """One sequence: its tokens, how many of them are in the cache, and the logits its steps gave."""

    tokens: list[int]
    row: int
    done: int = 0
    logits: list[torch.Tensor] = field(default_factory=list)


class Stepper:
    """A KV pool and the requests in it. Block ids are dealt out in an order that is not ascending."""

    def __init__(self, program: StepProgram, block_size: int = 16, max_requests: int = 64, max_blocks: int = 8):
        self.program = program
        self.block_size = block_size
        tables = np.random.default_rng(0).permutation(max_requests * max_blocks).astype(np.int32)
        self.tables = tables.reshape(max_requests, max_blocks)
        model = program.description
        layouts = [
            KVLayout(self.tables.size, block_size, shape.kv_heads, shape.key_dim, shape.value_dim)
            for shape in (layer.attention for layer in model.layers)
        ]
        self.kv = [layout.views(torch.zeros(layout.memory_shape, dtype=model.dtype)) for layout in layouts]
        self.requests: list[Request] = []

    def add(self, tokens: list[int]) -> Request:
        """A new request with nothing computed yet."""
        request = Request(list(tokens), len(self.requests))
        self.requests.append(request)
        return request

    def batch(self, work: list[tuple[Request, int]]) -> StepArrays:
        """The next `n` tokens of each request."""
        counts = [n for _, n in work]
        positions = np.concatenate([np.arange(r.done, r.done + n) for r, n in work]).astype(np.int64)
        rows = np.repeat([r.row for r, _ in work], counts)
        blocks = self.tables[rows, positions // self.block_size].astype(np.int64)
        return StepArrays(
            token_ids=np.concatenate([r.tokens[r.done : r.done + n] for r, n in work]).astype(np.int64),
            positions=positions,
            slots=blocks * self.block_size + positions % self.block_size,
            query_start=np.concatenate([[0], np.cumsum(counts)]).astype(np.int32),
            context_len=np.array([r.done + n for r, n in work], dtype=np.int32),
            table_rows=np.array([r.row for r, _ in work], dtype=np.int32),
            block_tables=self.tables,
            block_size=self.block_size,
        )

    def step(self, work: list[tuple[Request, int]]) -> np.ndarray:
        """Compute the next `n` tokens of each request; sample the last of each. Returns the argmax of each."""
        batch = self.batch(work)
        last = batch.query_start[1:].astype(np.int64) - 1
        best, logits = self.program.run(batch, self.kv, last, want_logits=True)
        for (request, n), row in zip(work, logits, strict=True):
            request.done += n
            request.logits.append(row)
        return best

    def prefill(self, request: Request, chunk: int) -> int:
        """Compute all tokens of a request, at most `chunk` a step. Returns the argmax of the last."""
        while request.done < len(request.tokens):
            best = self.step([(request, min(chunk, len(request.tokens) - request.done))])
        return int(best[0])

    def greedy(self, prompts: list[list[int]], new_tokens: int, chunk: int = 1 << 30) -> list[list[int]]:
        """Generate greedily for all prompts together. Returns the new tokens of each."""
        requests = [self.add(prompt) for prompt in prompts]
        for request in requests:
            request.tokens.append(self.prefill(request, chunk))
        for _ in range(new_tokens - 1):
            for request, token in zip(requests, self.step([(r, 1) for r in requests]), strict=True):
                request.tokens.append(int(token))
        return [request.tokens[len(prompt) :] for request, prompt in zip(requests, prompts, strict=True)]
