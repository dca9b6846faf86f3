"""Which calls the engine takes. Every reason to leave one to Transformers is a short name, counted in the stats."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import nn
from torch.nn.modules import module as torch_module
from transformers import GenerationMixin, PreTrainedModel

from hfpaged.compat import hooked_adapter_names, is_capture_hook, is_user_cache
from hfpaged.generation.adapters import RowNames
from hfpaged.generation.call import GenerateCall
from hfpaged.generation.prompts import mask_is_left_padding, require_no_empty_row
from hfpaged.generation.returned_cache import ReturnedCache
from hfpaged.runtime.module_state import has_own, walk_modules
from hfpaged.runtime.patched_class import unpatched_class

# Keywords that `generate` prepares for every decoder and that the engine makes for itself.
KNOWN_MODEL_KWARGS = frozenset({"position_ids", "logits_to_keep", "use_cache", "return_dict"})
# What stock takes and drops before its first forward: `Seq2SeqTrainer` passes the labels of what it evaluates.
DROPPED_MODEL_KWARGS = frozenset({"labels"})
# Speculation whose drafts come from inside the model's own forward.
SELF_SPECULATION = ("assistant_early_exit", "use_mtp", "speculation_type")
# RoPE variants that choose their frequencies by the longest position of a forward: exact in a packed step only as long
# as no request passes the length below which the choice is fixed.
LENGTH_DEPENDENT_ROPE = {"longrope": "original_max_position_embeddings", "dynamic": None}


def stock_reason(model: PreTrainedModel, call: GenerateCall, cache: object | None) -> str | None:
    """Why this call must take Transformers' own path, or None if the engine takes it.

    Raises:
        InputError: a row of the mask is all zero, which no path can generate from.
    """
    for reason in (_config_reason(call), _inputs_reason(call, cache)):
        if reason is not None:
            return reason
    return model_reason(model, call.padded_len + call.max_new_tokens)


def model_reason(model: PreTrainedModel, length: int) -> str | None:
    """Why nothing of up to `length` tokens can run on an engine of this model as it is now, or None if it can."""
    if "prepare_inputs_for_generation" in vars(model):
        return "prepare_inputs_for_generation replaced"
    if rope_reach(model) is not None and length > rope_reach(model):
        return "rope changes with length"
    modules = walk_modules(model)
    altered = _altered(modules)
    if any(has_own(module, "forward") for module in altered):
        return "forward replaced"
    if model.training and _has_dropout(model, modules):
        return "dropout in train mode"
    if _has_user_hooks(altered):
        return "user hooks"
    return None


def _altered(modules: Sequence[nn.Module]) -> list[nn.Module]:
    """The few modules with a forward of their own, or with hooks. Every submission looks at all, so in one pass."""
    return [
        module
        for module, state in zip(modules, map(vars, modules), strict=True)
        if "forward" in state or state["_forward_hooks"] or state["_forward_pre_hooks"]
    ]


def loop_reason(model: PreTrainedModel, call: GenerateCall) -> str | None:
    """Why one of Transformers' decoding loops cannot run over the engine, or None if it can."""
    original = unpatched_class(model)
    if original.prepare_inputs_for_generation is not GenerationMixin.prepare_inputs_for_generation:
        return "own prepare_inputs_for_generation"
    if hasattr(original, "_reorder_cache"):
        return "own _reorder_cache"
    if call.config.prefill_chunk_size is not None:
        return "prefill_chunk_size"
    own_drafts = [name for name in SELF_SPECULATION if getattr(call.config, name, None)]
    if own_drafts:
        return own_drafts[0]
    return None


def beam_reason(model: PreTrainedModel, call: GenerateCall) -> str | None:
    """Why beam search cannot run over the engine, or None if it can."""
    # Stock knows how to refuse it.
    return "low_memory beams" if call.config.low_memory else loop_reason(model, call)


def _inputs_reason(call: GenerateCall, cache: object | None) -> str | None:
    if call.synced_gpus:
        return "synced_gpus"
    if cache is not None and is_user_cache(cache) and not _is_returned_prefix(cache, call):
        return "user cache"
    given = {name for name, value in call.model_kwargs.items() if value is not None}
    unknown = sorted(given - KNOWN_MODEL_KWARGS - DROPPED_MODEL_KWARGS)
    if unknown:
        return f"model argument {unknown[0]}"
    if call.attention_mask is not None:
        require_no_empty_row(call.attention_mask)
        if not mask_is_left_padding(call.attention_mask):
            return "mask with holes"
    if not _positions_are_plain(call):
        return "position_ids"
    return None


def _is_returned_prefix(cache: object, call: GenerateCall) -> bool:
    return isinstance(cache, ReturnedCache) and cache.is_prefix_of(call.input_ids, call.attention_mask)


def _config_reason(call: GenerateCall) -> str | None:
    config = call.config
    if config.use_cache is False:
        return "use_cache=False"
    if config.cache_implementation not in (None, "dynamic"):
        return "cache_implementation"
    if config.output_attentions or config.output_hidden_states:
        return "attentions or hidden states"
    if config.is_assistant:
        return "assistant model"
    return None


def _positions_are_plain(call: GenerateCall) -> bool:
    """Whether position ids are those that `generate` derives from the mask."""
    given = call.model_kwargs.get("position_ids")
    if given is None:
        return True
    mask = call.attention_mask
    if mask is None:
        expected = torch.arange(call.padded_len, device=given.device).expand(call.num_rows, -1)
        fits = given.shape[-1] == call.padded_len and given.shape[0] in (1, call.num_rows)
        return fits and bool((given == expected).all())
    expected = mask.long().cumsum(-1) - 1
    return given.shape == mask.shape and bool(((given == expected) | (mask == 0)).all())


def rope_reach(model: PreTrainedModel) -> int | None:
    """Length up to which rotary embeddings do not depend on the longest sequence of a forward; None: always."""
    config = model.config
    parameters = getattr(config, "rope_parameters", None) or {}
    variants = (
        parameters.values() if parameters and all(isinstance(v, dict) for v in parameters.values()) else [parameters]
    )
    reaches = []
    for variant in variants:
        if variant.get("rope_type") in LENGTH_DEPENDENT_ROPE:
            field = LENGTH_DEPENDENT_ROPE[variant["rope_type"]]
            reaches.append(variant.get(field) or getattr(config, field or "", None) or config.max_position_embeddings)
    return min(reaches, default=None)


def _has_dropout(model: PreTrainedModel, modules: Iterable[nn.Module]) -> bool:
    in_config = any(
        "dropout" in name and isinstance(value, float) and value > 0 for name, value in vars(model.config).items()
    )
    return in_config or any(isinstance(module, nn.Dropout) and module.p > 0 for module in modules)


def _has_user_hooks(modules: Iterable[nn.Module]) -> bool:
    """Hooks expect their own call's [B, L, H]; a packed step would show them other people's rows."""
    if torch_module._global_forward_hooks or torch_module._global_forward_pre_hooks:
        return True
    return any(
        not (is_capture_hook(hook) or hooked_adapter_names(hook) is not None or isinstance(hook, RowNames))
        for module in modules
        for hook in (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
    )
