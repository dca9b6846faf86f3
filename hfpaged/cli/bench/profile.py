"""Where the time of a step goes: steps of growing batch, context and prompt on the step program, by operation."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np
import torch
from transformers import PreTrainedModel

from hfpaged.cli.bench.peaks import Peaks
from hfpaged.native.kv_layout import KVLayout
from hfpaged.program.description import Model
from hfpaged.program.program import StepProgram
from hfpaged.program.step_arrays import KVPairs
from hfpaged.runtime.batch import StepBatch

BLOCK_SIZE = 16
_REPEATS = 5


@dataclass(frozen=True)
class StepShape:
    """`requests` requests with `new_tokens` tokens each, the last ones of `context`."""

    requests: int
    new_tokens: int
    context: int

    @property
    def tokens(self) -> int:
        """New tokens of all requests."""
        return self.requests * self.new_tokens


BATCHES = tuple(StepShape(requests, 1, 128) for requests in (1, 4, 16, 32, 64, 256))
CONTEXTS = tuple(StepShape(8, 1, context) for context in (512, 2048, 8192))
PROMPTS = tuple(StepShape(1, tokens, tokens) for tokens in (64, 256, 1024))
SHAPES = BATCHES + CONTEXTS + PROMPTS


@dataclass(frozen=True)
class Profile:
    """The median step of a shape.

    Attributes:
        seconds: of the step.
        roofline: the least time by the measured peaks, as a fraction of `seconds`: of each byte of weights, keys and
            values read once or of all multiply-adds, whichever takes longer, for the products and for attention apart.
        operations: seconds by operation.
    """

    shape: StepShape
    seconds: float
    roofline: float
    operations: dict[str, float]


class Profiler:
    """Runs steps of random tokens over a pool of its own.

    Raises:
        NotRecognized: there is no step program for the model.
    """

    def __init__(self, model: PreTrainedModel, threads: int, peaks: Peaks):
        self._program = StepProgram.build(model, threads)
        self._vocab = model.config.get_text_config().vocab_size
        self._peaks = peaks

    def run(self, shape: StepShape) -> Profile:
        """Profile one shape."""
        kv, batch = make_pool(shape, self._program.description), make_batch(shape, self._vocab)
        samples = batch.query_start[1:].astype(np.int64) - 1
        self._program.profile(batch, kv, samples)
        runs = [self._program.profile(batch, kv, samples) for _ in range(_REPEATS)]
        seconds = statistics.median(sum(run.values()) for run in runs)
        operations = {label: statistics.median(run[label] for run in runs) for label in runs[0]}
        return Profile(shape, seconds, self._least_seconds(shape) / seconds, operations)

    def _least_seconds(self, shape: StepShape) -> float:
        model, element = self._program.description, self._program.description.dtype.itemsize
        product_flops = 2 * self._program.multiply_adds(shape.tokens, shape.requests)
        # The tokens of a prompt see half of each other.
        seen = shape.requests * shape.new_tokens * (shape.context - shape.new_tokens / 2)
        attention_flops = kv_bytes = 0.0
        for one in (layer.attention for layer in model.layers):
            attention_flops += 2 * seen * one.heads * (one.key_dim + one.value_dim)
            kv_bytes += shape.requests * shape.context * one.kv_heads * (one.key_dim + one.value_dim) * element
        weight_bytes = self._program.read_bytes(shape.requests)
        products = max(product_flops / self._peaks.flops, weight_bytes / self._peaks.read_bytes)
        return products + max(attention_flops / self._peaks.flops, kv_bytes / self._peaks.read_bytes)


def make_pool(shape: StepShape, model: Model) -> KVPairs:
    """Keys and values of all layers, with room for a step and its contexts."""
    blocks = shape.requests * -(-shape.context // BLOCK_SIZE)
    pool = []
    for layer in model.layers:
        attention = layer.attention
        layout = KVLayout(blocks, BLOCK_SIZE, attention.kv_heads, attention.key_dim, attention.value_dim)
        # Pages that nobody wrote would all be one page of zeros, and reading them would cost nothing.
        pool.append(layout.views(torch.full(layout.memory_shape, 0.5, dtype=model.dtype)))
    return pool


def make_batch(shape: StepShape, vocab: int) -> StepBatch:
    """A step of random tokens, its blocks in random order."""
    rng = np.random.default_rng(0)
    width = -(-shape.context // BLOCK_SIZE)
    tables = rng.permutation(shape.requests * width).astype(np.int32).reshape(shape.requests, width)
    positions = np.arange(shape.context - shape.new_tokens, shape.context)
    slots = tables[:, positions // BLOCK_SIZE].astype(np.int64) * BLOCK_SIZE + positions % BLOCK_SIZE
    query_start = np.arange(shape.requests + 1, dtype=np.int32) * np.int32(shape.new_tokens)
    return StepBatch(
        token_ids=rng.integers(vocab, size=shape.tokens),
        positions=np.tile(positions, shape.requests),
        slots=slots.reshape(-1),
        query_start=query_start,
        context_len=np.full(shape.requests, shape.context, dtype=np.int32),
        table_rows=np.arange(shape.requests, dtype=np.int32),
        block_tables=tables,
        block_size=BLOCK_SIZE,
        logit_rows=query_start[1:].astype(np.int64) - 1,
        feedback=np.full(shape.tokens, -1, dtype=np.int64),
    )


def profile_table(peaks: Peaks, profiles: Sequence[Profile]) -> str:
    """One line a shape: milliseconds, tokens per second, roofline fraction and the shares of the operations."""
    lines = [
        f"peaks: {peaks.flops / 1e9:.0f} GFLOP/s, {peaks.read_bytes / 1e9:.1f} GB/s read",
        f"{'requests':>8}{'new':>6}{'context':>9}{'ms':>9}{'tokens/s':>10}{'roofline':>10}  operations",
    ]
    for profile in profiles:
        shape = profile.shape
        largest = sorted(profile.operations.items(), key=lambda item: -item[1])
        shares = ", ".join(f"{label} {100 * spent / profile.seconds:.0f} %" for label, spent in largest[:6])
        lines.append(
            f"{shape.requests:>8}{shape.new_tokens:>6}{shape.context:>9}{1e3 * profile.seconds:>9.2f}"
            f"{shape.tokens / profile.seconds:>10.0f}{100 * profile.roofline:>8.0f} %  {shares}"
        )
    return "\n".join(lines)


def profile_rows(peaks: Peaks, profiles: Sequence[Profile]) -> list[dict]:
    """The same as JSON objects, in seconds."""
    return [{"peaks": peaks._asdict(), **asdict(profile)} for profile in profiles]
