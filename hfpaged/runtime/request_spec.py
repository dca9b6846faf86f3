"""RequestSpec: one sequence to generate, as the engine takes it. Everything in it is already validated."""

from __future__ import annotations

from dataclasses import dataclass

from transformers import PreTrainedModel

from hfpaged.runtime.thread_state import ThreadState
from hfpaged.sampling.processors import CompiledProcessors
from hfpaged.sampling.stop import StopRule


@dataclass(frozen=True)
class LookupOptions:
    """Speculation by prompt lookup: drafts of up to `num_tokens`, found by the last `max_ngram` tokens or fewer."""

    num_tokens: int
    max_ngram: int = 2


@dataclass(frozen=True)
class DraftOptions:
    """Speculation by another model with the same vocabulary: drafts of up to `num_tokens`."""

    model: PreTrainedModel
    num_tokens: int


@dataclass(frozen=True)
class RequestSpec:
    """What to generate after `prompt`.

    Attributes:
        prompt: token ids, at least one.
        max_tokens: length at which the sequence ends, prompt included.
        stop: when it ends earlier.
        processors: what reshapes the logits, for this row alone.
        do_sample: draw from the distribution, or take the most likely token.
        seed, sample_index: key of the row's random numbers, with the position.
        keep_scores, keep_logits: collect processed scores, raw logits on the handle.
        logprobs, prompt_logprobs: collect log-probabilities of new tokens, of the prompt, on the handle, with so
            many of the likeliest alternatives.
        guesses: guess tokens ahead, if the row `may_speculate`.
        steered: the caller gets the logits and feeds the tokens (`processors`, `stop` and sampling are then its own).
        logits_for: of a steered request, how many of the prompt's last tokens it wants logits for.
        priority: lower runs first.
        cache_salt: only requests with the same salt share cached prefixes.
        prefix_cache: False neither reads nor enters the prefix cache.
        adapter: name of the LoRA adapter that it alone goes through, or "__base__" for none; None: whatever is active.
        fork_of: index, in the same submission, of the request whose prompt this one shares.
        thread_state: the PyTorch state that its forwards run under.
    """

    prompt: list[int]
    max_tokens: int
    stop: StopRule
    thread_state: ThreadState
    processors: CompiledProcessors | None = None
    do_sample: bool = False
    seed: int = 0
    sample_index: int = 0
    keep_scores: bool = False
    keep_logits: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    guesses: LookupOptions | DraftOptions | None = None
    steered: bool = False
    logits_for: int = 1
    priority: int = 0
    cache_salt: str = ""
    prefix_cache: bool = True
    adapter: str | None = None
    fork_of: int | None = None

    @property
    def may_speculate(self) -> bool:
        """Whether it guesses ahead: it asks to, and nothing but the number of its tokens decides about the next one."""
        looks_back = self.processors is not None and self.processors.looks_back
        return self.guesses is not None and not looks_back and not self.stop.looks_at_text
