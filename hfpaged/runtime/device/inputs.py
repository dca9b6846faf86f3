"""StepInputs: what a packed forward reads on the device, brought there in one copy."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch

from hfpaged.runtime.batch import PADDING_ROW, StepBatch
from hfpaged.runtime.device.accelerator import Accelerator
from hfpaged.runtime.device.staging import PinnedRing
from hfpaged.sampling.draw_table import DrawTable

# Of one request, in a step that is run as if each token were one.
MOST_SINGLE_TOKENS = 16


class StepInputs(NamedTuple):
    """All int64, on the device; T tokens, S wanted rows of logits, one at least.

    Attributes:
        token_ids: [T], meaningless where `feedback` has the token.
        positions: [T].
        feedback: [T], index of the token among those that the step before drew; -1: it is in `token_ids`.
        slots: [T].
        logit_rows: [S].
        draw_rows: [S or more], which of the wanted rows each token is drawn from; 0 behind the last of them.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    feedback: torch.Tensor
    slots: torch.Tensor
    logit_rows: torch.Tensor
    draw_rows: torch.Tensor


class InputWriter:
    """Brings batches to the device."""

    def __init__(self, accelerator: Accelerator):
        self._ring = PinnedRing(accelerator, torch.int64)

    def write(self, batch: StepBatch, out: torch.Tensor | None = None) -> StepInputs:
        """Queue the copy of a batch.

        Args:
            out: int64 memory on the device, for it; None: new memory.
        """
        # Models cannot take an empty index.
        rows = batch.logit_rows if len(batch.logit_rows) else np.zeros(1, dtype=np.int64)
        draw_rows = batch.draws.logit_rows
        draw_rows = np.pad(draw_rows, (0, max(0, len(rows) - len(draw_rows))))
        return StepInputs(
            *self._ring.upload((batch.token_ids, batch.positions, batch.feedback, batch.slots, rows, draw_rows), out)
        )


def single_tokens(batch: StepBatch) -> StepBatch | None:
    """The same step with a request for each token, in the blocks of its own; None if it has better uses than that.

    A token sees those before it whichever step they are in: all keys and values of a step are there before it attends.
    Each reads all that it sees by itself, though, so this is for a few guesses, not for prompts.
    """
    counts = np.diff(batch.query_start)
    if counts.max() > MOST_SINGLE_TOKENS:
        return None
    if len(counts) == len(batch.token_ids):
        return batch
    return replace(
        batch,
        query_start=np.arange(len(batch.token_ids) + 1, dtype=np.int32),
        context_len=(batch.positions + 1).astype(np.int32),
        table_rows=np.repeat(batch.table_rows, counts),
    )


def padded(batch: StepBatch, size: int, padding_block: int) -> StepBatch:
    """A batch of one token for each of R requests, made one of `size` by requests that attend to themselves alone.

    An empty request would be simpler, but what kernels give for one is not defined.
    """
    count = size - len(batch.context_len)
    if count == 0:
        return batch
    padding = padding_batch(count, padding_block, batch.block_size)
    names = ("token_ids", "positions", "feedback", "slots", "context_len", "table_rows")
    joined = {name: np.concatenate([getattr(batch, name), getattr(padding, name)]) for name in names}
    return replace(
        batch,
        query_start=np.arange(size + 1, dtype=np.int32),
        logit_rows=np.arange(size, dtype=np.int64),
        **joined,
    )


def padding_batch(size: int, padding_block: int, block_size: int) -> StepBatch:
    """A batch of nothing but requests that fill up others."""
    zeros = np.zeros(size, dtype=np.int64)
    return StepBatch(
        token_ids=zeros,
        positions=zeros,
        feedback=zeros - 1,
        slots=zeros + padding_block * block_size,
        query_start=np.arange(size + 1, dtype=np.int32),
        context_len=np.ones(size, dtype=np.int32),
        table_rows=np.full(size, PADDING_ROW, dtype=np.int32),
        block_tables=np.full((1, 1), padding_block, dtype=np.int32),
        block_size=block_size,
        logit_rows=np.arange(size, dtype=np.int64),
        draws=DrawTable.neutral(size),
    )
