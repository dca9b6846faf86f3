"""For test suites of tiny models: one thread, on which they are fastest, and no log of what the tests mean to do."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
import transformers


@contextlib.contextmanager
def small_and_quiet() -> Iterator[None]:
    """PyTorch on one thread and Transformers' warnings (no end token, for example) off, for the block."""
    threads, verbosity = torch.get_num_threads(), transformers.logging.get_verbosity()
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    yield
    transformers.logging.set_verbosity(verbosity)
    torch.set_num_threads(threads)
