"""A tiny model in a directory, as the examples of the integrations take it."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny_chat import chat_tokenizer
from tiny_directory import save_tiny


@pytest.fixture(scope="session")
def directory(tmp_path_factory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("tiny"), chat_tokenizer())
