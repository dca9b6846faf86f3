"""Draws of a step, where its logits are: as many as it has or, to be captured, one for every row of them."""

from __future__ import annotations

from typing import NamedTuple

import torch

from hfpaged.runtime.device.accelerator import Accelerator
from hfpaged.runtime.device.draw_launch import DrawFunction
from hfpaged.runtime.device.staging import PinnedRing
from hfpaged.sampling.draw_table import NUM_NUMBERS, DrawTable


class StepTensors(NamedTuple):
    """What a forward gives, on the device.

    Attributes:
        logits: [S, V].
        argmax: int64 [S].
        drawn: int64 [N or more], the argmax of the row that each draw is from.
    """

    logits: torch.Tensor
    argmax: torch.Tensor
    drawn: torch.Tensor


class Drawer:
    """Draws what is not the likeliest token. What it needs to know of the rows comes in one copy.

    Args:
        function: draws them.
    """

    def __init__(self, accelerator: Accelerator, function: DrawFunction):
        self._accelerator = accelerator
        self._function = function
        self._indices = PinnedRing(accelerator, torch.int64)
        self._numbers = PinnedRing(accelerator, torch.float64)

    def draw(self, table: DrawTable, found: StepTensors) -> torch.Tensor:
        """The tokens of a table, int64 [N]."""
        drawn = found.drawn[: len(table.logit_rows)]
        sampled = table.sampled
        if not len(sampled):
            return drawn
        where, rows = self._indices.upload((sampled, table.logit_rows[sampled]))
        (numbers,) = self._numbers.upload((table.numbers[:, sampled],))
        logits, likeliest = found.logits.index_select(0, rows), drawn.index_select(0, where)
        return drawn.index_copy(0, where, self._function(logits, likeliest, numbers.view(NUM_NUMBERS, -1)))

    def memory(self, size: int) -> torch.Tensor:
        """Device memory for `write`."""
        return torch.zeros(NUM_NUMBERS * size, dtype=torch.float64, device=self._accelerator.device)

    def write(self, table: DrawTable, memory: torch.Tensor) -> None:
        """Queue the copy of what `draw_by_row` reads, behind whatever still reads the memory."""
        self._numbers.upload((table.by_row(len(memory) // NUM_NUMBERS),), memory)

    def draw_by_row(self, found: StepTensors, draw_rows: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
        """The tokens of the table that `write` wrote, with the same work whatever is in it.

        Args:
            found: of S rows.
            draw_rows: int64 [S], the row that each token is drawn from.

        Returns:
            int64 [S]: a token for each of `draw_rows`.
        """
        return self._function(found.logits, found.argmax, memory.view(NUM_NUMBERS, -1)).index_select(0, draw_rows)
