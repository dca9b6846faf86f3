"""The stand-in for a CUDA machine, for every test in this folder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from quiet import small_and_quiet
from standin.machine import StandIn, stand_in


@pytest.fixture(scope="session", autouse=True)
def quiet() -> Iterator[None]:
    with small_and_quiet():
        yield


@pytest.fixture
def cuda() -> Iterator[StandIn]:
    """A fake CUDA machine."""
    with stand_in() as machine:
        yield machine
