"""What the tests of patched models share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import transformers
from families import build_tiny
from transformers import PreTrainedModel


@pytest.fixture(scope="session", autouse=True)
def one_quiet_thread() -> Iterator[None]:
    """Tiny models are fastest on one thread, and then bit for bit repeatable; stock's warnings are meant here."""
    threads, verbosity = torch.get_num_threads(), transformers.logging.get_verbosity()
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    yield
    transformers.logging.set_verbosity(verbosity)
    torch.set_num_threads(threads)


@pytest.fixture
def model() -> PreTrainedModel:
    """A new tiny Llama, not patched."""
    return build_tiny("llama", num_hidden_layers=2)
