"""Cleaning up spaces piece by piece is cleaning up the whole text."""

from __future__ import annotations

import random

from transformers import PreTrainedTokenizerBase

from hfpaged.text.space_cleanup import SpaceCleanup


def test_pieces_join_to_the_cleaned_text(byte_level_tokenizer: PreTrainedTokenizerBase) -> None:
    clean = byte_level_tokenizer.clean_up_tokenization
    generator = random.Random(0)
    parts = [
        " ",
        " .",
        " ?",
        " '",
        "' ",
        " n't",
        " 'm",
        " 's",
        " 've",
        " 're",
        "n",
        "'",
        "ve",
        "r",
        "e",
        "a",
        "b",
        "日",
    ]
    cleaned = 0
    for _ in range(400):
        text = "".join(generator.choices(parts, k=generator.randint(1, 30)))
        cleanup = SpaceCleanup(clean)
        pieces = [cleanup.push(character) for character in text]
        assert "".join(pieces) + cleanup.finish() == clean(text)
        cleaned += clean(text) != text
    assert cleaned > 300
