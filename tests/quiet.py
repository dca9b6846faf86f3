"""For test suites of tiny models: one thread, on which they are fastest, and no log of what the tests mean to do."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
import transformers


@contextlib.contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """PyTorch on so many threads, for the block."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    yield
    torch.set_num_threads(before)


@contextlib.contextmanager
def small_and_quiet() -> Iterator[None]:
    """PyTorch on one thread and Transformers' warnings (no end token, for example) off, for the block."""
    verbosity = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    with torch_threads(1):
        yield
    transformers.logging.set_verbosity(verbosity)
