"""A patched tiny model and its engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import pytest
from batches import alone
from engine.hooks import at_rest
from engine.one_prompt import GREEDY, PROMPT
from families import build_tiny
from quiet import small_and_quiet
from transformers import PreTrainedModel

import hfpaged
from hfpaged.generation.engine import Engine


@pytest.fixture(scope="session", autouse=True)
def quiet() -> Iterator[None]:
    with small_and_quiet():
        yield


class Patched(NamedTuple):
    """A patched model and its engine."""

    model: PreTrainedModel
    engine: Engine


@pytest.fixture
def patched() -> Iterator[Callable[..., Patched]]:
    """`patched(family="llama", config={}, **options)`: a new model, patched with these options; checked at the end."""
    models = []

    def build(family: str = "llama", config: dict | None = None, **options) -> Patched:
        model = build_tiny(family, **(config or {}))
        model.patch(**options)
        models.append(model)
        return Patched(model, hfpaged.engine(model))

    yield build
    for model in models:
        assert at_rest(hfpaged.engine(model))
        model.unpatch()


@pytest.fixture(scope="session")
def stock_text() -> list[int]:
    """What stock gives PROMPT."""
    return alone(build_tiny("llama"), PROMPT, max_new_tokens=40, **GREEDY)
