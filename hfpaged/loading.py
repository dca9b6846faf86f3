"""`hfpaged.from_pretrained`, without the import time of what it needs."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedModel


def from_pretrained(path: Any, *, activations: str = "emulate", **kwargs: Any) -> PreTrainedModel:
    """Load a causal language model; quantized checkpoints are checked and loaded right.

    See `hfpaged.quantization.loader.from_pretrained` for arguments and errors.
    """
    from hfpaged.quantization import loader

    return loader.from_pretrained(path, activations=activations, **kwargs)
