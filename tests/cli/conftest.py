"""A tiny model directory with a tokenizer, for commands that load what a command line names."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny_directory import character_tokenizer, save_tiny
from transformers import PreTrainedTokenizerFast


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    return character_tokenizer()


@pytest.fixture(scope="session")
def model_directory(tmp_path_factory: pytest.TempPathFactory, tokenizer: PreTrainedTokenizerFast) -> Path:
    return save_tiny(tmp_path_factory.mktemp("tiny-llama"), tokenizer)
