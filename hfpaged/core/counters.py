"""SchedulerCounters: what the books have done so far, in totals."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class SchedulerCounters:
    """Totals since the scheduler was made.

    Attributes:
        prompt_tokens: prompt tokens of requests that were admitted, each once.
        cached_prompt_tokens: those of them that were found in the prefix cache or shared with a forked parent.
        generated_tokens: tokens appended after prompts.
        block_copies: shared blocks that were copied before a write.
        draft_tokens, accepted_tokens: guesses that were verified, and those of them that stood.
    """

    prompt_tokens: int = 0
    cached_prompt_tokens: int = 0
    generated_tokens: int = 0
    preemptions_swap: int = 0
    preemptions_recompute: int = 0
    block_copies: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
