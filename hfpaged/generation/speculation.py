"""Which assisted calls guess ahead on the engine, and from where."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedModel

from hfpaged.capabilities import support
from hfpaged.generation.call import GenerateCall
from hfpaged.generation.routing import SELF_SPECULATION, model_reason
from hfpaged.runtime.request_spec import DraftOptions, LookupOptions
from hfpaged.unwrap import unwrap

DEFAULT_NUM_TOKENS = 20


def speculation_options(
    model: PreTrainedModel, call: GenerateCall, arguments: dict[str, Any]
) -> LookupOptions | DraftOptions | None:
    """How the engine guesses ahead for this call; None: only Transformers' own loop can run it, or refuse it.

    Args:
        arguments: of the decoding method, `assistant_model` perhaps among them.
    """
    config, assistant = call.config, arguments.get("assistant_model")
    if any(getattr(config, name, None) for name in (*SELF_SPECULATION, "assistant_ensemble_weight")):
        return None
    if config.prompt_lookup_num_tokens is not None:
        lookup = LookupOptions(config.prompt_lookup_num_tokens, config.max_matching_ngram_size or 2)
        return lookup if lookup.num_tokens > 0 and lookup.max_ngram > 0 else None
    if assistant is None or not _can_draft(model, assistant, call, arguments):
        return None
    return DraftOptions(unwrap(assistant), assistant.generation_config.num_assistant_tokens or DEFAULT_NUM_TOKENS)


def _can_draft(model: PreTrainedModel, assistant: Any, call: GenerateCall, arguments: dict[str, Any]) -> bool:
    """Whether `assistant` is a model of its own, over the same vocabulary, that can run on an engine."""
    if arguments.get("assistant_tokenizer") is not None or support(assistant):
        return False
    vocabularies = {one.config.get_text_config().vocab_size for one in (model, assistant)}
    return len(vocabularies) == 1 and model_reason(unwrap(assistant), call.padded_len + call.max_new_tokens) is None
