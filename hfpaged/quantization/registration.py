"""The quantizer that Transformers lacks: `modelopt`, registered under that name beside Transformers' own.

This module is imported while Transformers' own modules are, so it imports little: what the quantizer needs comes when a
checkpoint is loaded.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

if TYPE_CHECKING:
    from transformers import PreTrainedModel

METHOD = "modelopt"


class PackedConfig(QuantizationConfigMixin):
    """The `quantization_config` of a checkpoint that hfpaged loads, fields as they are in the file.

    Attributes:
        activations: "emulate" or "weight-only", see `hfpaged.from_pretrained`.
        source_method: `quant_method` of the file.
    """

    def __init__(self, activations: str = "emulate", source_method: str = METHOD, **fields: Any):
        self.activations = activations
        self.source_method = source_method
        self.__dict__.update(fields)
        self.quant_method = METHOD


class PackedQuantizer(HfQuantizer):
    """Loads the checkpoints that hfpaged reads itself, through Transformers' own loader."""

    requires_calibration = True

    def _process_model_before_weight_loading(
        self, model: PreTrainedModel, dtype: Any = None, checkpoint_files: list[str] | None = None, **kwargs: Any
    ) -> None:
        from hfpaged.quantization.placement import place_stored_linears

        place_stored_linears(model, self.quantization_config, checkpoint_files, dtype)

    def _process_model_after_weight_loading(self, model: PreTrainedModel, **kwargs: Any) -> PreTrainedModel:
        from hfpaged.quantization.placement import replace_stored_linears

        replace_stored_linears(model, self.quantization_config.activations)
        return model

    def is_serializable(self) -> bool:
        """The packed memory layout is no checkpoint format; `hfpaged quantize` writes checkpoints."""
        return False

    @property
    def is_trainable(self) -> bool:
        """The weights are codes."""
        return False


def register() -> None:
    """Register the name, unless Transformers or another library has taken it."""
    with contextlib.suppress(ValueError):
        register_quantization_config(METHOD)(PackedConfig)
        register_quantizer(METHOD)(PackedQuantizer)
