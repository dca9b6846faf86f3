"""GenerateCall: what Transformers' `generate` hands to a decoding method, in one object."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

from hfpaged.compat import pop_cache
from hfpaged.errors import UnsupportedOptionError
from hfpaged.runtime.handle import GenerationHandle

# Those that act on the tokens of a handle, one by one, and that generate() has no place for.
SUBMIT_OPTIONS = ("logprobs", "prompt_logprobs", "presence_penalty", "frequency_penalty", "logit_bias")
REQUEST_OPTIONS = ("seed", "cache_salt", "priority", "prefix_cache", "scope", "adapter", *SUBMIT_OPTIONS)
LARGEST_PENALTY = 100.0
MOST_BIASES = 4096
MOST_SALT_CHARACTERS = 256
MOST_LOGPROBS = 100
# Arguments of the decoding loops themselves; all others go to the model's forward.
LOOP_ARGUMENTS = frozenset({"inputs_tensor", "assistant_model", "assistant_tokenizer", "tokenizer"})


class PreparedProcessors(LogitsProcessorList):
    """The processors of a call, with how Transformers made them, so that they can be made again for one row.

    Attributes:
        arguments: keyword arguments of `_get_logits_processor`.
    """

    def __init__(self, processors: LogitsProcessorList, arguments: dict[str, Any]):
        super().__init__(processors)
        self.arguments = arguments

    def is_users(self, index: int) -> bool:
        """Whether the processor at `index` must see the call's whole batch: the user's own, or one that keeps state."""
        users = self.arguments.get("logits_processor") or ()
        processor = self[index]
        return any(processor is one for one in users) or type(processor).__name__ in _BATCH_STATEFUL


# Transformers' own processors that call back to the user, or keep state from step to step.
_BATCH_STATEFUL = frozenset({"PrefixConstrainedLogitsProcessor", "UnbatchedClassifierFreeGuidanceLogitsProcessor"})


class PreparedCriteria(StoppingCriteriaList):
    """The stopping criteria of a call, with those that the user passed."""

    def __init__(self, criteria: StoppingCriteriaList, users: StoppingCriteriaList | None):
        super().__init__(criteria)
        self.users = list(users or ())


class CancelScope:
    """Cancels all calls that were given it: `generate(..., hfpaged={"scope": scope})`, from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._handles: list[GenerationHandle] = []
        self._cancelled = False

    @property
    def cancelled(self) -> bool:
        """Whether `cancel` has been called."""
        return self._cancelled

    def cancel(self) -> None:
        """End the scope's running calls with `RequestCancelled`, and every later one at once."""
        with self._lock:
            self._cancelled = True
            handles, self._handles = self._handles, []
        for handle in handles:
            handle.cancel()

    def add(self, handles: Iterable[GenerationHandle]) -> None:
        """Put requests under this scope."""
        with self._lock:
            self._handles = [handle for handle in self._handles if not handle.done]
            self._handles += handles
        if self._cancelled:
            self.cancel()


@dataclass(frozen=True)
class RequestOptions:
    """`generate(..., hfpaged={...})`: what Transformers has no option for.

    Attributes:
        seed: of the random numbers; one for the call, or a list with one for each prompt. None: drawn from PyTorch.
        cache_salt: only requests with the same salt share cached prefixes.
        priority: lower runs first.
        prefix_cache: False neither reads nor enters the prefix cache.
        scope: lets another thread cancel the call.
        logprobs, prompt_logprobs: of `engine.submit`: collect log-probabilities of the new tokens, of the prompt,
            on the handle, with so many of the likeliest alternatives. None: do not.
        adapter: name of the LoRA adapter to go through, or "__base__" for none; one for the call, or a list with one
            for each prompt. None: those that are active.
        presence_penalty, frequency_penalty: of `engine.submit`: subtracted from the logits of tokens that the answer
            has, once, and for each time.
        logit_bias: of `engine.submit`: token id -> number added to its logit.
    """

    seed: int | list[int] | None = None
    cache_salt: str = ""
    priority: int = 0
    prefix_cache: bool = True
    scope: CancelScope | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    adapter: str | list[str] | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] | None = None

    @property
    def for_submit(self) -> list[str]:
        """Names of the options set that only `engine.submit` takes."""
        return [name for name in SUBMIT_OPTIONS if getattr(self, name) != getattr(type(self), name)]

    @classmethod
    def from_keyword(cls, options: Any) -> RequestOptions:
        """Validate the value of the `hfpaged` keyword."""
        if options is None:
            return cls()
        if not isinstance(options, dict):
            raise UnsupportedOptionError(f"hfpaged= takes a dict of options, got {type(options).__name__}")
        unknown = sorted(set(options) - set(REQUEST_OPTIONS))
        if unknown:
            raise UnsupportedOptionError(
                f"unknown hfpaged option(s) {', '.join(map(str, unknown))}; known: {', '.join(REQUEST_OPTIONS)}"
            )
        made = cls(**options)
        made._validate()
        return made

    def _validate(self) -> None:
        seeds = self.seed if isinstance(self.seed, list) else [] if self.seed is None else [self.seed]
        if not all(_is_int(seed) and 0 <= seed < 1 << 64 for seed in seeds):
            raise UnsupportedOptionError(f"seed must be an integer from 0 to 2**64 - 1, or a list, got {self.seed!r}")
        if not isinstance(self.cache_salt, str) or len(self.cache_salt) > MOST_SALT_CHARACTERS:
            raise UnsupportedOptionError(f"cache_salt must be a string of at most {MOST_SALT_CHARACTERS} characters")
        if not _is_int(self.priority) or abs(self.priority) > 1 << 30:
            raise UnsupportedOptionError(f"priority must be an integer, got {self.priority!r}")
        if self.scope is not None and not isinstance(self.scope, CancelScope):
            raise UnsupportedOptionError(f"scope must be a hfpaged.CancelScope, got {type(self.scope).__name__}")
        if not isinstance(self.prefix_cache, bool):
            raise UnsupportedOptionError(f"prefix_cache must be True or False, got {self.prefix_cache!r}")
        adapters = self.adapter if isinstance(self.adapter, list) else [self.adapter or ""]
        if not all(isinstance(name, str) for name in adapters):
            raise UnsupportedOptionError(f"adapter must be a name, or a list of names, got {self.adapter!r}")
        for name in ("logprobs", "prompt_logprobs"):
            count = getattr(self, name)
            if count is not None and not (_is_int(count) and 0 <= count <= MOST_LOGPROBS):
                raise UnsupportedOptionError(f"{name} must be an integer from 0 to {MOST_LOGPROBS}, got {count!r}")
        for name in ("presence_penalty", "frequency_penalty"):
            if not _is_within(getattr(self, name), LARGEST_PENALTY):
                raise UnsupportedOptionError(f"{name} must be a number, not further from 0 than {LARGEST_PENALTY:g}")
        self._validate_bias()

    def _validate_bias(self) -> None:
        if self.logit_bias is None:
            return
        if not isinstance(self.logit_bias, dict) or len(self.logit_bias) > MOST_BIASES:
            raise UnsupportedOptionError(f"logit_bias must be a dict of at most {MOST_BIASES} token ids")
        for token, bias in self.logit_bias.items():
            if not (_is_int(token) and token >= 0) or not _is_within(bias, float("inf")):
                raise UnsupportedOptionError(f"logit_bias has {token!r}: {bias!r}; it takes token ids and numbers")


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


def _is_within(value: Any, largest: float) -> bool:
    """Whether it is a finite number no further from zero than `largest`."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return is_number and math.isfinite(value) and abs(value) <= largest


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
