"""StepBatch: one plan as the flat arrays that a packed forward and the attention backends read."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from hfpaged.core.plan import UNKNOWN_TOKEN, Plan, PlannedRequest
from hfpaged.program.step_arrays import StepArrays
from hfpaged.sampling.draw_table import NO_DRAWS, DrawTable

# The row of the block tables that requests which only fill up a batch have.
PADDING_ROW = 0


@dataclass
class StepBatch(StepArrays):
    """The tokens of one step, and which of their logits are wanted for what.

    Attributes:
        token_ids: as in `StepArrays`; UNKNOWN_TOKEN for those that the step before draws.
        block_tables: as in `StepArrays`; persistent, so that a later plan changes them.
        feedback: int64 [T], which of the tokens that the step before draws it is; -1: none of them.
        logit_rows: int64 [S], packed tokens whose logits are wanted, in plan order.
        draws: what to draw from those logits, where a device draws.
    """

    logit_rows: np.ndarray
    feedback: np.ndarray
    draws: DrawTable = NO_DRAWS


class BlockTables:
    """The block tables of all requests that hold blocks, one row each, updated by what a plan adds.

    A step's work is proportional to the tokens and blocks that it adds, never to the context.

    Args:
        padding_block: the block that requests have which only fill up a batch.
    """

    def __init__(self, block_size: int, padding_block: int = 0):
        self.block_size = block_size
        self._table = np.zeros((16, 16), dtype=np.int32)
        self._table[PADDING_ROW, 0] = padding_block
        self._rows: dict[int, int] = {}
        self._free = list(range(15, PADDING_ROW, -1))
        self._counted = np.arange(64, dtype=np.int32)

    def forget(self, request_id: int) -> None:
        """Free the row of a request that ended or lost its blocks. Unknown ids are ignored."""
        row = self._rows.pop(request_id, None)
        if row is not None:
            self._free.append(row)

    def build(self, plan: Plan, drawn_at: Mapping[int, int], draws: DrawTable = NO_DRAWS) -> StepBatch:
        """Update the tables by `plan` and lay its tokens out. Building the same plan again gives the same batch.

        Args:
            drawn_at: where the step before puts the token that it draws for a request, by id.
        """
        self._update(plan)
        # All entries' fields at once: much faster than one field after the other.
        columns = PlannedRequest(*zip(*plan.entries, strict=True))
        token_ids = np.array([*itertools.chain.from_iterable(columns.tokens)], dtype=np.int64)
        starts = np.array(columns.start, dtype=np.int64)
        rows = np.array([self._rows[request_id] for request_id in columns.id], dtype=np.int32)
        if len(token_ids) == len(rows):
            # Each request computes one token, as in most steps.
            query_start, positions, row_of_token, ends = self._count_to(len(rows)), starts, rows, starts + 1
        else:
            counts = np.array(columns.num_tokens, dtype=np.int64)
            query_start = np.zeros(len(rows) + 1, dtype=np.int32)
            np.cumsum(counts, out=query_start[1:])
            positions = np.arange(len(token_ids)) + np.repeat(starts - query_start[:-1], counts)
            row_of_token, ends = np.repeat(rows, counts), starts + counts
        index = positions // self.block_size
        return StepBatch(
            token_ids=token_ids,
            positions=positions,
            # That is block * block_size + positions % block_size, with fewer calls.
            slots=(self._table[row_of_token, index] - index) * self.block_size + positions,
            query_start=query_start,
            context_len=ends.astype(np.int32),
            table_rows=rows,
            block_tables=self._table,
            block_size=self.block_size,
            logit_rows=_last_rows(query_start[1:].astype(np.int64), columns.logits_for),
            feedback=_feedback(plan, token_ids, query_start, drawn_at),
            draws=draws,
        )

    def _update(self, plan: Plan) -> None:
        for entry in plan.entries:
            if entry.full_table is not None:
                self._write(self._row(entry.id), 0, entry.full_table)
            if entry.new_blocks:
                self._write(self._row(entry.id), entry.first_new_index, entry.new_blocks)

    def _count_to(self, last: int) -> np.ndarray:
        """0, 1, 2, ... `last` as int32, in memory that later batches share."""
        if last >= len(self._counted):
            self._counted = np.arange(2 * last, dtype=np.int32)
        return self._counted[: last + 1]

    def _row(self, request_id: int) -> int:
        row = self._rows.get(request_id)
        if row is None:
            if not self._free:
                self._grow(rows=2 * self._table.shape[0])
            row = self._rows[request_id] = self._free.pop()
        return row

    def _write(self, row: int, first: int, blocks: tuple[int, ...]) -> None:
        end = first + len(blocks)
        if end > self._table.shape[1]:
            self._grow(width=max(end, 2 * self._table.shape[1]))
        self._table[row, first:end] = blocks

    def _grow(self, rows: int | None = None, width: int | None = None) -> None:
        old = self._table
        self._table = np.zeros((rows or old.shape[0], width or old.shape[1]), dtype=np.int32)
        self._table[: old.shape[0], : old.shape[1]] = old
        self._free.extend(range(self._table.shape[0] - 1, old.shape[0] - 1, -1))


def _feedback(plan: Plan, token_ids: np.ndarray, query_start: np.ndarray, drawn_at: Mapping[int, int]) -> np.ndarray:
    feedback = np.full(len(token_ids), -1, dtype=np.int64)
    if not drawn_at:
        return feedback
    last = query_start[1:] - 1
    for index in np.flatnonzero(token_ids[last] == UNKNOWN_TOKEN):
        feedback[last[index]] = drawn_at[plan.entries[index].id]
    return feedback


def _last_rows(ends: np.ndarray, wanted: Sequence[int]) -> np.ndarray:
    """Indices of the last `wanted[i]` packed tokens before `ends[i]`, ascending, for all i in a row."""
    if wanted.count(1) == len(wanted):
        return ends - 1
    wanted = np.array(wanted, dtype=np.int64)
    total = int(wanted.sum())
    first_of_each = np.repeat(ends - wanted, wanted)
    offset_in_each = np.arange(total) - np.repeat(np.cumsum(wanted) - wanted, wanted)
    return first_of_each + offset_in_each
