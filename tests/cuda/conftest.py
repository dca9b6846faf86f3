"""The stand-in for a CUDA machine, for every test in this folder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from families import build_tiny
from quiet import small_and_quiet
from standin.machine import StandIn, stand_in

import hfpaged


@pytest.fixture(scope="session", autouse=True)
def quiet() -> Iterator[None]:
    with small_and_quiet():
        yield


@pytest.fixture
def cuda() -> Iterator[StandIn]:
    """A fake CUDA machine."""
    with stand_in() as machine:
        yield machine


@pytest.fixture
def patched(cuda):
    """Builds patched tiny models on it, each with its engine: `patched(family, **options)`."""
    models = []

    def build(family="llama", **options):
        model = build_tiny(family)
        model.patch(**options)
        models.append(model)
        return model, hfpaged.engine(model)

    yield build
    for model in models:
        model.unpatch()
