"""GenerateCall: what Transformers' `generate` hands to a decoding method, in one object."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

from hfpaged.compat import pop_cache
from hfpaged.generation.request_options import RequestOptions

# Arguments of the decoding loops themselves; all others go to the model's forward.
LOOP_ARGUMENTS = frozenset({"inputs_tensor", "assistant_model", "assistant_tokenizer", "tokenizer"})


# Transformers' own processors that call back to the user, or keep state from step to step.
BATCH_PROCESSORS = frozenset({"PrefixConstrainedLogitsProcessor", "UnbatchedClassifierFreeGuidanceLogitsProcessor"})


class PreparedProcessors(LogitsProcessorList):
    """The processors of a call, with how Transformers made them, so that they can be made again for one row.

    Attributes:
        arguments: keyword arguments of `_get_logits_processor`.
    """

    def __init__(self, processors: LogitsProcessorList, arguments: dict[str, Any]):
        super().__init__(processors)
        self.arguments = arguments

    def is_users(self, processor: Any) -> bool:
        """Whether this is one that the user passed."""
        return any(processor is one for one in self.arguments.get("logits_processor") or ())

    def needs_batch(self, processor: Any) -> bool:
        """Whether one of the list must see the call's whole batch: the user's own, or one that keeps state."""
        return self.is_users(processor) or type(processor).__name__ in BATCH_PROCESSORS

    @property
    def any_needs_batch(self) -> bool:
        """Whether one of them must see the call's whole batch at every step."""
        return any(map(self.needs_batch, self))


class PreparedCriteria(StoppingCriteriaList):
    """The stopping criteria of a call, with those that the user passed."""

    def __init__(self, criteria: StoppingCriteriaList, users: StoppingCriteriaList | None):
        super().__init__(criteria)
        self.users = list(users or ())


@dataclass(frozen=True)
class GenerateCall:
    """One call in a mode that the engine may take.

    Attributes:
        input_ids: [B, L] left-padded prompts, already repeated `num_return_sequences` times.
        attention_mask: [B, L], or None if all ones.
        model_kwargs: what else `generate` prepared for the model's forward.
    """

    input_ids: torch.LongTensor
    attention_mask: torch.Tensor | None
    processors: PreparedProcessors
    criteria: PreparedCriteria
    config: GenerationConfig
    streamer: BaseStreamer | None
    options: RequestOptions
    synced_gpus: bool = False
    model_kwargs: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of_arguments(
        cls, input_ids: torch.LongTensor, arguments: dict[str, Any], options: RequestOptions
    ) -> tuple[GenerateCall, Any | None]:
        """From what `generate` passes to a decoding method; also returns the cache among it, if any."""
        rest = dict(arguments)
        cache = pop_cache(rest)
        call = cls(
            input_ids=input_ids,
            attention_mask=rest.pop("attention_mask", None),
            processors=rest.pop("logits_processor"),
            criteria=rest.pop("stopping_criteria"),
            config=rest.pop("generation_config"),
            streamer=rest.pop("streamer", None),
            options=options,
            synced_gpus=rest.pop("synced_gpus", False),
            model_kwargs={name: value for name, value in rest.items() if name not in LOOP_ARGUMENTS},
        )
        return call, cache

    @property
    def num_rows(self) -> int:
        """B."""
        return self.input_ids.shape[0]

    @property
    def padded_len(self) -> int:
        """L."""
        return self.input_ids.shape[1]

    @property
    def max_new_tokens(self) -> int:
        """Tokens that each row may get: what the maximum length leaves beyond the padded width, as in Transformers."""
        # A MaxLengthCriteria that the user passed takes the place of the config's.
        longest = self.criteria.max_length or self.config.max_length
        return max(1, longest - self.padded_len)

    @property
    def stops_at_eos(self) -> bool:
        """Whether rows end at a token, and are padded from there on."""
        return any(hasattr(criterion, "eos_token_id") for criterion in self.criteria)

    @property
    def keeps_scores(self) -> bool:
        """Whether processed scores are part of the output."""
        return bool(self.config.return_dict_in_generate and self.config.output_scores)

    @property
    def keeps_logits(self) -> bool:
        """Whether raw logits are part of the output."""
        return bool(self.config.return_dict_in_generate and self.config.output_logits)
