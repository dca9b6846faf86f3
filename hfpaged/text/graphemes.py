"""GraphemeHold: keeps back the end of a text while a character on screen may still grow.

A character on screen can be several code points: a base with combining marks, a flag of two regional indicators, emoji
joined by U+200D. The rules are a part of Unicode Standard Annex 29, sufficient to tell where the last one begins.
"""

from __future__ import annotations

import unicodedata

_JOINER = "\u200d"
_FIRST_REGIONAL, _LAST_REGIONAL = "\U0001f1e6", "\U0001f1ff"
_FIRST_SKIN_TONE, _LAST_SKIN_TONE = "\U0001f3fb", "\U0001f3ff"
# Marks, and formats such as the joiner, variation selectors and tags: they belong to what is in front of them.
_EXTENDING = frozenset({"Mn", "Mc", "Me", "Cf"})
# Thai and Lao vowel signs that Unicode counts as letters.
_SARA_AM = frozenset("\u0e33\u0eb3")
# What they commonly follow: pictures and modifier symbols, and letters of scripts that write vowels as marks.
_EXTENDABLE_SYMBOLS = frozenset({"So", "Sk"})
# Longer than any emoji sequence. Text that piles up more marks than this is not worth waiting for.
_LONGEST = 64


class GraphemeHold:
    """Passes text through, except a last character that what comes next may extend."""

    def __init__(self) -> None:
        self._pending = ""

    def push(self, text: str) -> str:
        """Append text; returns all of it that is complete."""
        self._pending += text
        end = len(self._pending) - _unfinished_length(self._pending)
        ready, self._pending = self._pending[:end], self._pending[end:]
        return ready

    def finish(self) -> str:
        """The rest of the text."""
        rest, self._pending = self._pending, ""
        return rest


def _unfinished_length(text: str) -> int:
    """Number of code points at the end of `text` that must wait."""
    if not text or not _may_be_extended(text[-1]):
        return 0
    start = len(text) - 1
    while start > 0 and _continues(text, start):
        start -= 1
        if len(text) - start > _LONGEST:
            return 0
    return len(text) - start


def _may_be_extended(character: str) -> bool:
    if character.isascii():
        return False
    category = unicodedata.category(character)
    if category in _EXTENDING or category in _EXTENDABLE_SYMBOLS:
        return True
    # Ideographs, kana and Hangul are wide and take no marks.
    return category == "Lo" and unicodedata.east_asian_width(character) != "W"


def _continues(text: str, index: int) -> bool:
    """Whether the code point at `index` belongs to the character on screen that the one before it is part of."""
    character = text[index]
    if unicodedata.category(character) in _EXTENDING or character in _SARA_AM:
        return True
    if _FIRST_SKIN_TONE <= character <= _LAST_SKIN_TONE:
        return True
    if _is_regional(character):
        # Flags are pairs counted from the left; an odd number before this one makes it the second of its pair.
        before = index
        while before > 0 and _is_regional(text[before - 1]):
            before -= 1
        return (index - before) % 2 == 1
    return text[index - 1] == _JOINER


def _is_regional(character: str) -> bool:
    return _FIRST_REGIONAL <= character <= _LAST_REGIONAL
