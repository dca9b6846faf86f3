"""unwrap: from whatever a user holds to the model inside it."""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import PreTrainedModel


def unwrap(model: Any) -> Any:
    """The `PreTrainedModel` inside a pipeline, a PEFT model or a compiled one; anything else as it is."""
    while not isinstance(model, PreTrainedModel):
        if hasattr(model, "_orig_mod"):
            model = model._orig_mod
        elif hasattr(model, "get_base_model"):
            model = model.get_base_model()
        elif hasattr(model, "model") and hasattr(model, "tokenizer") and not isinstance(model, nn.Module):
            model = model.model
        else:
            break
    return model
