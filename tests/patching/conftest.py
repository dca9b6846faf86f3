"""What the tests of patched models share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from families import build_tiny
from quiet import small_and_quiet
from transformers import PreTrainedModel


@pytest.fixture(scope="session", autouse=True)
def one_quiet_thread() -> Iterator[None]:
    with small_and_quiet():
        yield


@pytest.fixture
def model() -> PreTrainedModel:
    """A new tiny Llama, not patched."""
    return build_tiny("llama", num_hidden_layers=2)
