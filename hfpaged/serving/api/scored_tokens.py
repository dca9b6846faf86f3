"""What log-probabilities look like in answers."""

from __future__ import annotations

from transformers import PreTrainedTokenizerBase

IMPOSSIBLE = -9999.0
"""In the place of minus infinity, which JSON does not have; the number that OpenAI's own answers use."""


def token_text(tokenizer: PreTrainedTokenizerBase, token: int) -> str:
    """How a single token is shown."""
    return tokenizer.decode([token], skip_special_tokens=False)


def json_logprob(logprob: float) -> float:
    """The number as JSON can say it."""
    return max(logprob, IMPOSSIBLE)
