"""Rows of a step whose tokens a device draws, each with other options, and what `Sampler` draws for them."""

from __future__ import annotations

import numpy as np
import torch
from transformers import MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from hfpaged.sampling.draw_table import Draw, DrawSettings, DrawTable
from hfpaged.sampling.processors import CompiledProcessors
from hfpaged.sampling.sampler import Sampler, SampleRow

VOCABULARY = 300
WARPERS = (
    [],
    [TemperatureLogitsWarper(0.7)],
    [TemperatureLogitsWarper(1.7), TopKLogitsWarper(20)],
    [TopKLogitsWarper(VOCABULARY + 1)],
    [TopKLogitsWarper(1)],
    [TopPLogitsWarper(0.8)],
    [TemperatureLogitsWarper(1.3), TopKLogitsWarper(50), TopPLogitsWarper(0.9), MinPLogitsWarper(0.02)],
    [TopPLogitsWarper(0.0)],
    [MinPLogitsWarper(0.1)],
    [TopKLogitsWarper(60), TopPLogitsWarper(0.999)],
)
PER_KIND = 12


def rows() -> list[SampleRow]:
    """Rows of every kind in turn."""
    return [
        SampleRow(range(5 + index), CompiledProcessors(WARPERS[index % len(WARPERS)]), do_sample=True, seed=index)
        for index in range(PER_KIND * len(WARPERS))
    ]


def table_of(some: list[SampleRow]) -> DrawTable:
    """A draw for each, from the rows of logits in order."""
    return DrawTable.of([Draw(index, DrawSettings.of(row), row, len(row.tokens)) for index, row in enumerate(some)])


def logits(step: float | None = None, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """[rows, VOCABULARY]; with a `step` they are multiples of it, so that there are equal ones."""
    found = 3 * torch.randn(len(rows()), VOCABULARY, generator=torch.Generator().manual_seed(1))
    return (found if step is None else (found / step).round() * step).to(dtype)


def drawn_by_the_host(scores: torch.Tensor) -> list[int]:
    """What `Sampler` draws for `rows`."""
    return Sampler().draw(scores, rows()).tokens


def numbers_of(some: list[SampleRow]) -> np.ndarray:
    """The parameters of their draws."""
    return table_of(some).numbers
