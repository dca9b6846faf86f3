"""PageTables: a step's block tables in the compressed form (CSR) that FlashInfer reads."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from hfpaged.runtime.attention.shared_prefixes import SharedPrefixes
from hfpaged.runtime.batch import StepBatch
from hfpaged.runtime.device.accelerator import Accelerator
from hfpaged.runtime.device.staging import PinnedRing


class PageTables(NamedTuple):
    """Pages of R requests, one request's after the other's. All int32.

    What a plan reads is in page-locked host memory: FlashInfer would fetch it from the device otherwise, and wait.

    Attributes:
        query_start: [R + 1] on the host, first packed token of each request, then T.
        page_start: [R + 1] on the host, first entry of each request in `pages`, then their number.
        last_page_len: [R] on the host, tokens in each request's last page, 1 to page size.
        context_len: [R] on the host, tokens of each request.
        pages: on the device, page ids.
        one_each: whether every request has one token in the step.
    """

    query_start: torch.Tensor
    page_start: torch.Tensor
    last_page_len: torch.Tensor
    context_len: torch.Tensor
    pages: torch.Tensor
    one_each: bool


class DividedTables(NamedTuple):
    """A step of one token each in two parts.

    Attributes:
        shared: its requests are groups of requests, with the pages that all of a group begin with.
        rest: the requests with their pages behind those.
    """

    shared: PageTables
    rest: PageTables


class StepTables(NamedTuple):
    """A step's tables, and the same in two parts if that was asked for."""

    whole: PageTables
    divided: DividedTables | None


class PageArrays(NamedTuple):
    """`PageTables` before they are brought anywhere, int32."""

    query_start: np.ndarray
    page_start: np.ndarray
    last_page_len: np.ndarray
    context_len: np.ndarray
    pages: np.ndarray


class PageTableWriter:
    """Writes one step's page tables after the other."""

    def __init__(self, accelerator: Accelerator):
        self._host = PinnedRing(accelerator, torch.int32)
        self._pages = PinnedRing(accelerator, torch.int32)

    def write(self, batch: StepBatch, prefixes: SharedPrefixes | None = None) -> StepTables:
        """Queue the copy of the pages and lay out the rest.

        The tables hold until the call after the next; the plans made from them must be queued before the next.

        Args:
            prefixes: where to divide a batch of one token for each request.
        """
        parts = [whole(batch)]
        if prefixes is not None:
            parts += divided(batch, prefixes)
        host = iter(self._host.fill([array for part in parts for array in part[:-1]]))
        pages = iter(self._pages.upload([part.pages for part in parts]))
        tables = []
        for part in parts:
            one_each = int(part.query_start[-1]) == len(part.last_page_len)
            tables.append(PageTables(*(next(host) for _ in part[:-1]), next(pages), one_each))
        return StepTables(tables[0], None if prefixes is None else DividedTables(*tables[1:]))


def whole(batch: StepBatch) -> PageArrays:
    """All pages of all requests."""
    page_start, last_page_len, pages = compressed(batch)
    query_start = np.asarray(batch.query_start, dtype=np.int32)
    return PageArrays(query_start, page_start, last_page_len, batch.context_len, pages)


def divided(batch: StepBatch, prefixes: SharedPrefixes) -> tuple[PageArrays, PageArrays]:
    """The pages that groups share, and those behind them, for requests of one token each."""
    members = np.diff(prefixes.start)
    tables = batch.block_tables[batch.table_rows[prefixes.start[:-1]]]
    lengths = prefixes.blocks * np.int32(batch.block_size)
    shared = PageArrays(
        query_start=prefixes.start,
        page_start=_starts(prefixes.blocks),
        last_page_len=np.full(len(members), batch.block_size, dtype=np.int32),
        context_len=lengths,
        pages=tables[np.arange(tables.shape[1]) < prefixes.blocks[:, None]].astype(np.int32),
    )
    skipped = np.repeat(prefixes.blocks, members)
    page_start, last_page_len, pages = compressed(batch, skipped)
    rest = PageArrays(
        query_start=np.arange(len(skipped) + 1, dtype=np.int32),
        page_start=page_start,
        last_page_len=last_page_len,
        context_len=batch.context_len - np.repeat(lengths, members),
        pages=pages,
    )
    return shared, rest


def compressed(batch: StepBatch, skipped: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(page_start [R + 1], last_page_len [R], pages) of a batch, int32.

    Args:
        skipped: [R], pages of each request to leave out, from its first on.
    """
    counts = -(-batch.context_len // batch.block_size)
    tables = batch.block_tables[batch.table_rows, : counts.max()]
    column = np.arange(tables.shape[1])
    wanted = column < counts[:, None]
    last_page_len = batch.context_len - (counts - 1) * batch.block_size
    if skipped is not None:
        wanted &= column >= skipped[:, None]
        counts = counts - skipped
    return _starts(counts), last_page_len.astype(np.int32), tables[wanted].astype(np.int32)


def _starts(counts: np.ndarray) -> np.ndarray:
    """[R + 1]: where each of so many things begins that lie behind each other, then their number. int32."""
    starts = np.zeros(len(counts) + 1, dtype=np.int32)
    np.cumsum(counts, out=starts[1:])
    return starts
