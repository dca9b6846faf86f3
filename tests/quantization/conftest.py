"""One random model, and quiet, single-threaded torch."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from quantization.checkpoints import tiny_llama
from quiet import torch_threads
from transformers import PreTrainedModel


@pytest.fixture(autouse=True)
def one_torch_thread() -> Iterator[None]:
    with torch_threads(1):
        yield


@pytest.fixture(scope="session")
def llama() -> PreTrainedModel:
    """Never changed by a test."""
    return tiny_llama()
