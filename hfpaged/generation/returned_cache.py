"""ReturnedCache: the `cache` (or `past_key_values`) that `generate(..., return_dict_in_generate=True)` gives back.

It remembers token ids, not keys and values: passed back to `generate` with longer ids, the prefix cache has the blocks,
and what was evicted is computed again. Handed to code that reads keys and values (`model(..., cache=...)`, a stock
decoding mode), it computes them once, in Transformers' own layout.
"""

from __future__ import annotations

import copy
import inspect
import weakref
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel

from hfpaged.compat import cache_field
from hfpaged.errors import EngineReleasedError


class ReturnedCache(DynamicCache):
    """Stands for the keys and values of [B, L] ids.

    Args:
        model: what they are of; not kept alive.
        input_ids: [B, L]; the last token that was generated is not among them, as in stock.
        attention_mask: [B, L], or None if all ones.
    """

    def __init__(self, model: PreTrainedModel, input_ids: torch.LongTensor, attention_mask: torch.Tensor | None):
        self._model = weakref.ref(model)
        self._ids = input_ids
        self._mask = attention_mask
        self._layers: list[Any] | None = None
        super().__init__()
        self._layers = None

    @property
    def layers(self) -> list[Any]:
        """Transformers' cache layers with the keys and values, computed when first asked for."""
        if self._layers is None:
            self._layers = self._computed()
        return self._layers

    @layers.setter
    def layers(self, layers: list[Any]) -> None:
        self._layers = layers

    def is_prefix_of(self, input_ids: torch.LongTensor, attention_mask: torch.Tensor | None) -> bool:
        """Whether generating from `input_ids` goes on from here, so that the engine's own blocks serve."""
        length = self._ids.shape[1]
        if self._layers is not None or input_ids.shape[0] != self._ids.shape[0] or input_ids.shape[1] <= length:
            return False
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        mine = torch.ones_like(self._ids) if self._mask is None else self._mask
        return torch.equal(input_ids[:, :length], self._ids) and torch.equal(mask[:, :length] != 0, mine != 0)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """L, or what the keys and values have become since they were computed."""
        return self._ids.shape[1] if self._layers is None else super().get_seq_length(layer_idx)

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last `-tokens_to_remove` tokens; a positive number is a length to crop to."""
        if self._layers is not None:
            super().crop(tokens_to_remove)
            return
        length = self._ids.shape[1]
        keep = length + tokens_to_remove if tokens_to_remove <= 0 else min(length, tokens_to_remove)
        self._ids = self._ids[:, :keep]
        self._mask = None if self._mask is None else self._mask[:, :keep]

    def __copy__(self) -> ReturnedCache:
        twin = ReturnedCache(self._require(self._model()), self._ids, self._mask)
        twin._layers = self._layers
        return twin

    def __deepcopy__(self, memo: dict[int, Any]) -> ReturnedCache:
        model = self._model()
        twin = ReturnedCache(self._require(model), self._ids, self._mask)
        twin._layers = copy.deepcopy(self._layers, memo)
        return twin

    def __reduce_ex__(self, protocol: int) -> tuple:
        """What is saved is Transformers' own cache with the keys and values."""
        saved = DynamicCache()
        saved.layers = self.layers
        return (object.__new__, (DynamicCache,), vars(saved))

    def _computed(self) -> list[Any]:
        model = self._require(self._model())
        cache = DynamicCache(config=model.config)
        arguments = {"attention_mask": self._mask, cache_field(): cache, "use_cache": True}
        if self._mask is not None and "position_ids" in inspect.signature(model.forward).parameters:
            # As `generate` derives them: padding counts nowhere.
            arguments["position_ids"] = (self._mask.long().cumsum(-1) - 1).masked_fill(self._mask == 0, 0)
        with torch.no_grad():
            model(input_ids=self._ids.to(model.device), **arguments)
        return cache.layers

    @staticmethod
    def _require(model: PreTrainedModel | None) -> PreTrainedModel:
        if model is None:
            raise EngineReleasedError("the model that this cache belongs to is gone")
        return model


def returned_cache(
    model: PreTrainedModel, sequences: torch.LongTensor, prompt_mask: torch.Tensor | None
) -> ReturnedCache:
    """The cache of generated sequences [B, L + steps], whose prompts had the mask [B, L] (None: all ones)."""
    ids = sequences[:, :-1]
    if prompt_mask is not None:
        # As in stock, everything behind the prompt counts as text, the padding of ended rows included. There is less
        # than the prompt if nothing was generated.
        prompt_mask = prompt_mask[:, : ids.shape[1]]
        new = ids.shape[1] - prompt_mask.shape[1]
        prompt_mask = torch.cat([prompt_mask, prompt_mask.new_ones(len(prompt_mask), new)], dim=1)
    return ReturnedCache(model, ids, prompt_mask)
