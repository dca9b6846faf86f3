"""A tiny model directory with a tokenizer, for commands that load what a command line names."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from families import VOCAB_SIZE
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedModel, PreTrainedTokenizerFast

SPECIAL_TOKENS = ["<pad>", "<s>", "</s>"]


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    """Every ASCII character is a token; the special ones have the ids that the tiny models expect."""
    characters = [chr(code) for code in range(VOCAB_SIZE) if chr(code).isprintable() or chr(code) == "\n"]
    vocabulary = {token: index for index, token in enumerate([*SPECIAL_TOKENS, *characters])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    pad, bos, eos = SPECIAL_TOKENS
    return PreTrainedTokenizerFast(tokenizer_object=backend, pad_token=pad, bos_token=bos, eos_token=eos)


@pytest.fixture(scope="session")
def model_directory(
    tmp_path_factory: pytest.TempPathFactory,
    tiny_model: Callable[..., PreTrainedModel],
    tokenizer: PreTrainedTokenizerFast,
) -> Path:
    directory = tmp_path_factory.mktemp("tiny-llama")
    tiny_model("llama").save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory
