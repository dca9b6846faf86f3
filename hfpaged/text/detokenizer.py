"""Detokenizer: streams the text of a growing token sequence in pieces that never have to be taken back."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from transformers import PreTrainedTokenizerBase

from hfpaged.text.decode_window import DecodeWindow
from hfpaged.text.graphemes import GraphemeHold
from hfpaged.text.space_cleanup import SpaceCleanup, cleans_up_spaces
from hfpaged.text.stop_strings import StopStringFilter


class Detokenizer:
    """The text of one sequence, piece by piece.

    All pieces together are `tokenizer.decode(all_ids, skip_special_tokens=..., clean_up_tokenization_spaces=...)`, cut
    at the first stop string if there is one. A piece never ends inside a multi-byte character, an emoji sequence or
    another character that combining marks may follow (letters of alphabetic scripts without vowel signs, such as
    Latin, are not kept waiting for an accent), nor inside what may become a stop string. The cost of a token does not
    depend on how many came before it.

    Args:
        tokenizer: any Transformers tokenizer. Exact for those on the `tokenizers` library; for others as far as
            their decoding is local, which it is but for a few word-joining ones.
        skip_special_tokens: leave special tokens out of the text.
        stop_strings: where the text ends. Of several, the one that is completed first counts; of those that are
            completed by the same character, the longest.
        include_stop: keep the stop string itself in the text.
        clean_up_tokenization_spaces: as of `decode`; None: what the tokenizer says.

    Raises:
        ConfigError: an empty stop string.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        skip_special_tokens: bool = True,
        stop_strings: str | Sequence[str] = (),
        include_stop: bool = False,
        clean_up_tokenization_spaces: bool | None = None,
    ) -> None:
        self._window = DecodeWindow(tokenizer, skip_special_tokens)
        self._cleanup: SpaceCleanup | None = None
        if cleans_up_spaces(tokenizer, clean_up_tokenization_spaces):
            self._cleanup = SpaceCleanup(tokenizer.clean_up_tokenization)
        self._stops = StopStringFilter([stop_strings] if isinstance(stop_strings, str) else stop_strings, include_stop)
        self._graphemes = GraphemeHold()

    @property
    def stopped(self) -> str | None:
        """The stop string that ended the text. Nothing comes after it."""
        return self._stops.stopped

    def push(self, token_ids: Iterable[int]) -> str:
        """Append tokens; returns the text that is now final, which may be empty."""
        if self.stopped is not None:
            return ""
        text = self._window.push(token_ids)
        if self._cleanup is not None:
            text = self._cleanup.push(text)
        text = self._graphemes.push(self._stops.push(text))
        # Nothing will follow the stop string, so nothing needs to be waited for.
        return text if self.stopped is None else text + self._graphemes.finish()

    def finish(self) -> str:
        """The rest of the text once no token will follow. An unfinished character becomes U+FFFD, as in `decode`."""
        if self.stopped is not None:
            return ""
        text = self._window.finish()
        if self._cleanup is not None:
            text = self._cleanup.push(text) + self._cleanup.finish()
        text = self._stops.push(text) + self._stops.finish()
        return self._graphemes.push(text) + self._graphemes.finish()
