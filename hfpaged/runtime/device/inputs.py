"""StepInputs: what a packed forward reads on the device, brought there in one copy."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch

from hfpaged.runtime.batch import PADDING_ROW, StepBatch
from hfpaged.runtime.device.accelerator import Accelerator
from hfpaged.runtime.device.staging import PinnedRing


class StepInputs(NamedTuple):
    """All int64, on the device; T tokens, S wanted rows of logits, one at least.

    Attributes:
        token_ids: [T], meaningless where `feedback` has the token.
        positions: [T].
        feedback: [T], index of the token among those that the step before drew; -1: it is in `token_ids`.
        slots: [T].
        logit_rows: [S].
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    feedback: torch.Tensor
    slots: torch.Tensor
    logit_rows: torch.Tensor


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
        return StepInputs(
            *self._ring.upload((batch.token_ids, batch.positions, batch.feedback, batch.slots, rows), out)
        )


def padded(batch: StepBatch, size: int, padding_block: int) -> StepBatch:
    """A batch of one token for each of R requests, made one of `size` by requests that attend to themselves alone.

    An empty request would be simpler, but what kernels give for one is not defined.
    """
    count = size - len(batch.context_len)
    if count == 0:
        return batch
    zeros = np.zeros(count, dtype=np.int64)
    return replace(
        batch,
        token_ids=np.concatenate([batch.token_ids, zeros]),
        positions=np.concatenate([batch.positions, zeros]),
        feedback=np.concatenate([batch.feedback, zeros - 1]),
        slots=np.concatenate([batch.slots, zeros + padding_block * batch.block_size]),
        query_start=np.arange(size + 1, dtype=np.int32),
        context_len=np.concatenate([batch.context_len, np.ones(count, dtype=np.int32)]),
        table_rows=np.concatenate([batch.table_rows, np.full(count, PADDING_ROW, dtype=np.int32)]),
        logit_rows=np.arange(size, dtype=np.int64),
    )
