"""SpaceCleanup: `clean_up_tokenization` on a text that arrives in pieces."""

from __future__ import annotations

from collections.abc import Callable

from transformers import PreTrainedTokenizerBase

# Every character of the patterns in PreTrainedTokenizerBase.clean_up_tokenization, such as " ." or " n't".
_PATTERN_CHARACTERS = frozenset(" .?!,'ntmsver")


def cleans_up_spaces(tokenizer: PreTrainedTokenizerBase, option: bool | None) -> bool:
    """Whether `tokenizer.decode(..., clean_up_tokenization_spaces=option)` cleans up."""
    if not (getattr(tokenizer, "clean_up_tokenization_spaces", False) if option is None else option):
        return False
    model = getattr(getattr(tokenizer, "backend_tokenizer", None), "model", None)
    forced = getattr(tokenizer, "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output", False)
    return type(model).__name__ != "BPE" or forced


class SpaceCleanup:
    """Cleans text up to the last place that no pattern can reach across."""

    def __init__(self, clean: Callable[[str], str]) -> None:
        self._clean = clean
        self._pending = ""

    def push(self, text: str) -> str:
        """Append text; returns the cleaned text that is now final."""
        # Patterns only lose spaces, so a character outside all of them separates what comes before and after it.
        end = len(text)
        while end > 0 and text[end - 1] in _PATTERN_CHARACTERS:
            end -= 1
        if end == 0:
            self._pending += text
            return ""
        ready, self._pending = self._pending + text[:end], text[end:]
        return self._clean(ready)

    def finish(self) -> str:
        """The rest of the text, cleaned."""
        rest, self._pending = self._pending, ""
        return self._clean(rest)
