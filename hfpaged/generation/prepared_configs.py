"""PreparedConfigs: what Transformers makes of the options of single prompts, once for all prompts that share them.

Merging configs costs Transformers most of a millisecond, several times what the engine needs to queue a prompt.
"""

from __future__ import annotations

import copy
from collections.abc import Hashable, Mapping
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel
from transformers.generation.configuration_utils import GenerationMode

from hfpaged.errors import UnsupportedOptionError

ENGINE_MODES = (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE)
MOST_KEPT = 256
_SCALARS = frozenset({type(None), bool, int, float, str})


class PreparedConfigs:
    """Keeps configs by the values of all that decides about them, so whatever the user changes is seen at once."""

    def __init__(self) -> None:
        self._kept: dict[Hashable, GenerationConfig] = {}

    def config(
        self,
        model: PreTrainedModel,
        generation_config: GenerationConfig | None,
        options: Mapping[str, Any],
        device: torch.device,
    ) -> GenerationConfig:
        """The options of one prompt merged as `generate` does it, special tokens resolved, lengths not yet.

        It is a copy: setting attributes of it changes no other. The containers in them are shared.

        Args:
            device: of the prompt's ids.

        Raises:
            UnsupportedOptionError: an option is unknown, changes the prompt, or is for no single greedy or sampled row.
            ValueError: Transformers refuses an option.
        """
        options = dict(options)
        # The only option that usually differs from prompt to prompt. Transformers looks at no more than its sign here.
        length = options.get("max_new_tokens")
        has_length = type(length) is int and length > 0
        if has_length:
            options["max_new_tokens"] = 1
        key = _key(model, generation_config, options, device)
        kept = None if key is None else self._kept.get(key)
        if kept is None:
            kept = _prepare(model, generation_config, options, device)
            if key is not None:
                if len(self._kept) >= MOST_KEPT:
                    self._kept.clear()
                self._kept[key] = kept
        config = copy.copy(kept)
        if has_length:
            config.max_new_tokens = length
        return config


def _prepare(
    model: PreTrainedModel, generation_config: GenerationConfig | None, options: dict[str, Any], device: torch.device
) -> GenerationConfig:
    config, unknown = model._prepare_generation_config(generation_config, **options)
    if unknown:
        raise UnsupportedOptionError(f"engine.submit does not know {', '.join(sorted(unknown))}")
    if config.get_generation_mode() not in ENGINE_MODES or (config.num_return_sequences or 1) > 1:
        raise UnsupportedOptionError("engine.submit takes one greedy or sampled sequence; use generate() for others")
    if config.token_healing:
        raise UnsupportedOptionError("engine.submit takes prompts as they are (token_healing); use generate()")
    # The tensors that this makes are kept, for prompts of any thread.
    with torch.inference_mode(False):
        model._prepare_special_tokens(config, kwargs_has_attention_mask=True, device=device, batch_size=1)
    return config


def _key(
    model: PreTrainedModel, generation_config: GenerationConfig | None, options: dict[str, Any], device: torch.device
) -> Hashable | None:
    """Equal for two prompts only if all that decides about their configs is; None where that cannot be told."""
    # Transformers refuses generation options in the model's own config, so only which attributes that has matters.
    names = tuple([name for name, value in vars(model.config).items() if value is not None])
    try:
        return device, names, _state(model.generation_config), _state(generation_config), _frozen(options)
    except _ChangesInPlaceError:
        return None


class _ChangesInPlaceError(Exception):
    """A value may become another and stay equal to itself."""


def _state(config: GenerationConfig | None) -> Hashable:
    if config is None:
        return None
    attributes = vars(config)
    # Most are None: their names say all.
    values = {name: value for name, value in attributes.items() if value is not None}
    return type(config), tuple(attributes), _frozen(values)


def _frozen(value: Any) -> Hashable:
    """What equals that of another value only if the two have the same types and content."""
    kind = type(value)
    if kind in _SCALARS:
        # 1, 1.0 and True are equal, but Transformers tells them apart.
        return kind, value
    if kind in (list, tuple):
        return kind, tuple(map(_frozen, value))
    if kind is dict:
        return kind, tuple([(_frozen(name), _frozen(one)) for name, one in value.items()])
    raise _ChangesInPlaceError
