"""What drawing costs. Slow, and the times mean something on an idle machine only."""

from __future__ import annotations

import time

import pytest
import torch
from quiet import torch_threads
from transformers.generation.logits_process import LogitsProcessor, TopKLogitsWarper, TopPLogitsWarper

from hfpaged.sampling.processors import CompiledProcessors
from hfpaged.sampling.sampler import Sampler, SampleRow

pytestmark = pytest.mark.slow

ROWS, VOCAB = 64, 49_152
# Of normal logits: with 2.2 the nucleus of 0.9 has 9,000 tokens, with 3.2 it has 1,400.
SPREADS = (2.2, 3.2)


def milliseconds(sampler: Sampler, spread: float, *processors: LogitsProcessor) -> float:
    """The best of some draws of one token a row."""
    logits = torch.randn(ROWS, VOCAB, generator=torch.Generator().manual_seed(0)) * spread
    rows = [SampleRow([1], CompiledProcessors(processors), do_sample=True, seed=seed) for seed in range(ROWS)]
    times = []
    for _ in range(8):
        began = time.perf_counter()
        sampler.draw(logits, rows)
        times.append(time.perf_counter() - began)
    return 1e3 * min(times)


@pytest.mark.parametrize("spread", SPREADS)
def test_top_p_without_top_k_costs_much_less_than_a_sort_of_everything(spread: float) -> None:
    with torch_threads(2):
        plain = milliseconds(Sampler(), spread)
        top_k = milliseconds(Sampler(), spread, TopKLogitsWarper(50), TopPLogitsWarper(0.9))
        top_p = milliseconds(Sampler(), spread, TopPLogitsWarper(0.9))
        sorting = milliseconds(Sampler(most_candidates=0), spread, TopPLogitsWarper(0.9))
    print(f"{ROWS} rows, spread {spread}: without filters {plain:.1f} ms, top-k and top-p {top_k:.1f} ms, "
          f"top-p {top_p:.1f} ms, by sorting everything {sorting:.1f} ms")  # fmt: skip
    assert top_p <= 0.4 * sorting
