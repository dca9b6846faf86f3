"""What importing hfpaged adds to Transformers, as soon as the module it belongs to is imported.

Every model gets the methods `patch` and `unpatch`, and checkpoints may name the quantization method `modelopt`.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import hfpaged
from hfpaged.import_hooks import when_imported


def extend_transformers() -> None:
    """Add it all. Imports neither Transformers nor PyTorch."""
    when_imported("transformers.modeling_utils", _add_methods)
    when_imported("transformers.quantizers.auto", _add_quantizer)


def patch(model: Any, **options: Any) -> Any:
    """See `hfpaged.patch`."""
    return hfpaged.patch(model, **options)


def unpatch(model: Any) -> Any:
    """See `hfpaged.unpatch`."""
    return hfpaged.unpatch(model)


def _add_methods(modeling_utils: ModuleType) -> None:
    modeling_utils.PreTrainedModel.patch = patch
    modeling_utils.PreTrainedModel.unpatch = unpatch


def _add_quantizer(_: ModuleType) -> None:
    from hfpaged.quantization import registration

    registration.register()
