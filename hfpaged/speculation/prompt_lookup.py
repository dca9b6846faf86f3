"""Prompt lookup decoding: guess that what followed the last words before follows them again.

Source: Saxena, "Prompt Lookup Decoding" (2023), as in Transformers' `prompt_lookup_num_tokens`. Here the n-grams are
indexed as the text grows, so that a guess costs time in proportion to its length, and the length adapts.
"""

from __future__ import annotations

from collections.abc import Sequence

from hfpaged.speculation.draft_length import DraftLength


class PromptLookup:
    """Drafts for one growing sequence.

    Args:
        num_tokens: most tokens of a draft.
        max_ngram: longest run of last tokens that is looked up; shorter ones are tried when it is new.
    """

    def __init__(self, num_tokens: int, max_ngram: int = 2):
        self.max_ngram = max_ngram
        self._ends: list[dict[tuple[int, ...], int]] = [{} for _ in range(max_ngram)]
        self._indexed = 0
        self._length = DraftLength(num_tokens)

    def propose(self, tokens: Sequence[int], limit: int, costs: Sequence[float]) -> list[int]:
        """A guess of what comes after `tokens`, at most `limit` long; [] if there is nothing to go by.

        Args:
            tokens: the sequence, which only ever grows between calls.
            costs: of guesses, see `DraftLength.next`.
        """
        self._index(tokens)
        for size in range(min(self.max_ngram, len(tokens) - 1), 0, -1):
            end = self._ends[size - 1].get(tuple(tokens[-size:]))
            if end is not None:
                return list(tokens[end : end + min(self._length.next(costs), limit)])
        return []

    def learn(self, proposed: int, accepted: int) -> None:
        """How many of the last proposal's tokens were right."""
        self._length.learn(proposed, accepted)

    def _index(self, tokens: Sequence[int]) -> None:
        """Note where each n-gram ends, the last one excepted: it is what will be looked up."""
        for end in range(max(1, self._indexed), len(tokens)):
            for size in range(1, min(self.max_ngram, end) + 1):
                self._ends[size - 1][tuple(tokens[end - size : end])] = end
        self._indexed = len(tokens)
