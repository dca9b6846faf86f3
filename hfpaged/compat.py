"""Everything that differs between the Transformers releases hfpaged supports (5.17 and newer), chosen by feature test.

`past_key_values` became `cache` (forward argument, model keyword and output field) in 5.24; nothing else in
hfpaged depends on either name.
"""

from __future__ import annotations

import inspect
from functools import lru_cache
from typing import Any

from transformers.generation.utils import GenerateBeamDecoderOnlyOutput, GenerateDecoderOnlyOutput
from transformers.modeling_outputs import CausalLMOutputWithPast

CACHE_NAMES = ("cache", "past_key_values")
ATTENTION_NAME = "hfpaged"
INPUT_GRADIENT_HOOKS = ("make_inputs_require_grads", "make_inputs_require_grad")


@lru_cache(maxsize=1)
def cache_field() -> str:
    """Name of the KV cache in this release's model keywords and generate outputs."""
    fields = inspect.signature(GenerateDecoderOnlyOutput).parameters
    return next(name for name in CACHE_NAMES if name in fields)


def pop_cache(model_kwargs: dict[str, Any]) -> Any | None:
    """Take the KV cache out of the keywords that `generate` hands to a decoding method; None if there is none."""
    caches = [model_kwargs.pop(name, None) for name in CACHE_NAMES]
    return next((cache for cache in caches if cache is not None), None)


def is_user_cache(cache: Any) -> bool:
    """Whether `generate` was given this cache, instead of having made it."""
    return bool(getattr(cache, "_is_user_defined", False)) or cache.get_seq_length() > 0


def decoder_only_output(sequences: Any, scores: Any, logits: Any, cache: Any = None) -> GenerateDecoderOnlyOutput:
    """`GenerateDecoderOnlyOutput` with the cache under this release's name."""
    return GenerateDecoderOnlyOutput(sequences=sequences, scores=scores, logits=logits, **{cache_field(): cache})


def beam_output(
    sequences: Any, sequences_scores: Any, scores: Any, logits: Any, beam_indices: Any, cache: Any
) -> GenerateBeamDecoderOnlyOutput:
    """`GenerateBeamDecoderOnlyOutput` with the cache under this release's name."""
    return GenerateBeamDecoderOnlyOutput(
        sequences=sequences,
        sequences_scores=sequences_scores,
        scores=scores,
        logits=logits,
        beam_indices=beam_indices,
        **{cache_field(): cache},
    )


def causal_output(logits: Any, cache: Any) -> CausalLMOutputWithPast:
    """A causal model's forward output with the cache under this release's name."""
    return CausalLMOutputWithPast(logits=logits, **{cache_field(): cache})


def hooked_adapter_names(hook: Any) -> list[str] | None:
    """The adapter names, one a row, that a hook of PEFT's hands to its layer; None if it is another hook."""
    function = getattr(hook, "func", None)
    module = getattr(function, "__module__", None) or ""
    return hook.keywords.get("adapter_names") if module.startswith("peft.") else None


def is_capture_hook(hook: Any) -> bool:
    """Whether a forward hook is one that libraries install themselves, and that changes no number.

    Those that collect hidden states and attentions stay on the modules after the first call that asked for them; those
    that make the embeddings' output require a gradient come with gradient checkpointing.
    """
    function = getattr(hook, "func", hook)
    module = getattr(function, "__module__", None) or ""
    if getattr(function, "__name__", "") in INPUT_GRADIENT_HOOKS:
        return module.startswith(("transformers.", "peft."))
    return module.startswith("transformers.utils.")
