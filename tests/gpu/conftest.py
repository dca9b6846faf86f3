"""A CUDA device where there is one, else the stand-in for one: what can run without a GPU is run without a GPU."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from standin.machine import stand_in


@pytest.fixture
def device() -> Iterator[torch.device]:
    """Where models go. On the stand-in's machine that is the CPU."""
    if torch.cuda.is_available():
        yield torch.device("cuda")
    else:
        with stand_in():
            yield torch.device("cpu")


@pytest.fixture
def gpu(device: torch.device) -> torch.device:
    """A real CUDA device; the test is skipped without one."""
    if device.type != "cuda":
        pytest.skip("needs a CUDA device")
    return device
