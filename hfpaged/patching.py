"""patch and unpatch: put the engine under one live model, and take it away again."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

from transformers import PreTrainedModel, TextGenerationPipeline

from hfpaged.capabilities import support
from hfpaged.config import EngineConfig
from hfpaged.errors import AlreadyPatchedError, NotPatchedError, UnsupportedModelError
from hfpaged.generation.engine import Engine
from hfpaged.generation.mixin import STATE_ATTRIBUTE, PagedGenerationMixin
from hfpaged.quantization.lazy_weights import unpack_lazy_weights
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
    existing = _engine_of(model)
    if existing is not None and not isinstance(existing, Engine):
        # A hot reloader has imported this package anew, and the model is patched by what it was before.
        unpatch(model)
        existing = None
    if existing is None:
        _put_engine_under(unwrap(model), config)
    elif existing.config != config:
        raise AlreadyPatchedError("this model is patched with other options; call unpatch() first")
    if model is not unwrap(model) and not hasattr(type(model), "_hfpaged_original_class"):
        model.__class__ = _wrapper_class(model)
    return model


def unpatch(model: Any) -> Any:
    """Undo `patch`. Requests still running end with `EngineReleasedError`. Does nothing to an unpatched model."""
    engine = _engine_of(model)
    if engine is not None:
        target = unwrap(model)
        del target.__dict__[STATE_ATTRIBUTE]
        target.__class__ = target._hfpaged_original_class
        engine.release()
    if model is not unwrap(model) and hasattr(type(model), "_hfpaged_original_class"):
        model.__class__ = model._hfpaged_original_class
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


def is_patched(model: Any) -> bool:
    """Whether `generate` of this very instance runs on an engine."""
    return _engine_of(model) is not None


def engine(model: Any) -> Engine:
    """The engine of a patched model.

    Raises:
        NotPatchedError: the model is not patched.
    """
    found = _engine_of(model)
    if found is None:
        raise NotPatchedError("this model is not patched; call model.patch() first")
    return found


def weights_changed(model: Any) -> None:
    """Tell the engine that weights changed; needed only after `patch(model, weights="frozen")`."""
    engine(model).weights_changed()


def _put_engine_under(model: Any, config: EngineConfig) -> None:
    reasons = support(model)
    if reasons:
        raise UnsupportedModelError(reasons)
    original_class = type(model)
    unpack_lazy_weights(model)
    engine = Engine(model, original_class, config)
    model.__class__ = _patched_class(original_class)
    model.__dict__[STATE_ATTRIBUTE] = engine


def _wrapper_class(model: Any) -> type:
    """The class for what stands around a patched model: its own, or one that makes more of the engine."""
    # Integrations stand above this module; importing them only where they are used keeps imports one way.
    if isinstance(model, TextGenerationPipeline):
        from hfpaged.integrations.pipeline import paged_pipeline_class

        return paged_pipeline_class(type(model))
    if "special_peft_forward_args" in vars(model):
        from hfpaged.integrations.peft import paged_peft_class

        return paged_peft_class(type(model))
    return type(model)


def _engine_of(model: Any) -> Engine | None:
    return getattr(unwrap(model), "__dict__", {}).get(STATE_ATTRIBUTE)


@functools.cache
def _patched_class(original: type[PreTrainedModel]) -> type[PreTrainedModel]:
    """A class that looks like `original` (name, module) to every check, with the mixin in front; one for each class."""
    return type(
        original.__name__,
        (PagedGenerationMixin, original),
        {
            "__module__": original.__module__,
            "__qualname__": original.__qualname__,
            "__doc__": original.__doc__,
            "__reduce_ex__": _reduce_to_unpatched,
            "_hfpaged_original_class": original,
        },
    )


def _reduce_to_unpatched(self: PreTrainedModel, protocol: int) -> tuple:
    """Copies and pickles are of the unpatched model: an engine belongs to one live instance."""
    # Older protocols keep the class among the state; copies and pickles made of newer ones load under any.
    _, (_, *arguments), state, *rest = object.__reduce_ex__(self, max(protocol, 2))
    state = {name: value for name, value in state.items() if name != STATE_ATTRIBUTE}
    # copyreg.__newobj__ may not be used: pickle then insists on the class of `self`.
    return (object.__new__, (self._hfpaged_original_class, *arguments), state, *rest)
