"""Requests with random keys and values in scattered blocks of a cache, and what attention over them should give."""

from __future__ import annotations

from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import torch

from hfpaged.runtime.attention.interface import AttentionBackend, AttentionParams, LayerShape

CPU = torch.device("cpu")


class Piece(NamedTuple):
    """Tokens [first, end) of a request, as one step would run them."""

    request: int
    first: int
    end: int


class PagedProblem:
    """Some requests, all written to a cache that was NaN everywhere before.

    Args:
        backend_class: the backend under test.
        dtype: of queries, keys and values.
        shape: of the layer.
        num_heads: query heads.
        contexts: tokens of each request.
        block_size: tokens per block.
        device: where the cache is.
    """

    def __init__(
        self,
        backend_class: type[AttentionBackend],
        dtype: torch.dtype,
        shape: LayerShape,
        num_heads: int,
        contexts: list[int],
        block_size: int = 16,
        device: torch.device = CPU,
    ):
        self.backend = backend_class(device, dtype, block_size)
        self.shape, self.block_size, self.contexts = shape, block_size, contexts
        generator = torch.Generator().manual_seed(1)

        def random(context: int, heads: int, dim: int) -> torch.Tensor:
            return torch.randn(context, heads, dim, generator=generator).to(device, dtype)

        self.query = [random(context, num_heads, shape.key_dim) for context in contexts]
        self.key = [random(context, shape.num_kv_heads, shape.key_dim) for context in contexts]
        self.value = [random(context, shape.num_kv_heads, shape.value_dim) for context in contexts]
        self._scatter_blocks()
        self.kv = self.backend.allocate(shape, self.num_blocks)
        for tensor in self.kv:
            tensor.fill_(float("nan"))
        self.backend.begin(self.batch([Piece(i, 0, context) for i, context in enumerate(contexts)]))
        self.backend.write(self.kv, torch.cat(self.key), torch.cat(self.value))

    def _scatter_blocks(self) -> None:
        counts = [-(-context // self.block_size) for context in self.contexts]
        self.num_blocks = sum(counts) + 2
        ids = np.random.default_rng(1).permutation(self.num_blocks)
        # Rows in another order than requests, entries beyond the context out of range: neither may be read.
        self.tables = np.full((len(counts) + 1, max(counts) + 1), self.num_blocks + 7, dtype=np.int32)
        self.rows = np.arange(len(counts), 0, -1, dtype=np.int32)
        for request, count in enumerate(counts):
            self.tables[self.rows[request], :count] = ids[:count]
            ids = ids[count:]

    def batch(self, pieces: list[Piece]) -> SimpleNamespace:
        """What backends read of a StepBatch."""
        slots = []
        for request, first, end in pieces:
            positions = np.arange(first, end)
            blocks = self.tables[self.rows[request], positions // self.block_size].astype(np.int64)
            slots.append(blocks * self.block_size + positions % self.block_size)
        return SimpleNamespace(
            query_start=np.cumsum([0] + [piece.end - piece.first for piece in pieces]).astype(np.int32),
            context_len=np.array([piece.end for piece in pieces], dtype=np.int32),
            table_rows=np.array([self.rows[piece.request] for piece in pieces], dtype=np.int32),
            block_tables=self.tables,
            slots=np.concatenate(slots),
            block_size=self.block_size,
        )

    def run(self, pieces: list[Piece], params: AttentionParams) -> list[torch.Tensor]:
        """Output of each piece, all of them in one step."""
        self.backend.begin(self.batch(pieces))
        query = torch.cat([self.query[piece.request][piece.first : piece.end] for piece in pieces])
        output = self.backend.run(self.kv, query, params)
        return list(output.split([piece.end - piece.first for piece in pieces]))

    def expected(self, piece: Piece, params: AttentionParams) -> torch.Tensor:
        """Output of one piece in fp64, by the definition of attention."""
        request, first, end = piece
        query = self.query[request][first:end].double()
        group = query.shape[1] // self.shape.num_kv_heads
        output = query.new_empty(end - first, query.shape[1], self.shape.value_dim)
        for token, position in enumerate(range(first, end)):
            start = 0 if params.window is None else max(0, position + 1 - params.window)
            key = self.key[request][start : position + 1].double().repeat_interleave(group, 1)
            value = self.value[request][start : position + 1].double().repeat_interleave(group, 1)
            scores = (key * query[token]).sum(-1) * params.scale
            if params.softcap is not None:
                scores = params.softcap * torch.tanh(scores / params.softcap)
            weights = scores.exp()
            total = weights.sum(0)
            if params.sinks is not None:
                total = total + params.sinks.double().exp()
            output[token] = (weights[..., None] * value).sum(0) / total[:, None]
        return output


def whole(problem: PagedProblem) -> list[Piece]:
    """Every request from its first token, as a step without cached prefixes would run it."""
    return [Piece(request, 0, context) for request, context in enumerate(problem.contexts)]


def last_tokens(problem: PagedProblem, counts: list[int]) -> list[Piece]:
    """The last `counts[i]` tokens of request i."""
    sizes = zip(problem.contexts, counts, strict=True)
    return [Piece(request, context - count, context) for request, (context, count) in enumerate(sizes)]


def share_first_blocks(problem: PagedProblem) -> None:
    """Let all requests begin with the keys, values and blocks of the first, as far as these are not its last block."""
    for request, context in enumerate(problem.contexts):
        blocks = (min(problem.contexts[0], context) - 1) // problem.block_size
        table, first = problem.tables[problem.rows[request]], problem.tables[problem.rows[0]]
        table[:blocks] = first[:blocks]
        for states in (problem.key, problem.value):
            states[request][: blocks * problem.block_size] = states[0][: blocks * problem.block_size]
    problem.backend.begin(problem.batch(whole(problem)))
    problem.backend.write(problem.kv, torch.cat(problem.key), torch.cat(problem.value))


def assert_matches(problem: PagedProblem, pieces: list[Piece], params: AttentionParams) -> None:
    """The backend's output equals the fp64 one up to the rounding of its dtype."""
    rtol, atol = {
        torch.float32: (2e-5, 2e-5),
        torch.bfloat16: (1.6e-2, 1e-2),
        torch.float16: (2e-3, 2e-3),
    }[problem.backend.dtype]
    for piece, output in zip(pieces, problem.run(pieces, params), strict=True):
        torch.testing.assert_close(output.double(), problem.expected(piece, params), rtol=rtol, atol=atol)
