"""RequestOptions: the options of one call that Transformers does not have, validated once."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Any

from hfpaged.errors import UnsupportedOptionError
from hfpaged.generation.cancel_scope import CancelScope
from hfpaged.runtime.handle import GenerationHandle

# Those that act on the tokens of a handle, one by one, and that generate() has no place for.
SUBMIT_OPTIONS = ("logprobs", "prompt_logprobs", "presence_penalty", "frequency_penalty", "logit_bias")
LARGEST_PENALTY = 100.0
MOST_BIASES = 4096
MOST_SALT_CHARACTERS = 256
MOST_LOGPROBS = 100


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

    def of_all_rows(self) -> dict[str, Any]:
        """Those that are the same for every row of the call, as fields of a `RequestSpec`."""
        names = ("priority", "cache_salt", "prefix_cache", "logprobs", "prompt_logprobs")
        return {name: getattr(self, name) for name in names}

    def put_in_scope(self, handles: Iterable[GenerationHandle]) -> None:
        """Have the scope, if there is one, cancel these requests of the call."""
        if self.scope is not None:
            self.scope.add(handles)

    @classmethod
    def from_keyword(cls, options: Any) -> RequestOptions:
        """Validate the value of the `hfpaged` keyword.

        Raises:
            UnsupportedOptionError: it has an option that does not exist, or a value that cannot work.
        """
        if options is None:
            return cls()
        if not isinstance(options, dict):
            raise UnsupportedOptionError(f"hfpaged= takes a dict of options, got {type(options).__name__}")
        known = [field.name for field in fields(cls)]
        unknown = sorted(map(str, set(options) - set(known)))
        if unknown:
            raise UnsupportedOptionError(
                f"unknown hfpaged option(s) {', '.join(unknown)}; known: {', '.join(known)}"
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


def _is_within(value: Any, largest: float) -> bool:
    """Whether it is a finite number no further from zero than `largest`."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return is_number and math.isfinite(value) and abs(value) <= largest


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
