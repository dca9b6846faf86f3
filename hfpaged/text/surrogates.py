"""Lone surrogates: halves of characters, which JSON and command lines can carry and no tokenizer can read."""

from __future__ import annotations


def has_lone_surrogate(text: str) -> bool:
    """Whether the text has code points that UTF-8 cannot express."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return True
    return False


def without_lone_surrogates(text: str) -> str:
    """The text with a question mark for each of them."""
    return text.encode(errors="replace").decode()
