"""Puts empty stored linears into a model that is about to load, and what runs them afterwards."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn
from transformers import PreTrainedModel

from hfpaged.errors import CheckpointError
from hfpaged.native.huge_pages import Arena
from hfpaged.quantization.checkpoint import Checkpoint
from hfpaged.quantization.disk_layout import KV_SCALES, check_tensors, is_quantization_name
from hfpaged.quantization.packed_linear import PackedLinear, make_linear
from hfpaged.quantization.plans import plan_of
from hfpaged.quantization.registration import PackedConfig
from hfpaged.quantization.scheme import QuantizationPlan
from hfpaged.quantization.stored_linear import StoredLinear


def place_stored_linears(
    model: PreTrainedModel, config: PackedConfig, files: list[str] | None, dtype: torch.dtype
) -> None:
    """Replace every linear module that the checkpoint quantizes by a `StoredLinear` for its tensors.

    Nothing is read but headers: a checkpoint that is incomplete is refused before anything of it is loaded.

    Raises:
        CheckpointError: config, hf_quant_config.json, tensor names and the model do not agree.
    """
    if not files or not all(str(file).endswith(".safetensors") for file in files):
        raise CheckpointError("quantized checkpoints are read from safetensors files only")
    checkpoint = Checkpoint(Path(files[0]).parent)
    plan = plan_of(checkpoint, config)
    names = _stored_names(model, checkpoint)
    _refuse_strays(model, checkpoint, plan, set(names.values()))
    for name, module in list(model.named_modules()):
        stored = names.get(name, name)
        scheme = plan.scheme_of(stored, type(module).__name__)
        if scheme is None or not isinstance(module, nn.Linear) or _is_tied_head(model, module):
            continue
        check_tensors(checkpoint, stored, scheme, module.out_features, module.in_features)
        tensors = {leaf: checkpoint.tensors[f"{stored}.{leaf}"] for leaf in checkpoint.names_under(stored)}
        _put(model, name, StoredLinear(scheme, tensors, dtype))
    _place_kv_scales(model, checkpoint, names)


def replace_stored_linears(model: PreTrainedModel, activations: str) -> None:
    """Turn what was loaded into modules that run.

    Raises:
        CheckpointError: naming a tensor whose content cannot be right.
    """
    arena = Arena()
    for name, module in list(model.named_modules()):
        if isinstance(module, StoredLinear):
            linear = make_linear(module.record(name), model.dtype, activations)
            if isinstance(linear, PackedLinear):
                linear.move_strips(arena.place)
            for leaf in KV_SCALES:
                if hasattr(module, leaf):
                    linear.register_buffer(leaf, getattr(module, leaf).detach(), persistent=False)
            _put(model, name, linear)


def _stored_names(model: PreTrainedModel, checkpoint: Checkpoint) -> dict[str, str]:
    """Name in the checkpoint of each module of the model that has tensors there."""
    prefix = f"{model.base_model_prefix}."
    present = set(checkpoint.modules)
    names = {}
    for name, _ in model.named_modules():
        for candidate in (name, name.removeprefix(prefix), prefix + name):
            if candidate in present:
                names[name] = candidate
                break
    return names


def _refuse_strays(model: PreTrainedModel, checkpoint: Checkpoint, plan: QuantizationPlan, known: set[str]) -> None:
    """Every quantized tensor must belong to a linear module of the model that the config quantizes, and vice versa."""
    classes = {name: type(module).__name__ for name, module in model.named_modules()}
    by_stored = {stored: classes[name] for name, stored in _stored_names(model, checkpoint).items()}
    for stored in checkpoint.modules:
        leaves = [leaf for leaf in checkpoint.names_under(stored) if leaf not in KV_SCALES]
        quantized = next((leaf for leaf in leaves if is_quantization_name(leaf)), None)
        if quantized is None:
            continue
        if stored not in known:
            raise CheckpointError(f"{stored}.{quantized} belongs to no module of {type(model).__name__}")
        if by_stored[stored] != "Linear":
            raise CheckpointError(f"{stored}.{quantized} belongs to a {by_stored[stored]}, which cannot run quantized")
        if plan.scheme_of(stored) is None:
            raise CheckpointError(f"{stored}.{quantized} is quantized, but the config leaves {stored} out")


def _place_kv_scales(model: PreTrainedModel, checkpoint: Checkpoint, names: dict[str, str]) -> None:
    """Room for scales of keys and values that lie on an attention module itself."""
    for name, module in model.named_modules():
        if isinstance(module, StoredLinear) or name not in names:
            continue
        for leaf in set(checkpoint.names_under(names[name])) & set(KV_SCALES):
            shape = checkpoint.tensors[f"{names[name]}.{leaf}"].shape
            module.register_buffer(leaf, torch.empty(shape, dtype=torch.float32, device="meta"))


def _is_tied_head(model: PreTrainedModel, module: nn.Module) -> bool:
    return module is model.get_output_embeddings() and model.config.get_text_config().tie_word_embeddings


def _put(model: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, leaf = name.rpartition(".")
    setattr(model.get_submodule(parent), leaf, module)
