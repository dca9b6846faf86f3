"""patch and unpatch: put the engine under one live model, or under what stands around one, and take it away again."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from transformers import TextGenerationPipeline

from hfpaged.config import EngineConfig
from hfpaged.errors import AlreadyPatchedError
from hfpaged.generation.engine import Engine
from hfpaged.patched_model import find_engine, is_patched, put_engine_under, take_engine_from
from hfpaged.runtime.patched_class import has_patched_class, unpatched_class
from hfpaged.unwrap import unwrap


def patch(model: Any, **options: Any) -> Any:
    """Have `model.generate` run on the paged engine. In place, reversible, on this instance only.

    Starts no thread, allocates no memory pool and touches no device: that is left to the first request.

    Args:
        model: a `PreTrainedModel`, one wrapped by PEFT or `torch.compile`, or a text-generation pipeline.
        options: fields of `EngineConfig`.

    Returns:
        What was given.

    Raises:
        UnsupportedModelError: with the reasons of `support(model)`; the model is unchanged.
        AlreadyPatchedError: it is patched with other options. With the same ones nothing happens.
        ConfigError: an option that does not exist or cannot work.
    """
    config = EngineConfig.from_options(options)
    existing = find_engine(model)
    if existing is not None and not isinstance(existing, Engine):
        # A hot reloader has imported this package anew, and the model is patched by what it was before.
        unpatch(model)
        existing = None
    if existing is None:
        put_engine_under(unwrap(model), config)
    elif existing.config != config:
        raise AlreadyPatchedError("this model is patched with other options; call unpatch() first")
    if model is not unwrap(model) and not has_patched_class(model):
        model.__class__ = _wrapper_class(model)
    return model


def unpatch(model: Any) -> Any:
    """Undo `patch`. Requests still running end with `EngineReleasedError`. Does nothing to an unpatched model."""
    if is_patched(model):
        take_engine_from(unwrap(model))
    if model is not unwrap(model) and has_patched_class(model):
        model.__class__ = unpatched_class(model)
    return model


@contextlib.contextmanager
def patched(model: Any, **options: Any) -> Iterator[Any]:
    """`with patched(model): ...` patches for the block; a model that was patched before stays so."""
    was_patched = is_patched(model)
    patch(model, **options)
    try:
        yield model
    finally:
        if not was_patched:
            unpatch(model)


def _wrapper_class(model: Any) -> type:
    """The class for what stands around a patched model: its own, or one that makes more of the engine."""
    # Imported where they are used: most models stand alone.
    if isinstance(model, TextGenerationPipeline):
        from hfpaged.integrations.pipeline import paged_pipeline_class

        return paged_pipeline_class(type(model))
    if "special_peft_forward_args" in vars(model):
        from hfpaged.integrations.peft import paged_peft_class

        return paged_peft_class(type(model))
    return type(model)
