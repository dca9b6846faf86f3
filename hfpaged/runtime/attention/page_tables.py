"""PageTables: a step's block tables in the compressed form (CSR) that FlashInfer reads."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

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


class PageTableWriter:
    """Writes one step's page tables after the other."""

    def __init__(self, accelerator: Accelerator):
        self._host = PinnedRing(accelerator, torch.int32)
        self._pages = PinnedRing(accelerator, torch.int32)

    def write(self, batch: StepBatch) -> PageTables:
        """Queue the copy of the pages and lay out the rest.

        The tables hold until the call after the next; the plans made from them must be queued before the next.
        """
        page_start, last_page_len, pages = compressed(batch)
        query_start = np.asarray(batch.query_start, dtype=np.int32)
        host = self._host.fill((query_start, page_start, last_page_len, batch.context_len))
        (device_pages,) = self._pages.upload((pages,))
        return PageTables(*host, device_pages, one_each=int(query_start[-1]) == len(last_page_len))


def compressed(batch: StepBatch) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(page_start [R + 1], last_page_len [R], pages) of a batch, int32."""
    counts = -(-batch.context_len // batch.block_size)
    page_start = np.zeros(len(counts) + 1, dtype=np.int32)
    np.cumsum(counts, out=page_start[1:])
    tables = batch.block_tables[batch.table_rows, : counts.max()]
    pages = tables[np.arange(tables.shape[1]) < counts[:, None]]
    last_page_len = batch.context_len - (counts - 1) * batch.block_size
    return page_start, last_page_len.astype(np.int32), pages.astype(np.int32)
