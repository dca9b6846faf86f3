"""A tokenizer for the tiny models that also takes conversations."""

from __future__ import annotations

from tiny_directory import character_tokenizer
from tokenizers import decoders
from transformers import PreTrainedTokenizerFast

CHAT_TEMPLATE = (
    "{% if tools %}tools\n{% endif %}{% for message in messages %}{{ message.role[0] }}:{{ message.content }}\n"
    "{% endfor %}{% if add_generation_prompt %}a:{% endif %}"
)


def chat_tokenizer() -> PreTrainedTokenizerFast:
    """Every ASCII character is a token, in conversations as elsewhere."""
    tokenizer = character_tokenizer()
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.backend_tokenizer.decoder = decoders.Fuse()
    return tokenizer
