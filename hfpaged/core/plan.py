"""Plan: what one step does, as plain data that a driver could send to other processes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

# Stands for a token that a step in flight is drawing: it has its place in the text, but its id is not known here yet.
UNKNOWN_TOKEN = -1


class PlannedRequest(NamedTuple):
    """One request's part of a step: compute `num_tokens` tokens from position `start` on.

    Attributes:
        tokens: their ids. UNKNOWN_TOKEN for one that the step before this one draws.
        full_table: all blocks of the request, the first time the runner sees it or after it lost its blocks.
        first_new_index, new_blocks: what changes in a table that the runner knows: entries from this index on.
        logits_for: how many of the last tokens need logits; 0 if the request does not catch up in this step, unless
            its prompt is scored.
        samples: ids of the requests whose next token is drawn from the last token's logits: this one, then those
            forked from it.
        scored: how many of the rows of logits, the first ones, only score a prompt token that follows.
    """

    id: int
    start: int
    num_tokens: int
    tokens: tuple[int, ...]
    full_table: tuple[int, ...] | None
    first_new_index: int
    new_blocks: tuple[int, ...]
    logits_for: int
    samples: tuple[int, ...]
    scored: int = 0


class Plan(NamedTuple):
    """One step. Executed in this order: stores, copies, loads, then the forward over `entries`.

    Attributes:
        step: number of the step; a step that failed is planned again under the same number.
        copies: (source, destination) of blocks to copy. All sources are read before a destination is written.
        stores: (request id, blocks) to move out to the block store.
        loads: (request id, blocks) to fill from the first of its stored blocks.
        recomputed: ids of requests that lose their blocks and will compute them again.
    """

    step: int
    entries: tuple[PlannedRequest, ...]
    copies: tuple[tuple[int, int], ...] = ()
    stores: tuple[tuple[int, tuple[int, ...]], ...] = ()
    loads: tuple[tuple[int, tuple[int, ...]], ...] = ()
    recomputed: tuple[int, ...] = ()

    @property
    def num_tokens(self) -> int:
        """Tokens that the step computes."""
        return sum(entry.num_tokens for entry in self.entries)

    def sampled_rows(self) -> Iterator[tuple[range, int]]:
        """(rows of the step's logits, request id) of all requests that catch up: a parent and its forks share rows."""
        first = 0
        for entry in self.entries:
            rows = range(first + entry.scored, first + entry.logits_for)
            first = rows.stop
            for request_id in entry.samples:
                yield rows, request_id
