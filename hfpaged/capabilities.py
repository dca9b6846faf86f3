"""The capability oracle: why a model cannot be patched. One sentence a reason; an empty list means that it can."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import torch
from transformers import GenerationMixin, PreTrainedModel

from hfpaged.quantization.loaded_wrong import loaded_wrong
from hfpaged.runtime.module_state import has_own
from hfpaged.runtime.patched_class import unpatched_class
from hfpaged.unwrap import unwrap

# Layer kinds of `config.layer_types` whose state is plain keys and values, seen through a causal or windowed mask.
PAGED_LAYER_TYPES = frozenset({"full_attention", "sliding_attention", "attention", "global_attention"})
_FSDP_CLASSES = ("FSDPModule", "FullyShardedDataParallel")


def support(model: Any) -> list[str]:
    """Reasons why `model`, or what it wraps, cannot run on the paged engine; [] if it can.

    Reads the model's structure only: runs nothing and allocates nothing. A model that passes may still be refused at
    its first request, when one token is run to see what its attention layers really ask for.
    """
    model = unwrap(model)
    if not isinstance(model, PreTrainedModel):
        return [f"{type(model).__name__} is not a Transformers PreTrainedModel"]
    return [reason for check in _CHECKS for reason in check(model)]


def _generation(model: PreTrainedModel) -> Iterator[str]:
    if not model.can_generate():
        yield f"{type(model).__name__} has no generate()"
    elif unpatched_class(model).generate is not GenerationMixin.generate:
        yield f"{type(model).__name__} brings its own generate()"
    if getattr(model, "_is_stateful", False):
        yield "it keeps recurrent state, which is not paged"


def _architecture(model: PreTrainedModel) -> Iterator[str]:
    config = model.config
    if config.is_encoder_decoder:
        yield "it is an encoder-decoder model"
    if getattr(config, "add_cross_attention", False):
        yield "it has cross-attention layers"
    if config.get_text_config() is not config:
        yield "it takes more than text (its config nests a text config)"
    if "position_ids" not in inspect.signature(unpatched_class(model).forward).parameters:
        yield "its forward takes no position_ids"
    if not unpatched_class(model)._can_set_attn_implementation():
        yield "its attention layers do not use Transformers' attention interface"
    other = set(getattr(config, "layer_types", None) or ()) - PAGED_LAYER_TYPES
    if other:
        yield f"it has layers of type {', '.join(sorted(other))}"
    if getattr(config, "index_topk", None):
        yield "its attention picks tokens by an index (sparse attention)"


def _instance(model: PreTrainedModel) -> Iterator[str]:
    for name, module in model.named_modules():
        replaced = [method for method in ("forward", "generate") if has_own(module, method)]
        if replaced and not hasattr(module, "_hf_hook"):
            yield f"{replaced[0]} of {name or 'the model'} was replaced on the instance"
            break


def _placement(model: PreTrainedModel) -> Iterator[str]:
    hooked = next((name for name, module in model.named_modules() if hasattr(module, "_hf_hook")), None)
    if hooked is not None:
        places = sorted({str(place) for place in (getattr(model, "hf_device_map", None) or {}).values()})
        over = f", which is spread over {' and '.join(places)}" if len(places) > 1 else ""
        yield f"Accelerate's hooks are on {hooked or 'the model'}{over}"
    devices = {tensor.device for tensor in model.parameters()}
    if torch.device("meta") in devices:
        yield "some of its weights are on the meta device (offloaded, or not loaded)"
    elif len(devices) > 1:
        yield f"its weights are spread over {', '.join(sorted(map(str, devices)))}"
    if (getattr(model, "_tp_size", None) or 1) > 1:
        yield "it is split by tensor parallelism"
    if any(base.__name__ in _FSDP_CLASSES for module in model.modules() for base in type(module).__mro__):
        yield "it is sharded by FSDP"


_CHECKS = (_generation, _architecture, _instance, _placement, loaded_wrong)
