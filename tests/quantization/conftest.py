"""One random model, and quiet, single-threaded torch."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from quantization.checkpoints import tiny_llama
from transformers import PreTrainedModel


@pytest.fixture(autouse=True)
def one_torch_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def llama() -> PreTrainedModel:
    """Never changed by a test."""
    return tiny_llama()
