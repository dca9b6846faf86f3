"""Prompts for `hfpaged generate`, and their tokenization."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import BatchEncoding, PreTrainedTokenizerBase

from hfpaged.errors import InputError
from hfpaged.text.surrogates import has_lone_surrogate

_STORY = (
    "The lighthouse on Gull Rock had been dark for eleven winters when Mara rowed out to it with a can of oil, a box "
    "of new wicks and her grandfather's brass key. The harbour master had warned her about the reef, and the baker "
    "about the ghost, but nobody had warned her about the gulls, which had claimed the stairs, the kitchen and most "
    "of the lamp room for themselves. She worked through the night, sweeping out nests, polishing the great lens and "
    "filling the tank, and just before dawn she struck a match. The beam swept over the water, and far out at sea a "
    "fishing boat that had lost its way in the fog turned slowly towards home."
)

# Of unequal length, and three of them begin with the same text, so that padding, batching and prefix sharing matter.
DEFAULT_PROMPTS = (
    "What is the capital of France?",
    f"{_STORY}\n\nWho rowed out to the lighthouse, and what did she carry?",
    f"{_STORY}\n\nGive this story a title and explain your choice in one sentence.",
    "List three things to pack for a rainy day.",
    f"{_STORY}\n\nWhat happened just before dawn?",
    "Explain to a child why the sky is blue, using a short example from everyday life.",
)


def encode(tokenizer: PreTrainedTokenizerBase, prompts: Sequence[str]) -> BatchEncoding:
    """Tokenize prompts as one left-padded batch, as user messages where the tokenizer has a chat template.

    Returns:
        `input_ids` and `attention_mask`, int64 [len(prompts), longest].

    Raises:
        InputError: a prompt is empty or no valid text, or the prompts differ in length and the tokenizer has no token
            to pad with.
    """
    if any(not prompt.strip() for prompt in prompts):
        raise InputError("a prompt is empty")
    if any(map(has_lone_surrogate, prompts)):
        raise InputError("a prompt is not valid UTF-8")
    if tokenizer.pad_token is None:
        if tokenizer.eos_token is None:
            raise InputError("the tokenizer has neither a padding nor an end-of-sequence token to pad prompts with")
        tokenizer.pad_token = tokenizer.eos_token
    has_template = bool(tokenizer.chat_template)
    texts = [_as_chat(tokenizer, prompt) for prompt in prompts] if has_template else list(prompts)
    return tokenizer(texts, return_tensors="pt", padding=True, padding_side="left", add_special_tokens=not has_template)


def _as_chat(tokenizer: PreTrainedTokenizerBase, prompt: str) -> str:
    messages = [{"role": "user", "content": prompt}]
    return tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)


def last_line(prompt: str, width: int = 100) -> str:
    """What tells a prompt from others that begin like it, shortened to one line."""
    line = prompt.strip().splitlines()[-1]
    return line if len(line) <= width else f"…{line[1 - width :]}"
