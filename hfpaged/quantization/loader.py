"""hfpaged.from_pretrained: a causal language model out of any checkpoint, quantized ones checked and loaded right."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from hfpaged.errors import CheckpointError, ConfigError
from hfpaged.quantization.checkpoint import MODELOPT_FILE, Checkpoint
from hfpaged.quantization.kv_scales import attach_kv_scales
from hfpaged.quantization.plans import own_method
from hfpaged.quantization.registration import METHOD
from hfpaged.quantization.stock_check import check_gguf, check_loading_info, check_stock_checkpoint

ACTIVATIONS = ("emulate", "weight-only")
_FILES = ["*.json", "*.safetensors", "*.jinja", "*.txt", "*.model"]


def from_pretrained(path: str | Path, *, activations: str = "emulate", **kwargs: Any) -> PreTrainedModel:
    """`AutoModelForCausalLM.from_pretrained` that also loads what Transformers refuses or gets wrong.

    Weights in NVFP4, MXFP4 and int4 stay packed in memory; FP8 is converted to the model's dtype.

    Args:
        path: directory or hub id.
        activations: for checkpoints with quantized activations: "emulate" rounds the input of each layer as the
            checkpoint says, "weight-only" leaves it as it is.
        kwargs: of `AutoModelForCausalLM.from_pretrained`.

    Raises:
        CheckpointError: the checkpoint is incomplete, contradicts itself, or would be loaded wrong. Names the tensor.
        ConfigError: no such choice of `activations`.
    """
    if activations not in ACTIVATIONS:
        raise ConfigError(f"activations must be one of {', '.join(ACTIVATIONS)}, got {activations!r}")
    if kwargs.get("gguf_file") is not None:
        check_gguf(Path(path) / kwargs["gguf_file"])
        return AutoModelForCausalLM.from_pretrained(path, **kwargs)
    checkpoint = _checkpoint_at(path, kwargs)
    method = None if checkpoint is None else own_method(checkpoint)
    if method is not None:
        return _load_own(checkpoint, method, activations, kwargs)
    if checkpoint is not None:
        check_stock_checkpoint(checkpoint)
    wants_info = kwargs.pop("output_loading_info", False)
    model, info = AutoModelForCausalLM.from_pretrained(path, output_loading_info=True, **kwargs)
    if checkpoint is not None:
        check_loading_info(info)
        attach_kv_scales(model, checkpoint)
    return (model, info) if wants_info else model


def _load_own(checkpoint: Checkpoint, method: str, activations: str, kwargs: dict[str, Any]) -> PreTrainedModel:
    if kwargs.get("quantization_config") is not None:
        raise ConfigError("the checkpoint is quantized already: quantization_config cannot be given")
    # Sizes that do not match are how a quantized weight shows that it is taken for a dense one.
    kwargs.pop("ignore_mismatched_sizes", None)
    config = kwargs.pop("config", None) or AutoConfig.from_pretrained(checkpoint.folder)
    config.quantization_config = {
        **(checkpoint.quantization or {}),
        "quant_method": METHOD,
        "source_method": method,
        "activations": activations,
    }
    return AutoModelForCausalLM.from_pretrained(checkpoint.folder, config=config, **kwargs)


def _checkpoint_at(path: str | Path, kwargs: dict[str, Any]) -> Checkpoint | None:
    """The checkpoint on disk; None if it is dense and still on the hub."""
    if Path(path).is_dir():
        return Checkpoint(Path(path) / kwargs.get("subfolder", ""))
    config = AutoConfig.from_pretrained(path, **{key: kwargs[key] for key in ("revision", "token") if key in kwargs})
    if getattr(config, "quantization_config", None) is None and not _hub_has(path, MODELOPT_FILE, kwargs):
        return None
    import huggingface_hub

    try:
        folder = huggingface_hub.snapshot_download(
            str(path), allow_patterns=_FILES, revision=kwargs.get("revision"), token=kwargs.get("token")
        )
    except Exception as error:
        raise CheckpointError(f"{path} cannot be fetched from the hub: {error}") from error
    return Checkpoint(folder)


def _hub_has(path: str | Path, name: str, kwargs: dict[str, Any]) -> bool:
    from transformers.utils import has_file

    try:
        return has_file(str(path), name, revision=kwargs.get("revision"), token=kwargs.get("token"))
    except Exception:
        return False  # offline: what is not known to be there is not there
