"""hfpaged: a paged, continuous-batching engine under a live Hugging Face model.

    import hfpaged
    model.patch()                      # or hfpaged.patch(model)
    model.generate(**inputs)           # unchanged code, same tokens

Importing the package gives every `PreTrainedModel` the methods `patch` and `unpatch`. It imports neither PyTorch nor
Transformers: the names below are imported when they are first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from hfpaged import errors as errors
from hfpaged.extension import extend_transformers

if TYPE_CHECKING:
    from hfpaged.capabilities import support
    from hfpaged.config import EngineConfig
    from hfpaged.generation.cancel_scope import CancelScope
    from hfpaged.patched_model import engine, weights_changed
    from hfpaged.patching import patch, patched, unpatch
    from hfpaged.quantization.loader import from_pretrained

__version__ = "0.1.0"
__all__ = [
    "CancelScope",
    "EngineConfig",
    "engine",
    "from_pretrained",
    "patch",
    "patched",
    "support",
    "unpatch",
    "weights_changed",
]

_HOMES = {
    "CancelScope": "hfpaged.generation.cancel_scope",
    "EngineConfig": "hfpaged.config",
    "engine": "hfpaged.patched_model",
    "from_pretrained": "hfpaged.quantization.loader",
    "patch": "hfpaged.patching",
    "patched": "hfpaged.patching",
    "support": "hfpaged.capabilities",
    "unpatch": "hfpaged.patching",
    "weights_changed": "hfpaged.patched_model",
}


def __getattr__(name: str) -> Any:
    """A public name, from the module where it is defined."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_HOMES[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


extend_transformers()
