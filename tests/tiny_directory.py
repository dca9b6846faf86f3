"""A tiny model as a directory with a tokenizer, for what loads a model by its name."""

from __future__ import annotations

from pathlib import Path

from families import VOCAB_SIZE, build_tiny
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

SPECIAL_TOKENS = ["<pad>", "<s>", "</s>"]


def character_tokenizer() -> PreTrainedTokenizerFast:
    """Every ASCII character is a token; the special ones have the ids that the tiny models expect."""
    characters = [chr(code) for code in range(VOCAB_SIZE) if chr(code).isprintable() or chr(code) == "\n"]
    vocabulary = {token: index for index, token in enumerate([*SPECIAL_TOKENS, *characters])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    pad, bos, eos = SPECIAL_TOKENS
    return PreTrainedTokenizerFast(tokenizer_object=backend, pad_token=pad, bos_token=bos, eos_token=eos)


def save_tiny(directory: Path, tokenizer: PreTrainedTokenizerFast, **config_fields: object) -> Path:
    """Write a tiny Llama and `tokenizer`; returns the directory."""
    build_tiny("llama", **config_fields).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory
