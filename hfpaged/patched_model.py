"""A model with an engine under it: how the engine gets there, how it is found, and how it is taken away again."""

from __future__ import annotations

import functools
from typing import Any

from transformers import PreTrainedModel

from hfpaged.capabilities import support
from hfpaged.config import EngineConfig
from hfpaged.errors import NotPatchedError, UnsupportedModelError
from hfpaged.generation.engine import Engine
from hfpaged.generation.mixin import STATE_ATTRIBUTE, PagedGenerationMixin
from hfpaged.quantization.lazy_weights import unpack_lazy_weights
from hfpaged.runtime.patched_class import patched_class, reduce_to_unpatched, unpatched_class
from hfpaged.unwrap import unwrap


def engine(model: Any) -> Engine:
    """The engine of a patched model.

    Args:
        model: what `patch` takes.

    Raises:
        NotPatchedError: the model is not patched.
    """
    found = find_engine(model)
    if found is None:
        raise NotPatchedError("this model is not patched; call model.patch() first")
    return found


def find_engine(model: Any) -> Engine | None:
    """The engine of a model or of the one inside; None if it is not patched."""
    return getattr(unwrap(model), "__dict__", {}).get(STATE_ATTRIBUTE)


def is_patched(model: Any) -> bool:
    """Whether `generate` of this very instance runs on an engine."""
    return find_engine(model) is not None


def weights_changed(model: Any) -> None:
    """Tell the engine that weights changed; needed only after `patch(model, weights="frozen")`."""
    engine(model).weights_changed()


def put_engine_under(model: Any, config: EngineConfig) -> None:
    """Have `generate` of a model, which has no engine yet, run on a new one.

    Raises:
        UnsupportedModelError: with the reasons of `support(model)`; the model is unchanged.
    """
    reasons = support(model)
    if reasons:
        raise UnsupportedModelError(reasons)
    original = type(model)
    unpack_lazy_weights(model)
    new = Engine(model, original, config)
    model.__class__ = _paged_class(original)
    model.__dict__[STATE_ATTRIBUTE] = new


def take_engine_from(model: PreTrainedModel) -> None:
    """Undo `put_engine_under`. Requests still running end with `EngineReleasedError`."""
    taken = model.__dict__.pop(STATE_ATTRIBUTE)
    model.__class__ = unpatched_class(model)
    taken.release()


@functools.cache
def _paged_class(original: type[PreTrainedModel]) -> type[PreTrainedModel]:
    """One for each class, with the mixin in front."""
    return patched_class(original, PagedGenerationMixin, __reduce_ex__=reduce_to_unpatched)
