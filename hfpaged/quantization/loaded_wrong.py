"""Recognizes a model that Transformers loaded wrong from a quantized checkpoint, without complaining."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from transformers import PreTrainedModel

from hfpaged.errors import CheckpointError
from hfpaged.quantization.checkpoint import CONFIG_FILE, Checkpoint
from hfpaged.quantization.plans import own_method
from hfpaged.quantization.registration import PackedQuantizer


def loaded_wrong(model: PreTrainedModel) -> Iterator[str]:
    """Why the weights of `model` cannot be those of the checkpoint that it names as its source; nothing: they may be.

    Reads configs and headers only, and nothing at all if the source is no directory of this machine.
    """
    folder = Path(getattr(model, "name_or_path", "") or "")
    if not folder.name or not (folder / CONFIG_FILE).is_file():
        return
    if isinstance(getattr(model, "hf_quantizer", None), PackedQuantizer):
        return
    checkpoint = Checkpoint(folder)
    try:
        method = own_method(checkpoint) if checkpoint.exists else None
    except CheckpointError:
        return  # not readable any more, so nothing can be told
    # compressed-tensors unpacks its 4-bit formats right, where it can at all.
    if method in ("modelopt", "fp8"):
        yield (
            f"it was not loaded as the {method} checkpoint that {folder.name} is, so its weights are wrong; "
            "use hfpaged.from_pretrained"
        )
