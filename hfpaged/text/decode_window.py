"""DecodeWindow: decodes a growing token sequence by decoding only its last few tokens again."""

from __future__ import annotations

from collections.abc import Iterable

from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerBase

# What `decode` puts in the place of bytes that are no character, or not yet one.
REPLACEMENT = "\ufffd"
# A window grows to _LONGEST tokens and then shrinks to its last _ANCHOR ones. The anchor is decoded again for two
# reasons: decoders treat the first token of a text differently, and a character may be spread over as many tokens as
# it has bytes, at most four.
_LONGEST = 16
_ANCHOR = 4


class DecodeWindow:
    """Text of a token sequence, released as soon as no further token can change it.

    The pieces together are `tokenizer.decode(all_ids, skip_special_tokens, clean_up_tokenization_spaces=False)`.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._skipped_ids = _special_ids(tokenizer) if skip_special_tokens else frozenset()
        self._backend = getattr(tokenizer, "backend_tokenizer", None)
        self._byte_ids = _byte_fallback_ids(self._backend)
        self._window: list[int] = []
        # Characters of the decoded window that have been released.
        self._released = 0
        # Byte-fallback tokens at the end, which turn into U+FFFD all together if a later one makes them invalid.
        self._byte_run: list[int] = []

    def push(self, token_ids: Iterable[int]) -> str:
        """Append tokens; returns the text that became final."""
        before = len(self._window)
        for token in token_ids:
            # A token that `decode` leaves out must not become the anchor.
            if token in self._skipped_ids or self._is_unknown(token):
                continue
            self._byte_run.append(token)
            if token not in self._byte_ids:
                self._window += self._byte_run
                self._byte_run.clear()
        return self._release() if len(self._window) > before else ""

    def finish(self) -> str:
        """The rest of the text."""
        self._window += self._byte_run
        self._byte_run.clear()
        text = self._decode(self._window)[self._released :]
        self._released += len(text)
        return text

    def _release(self) -> str:
        text = self._decode(self._window)
        # Only the last character can be an unfinished one: more bytes may complete it.
        end = len(text) - text.endswith(REPLACEMENT)
        piece = text[self._released : end]
        self._released = max(self._released, end)
        if len(self._window) > _LONGEST:
            self._window = self._window[-_ANCHOR:]
            waiting = len(text) - self._released
            self._released = len(self._decode(self._window)) - waiting
        return piece

    def _is_unknown(self, token: int) -> bool:
        """Whether the id is outside the vocabulary, as the last ones of a padded embedding are."""
        return self._backend is not None and self._backend.id_to_token(token) is None

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(
            token_ids, skip_special_tokens=self._skip_special_tokens, clean_up_tokenization_spaces=False
        )


def _special_ids(tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Ids that `decode` leaves out with `skip_special_tokens`."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return frozenset(tokenizer.all_special_ids)
    return frozenset(token_id for token_id, token in backend.get_added_tokens_decoder().items() if token.special)


def _byte_fallback_ids(backend: Tokenizer | None) -> frozenset[int]:
    """Ids of the "<0xNN>" tokens if the tokenizer decodes them to bytes."""
    decoder = getattr(backend, "decoder", None)
    if decoder is None or b'"ByteFallback"' not in decoder.__getstate__():
        return frozenset()
    names = {f"<0x{byte:{style}}>" for byte in range(256) for style in ("02X", "02x")}
    ids = (backend.token_to_id(name) for name in names)
    return frozenset(token_id for token_id in ids if token_id is not None)
