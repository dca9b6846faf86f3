"""A lane of a comparison: the same prompts on one side, with a clock for each."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

from transformers import PreTrainedTokenizerBase

from hfpaged.text.detokenizer import Detokenizer


class Track:
    """One prompt's text as it grows. Written by one thread, read by others.

    Attributes:
        tokens: new token ids.
        first_token_seconds, seconds: from the start of the lane to the first and to the last token so far.
        done: nothing will be added.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, started: float):
        self.tokens: list[int] = []
        self.first_token_seconds: float | None = None
        self.seconds = 0.0
        self.done = False
        self._started = started
        self._detokenizer = Detokenizer(tokenizer)
        self._text = ""

    @property
    def text(self) -> str:
        """What it says so far."""
        return self._text

    @property
    def tokens_per_second(self) -> float:
        """Tokens after the first, by the time since it."""
        if len(self.tokens) < 2 or self.first_token_seconds is None:
            return 0.0
        return (len(self.tokens) - 1) / max(1e-9, self.seconds - self.first_token_seconds)

    def add(self, token: int) -> None:
        """A token came, now."""
        self.seconds = time.perf_counter() - self._started
        if self.first_token_seconds is None:
            self.first_token_seconds = self.seconds
        self.tokens.append(token)
        self._text += self._detokenizer.push([token])

    def finish(self) -> None:
        """No more tokens will come."""
        if not self.done:
            self._text += self._detokenizer.finish()
            self.done = True


class Lane:
    """All prompts on one side, started together as users would.

    Attributes:
        title: what runs them.
        tracks: one for each prompt; empty before `start`.
        error: why it ended early, if it did.
    """

    def __init__(self, title: str):
        self.title = title
        self.tracks: Sequence[Track] = ()
        self.error: str | None = None

    def start(self, tokenizer: PreTrainedTokenizerBase, count: int) -> None:
        """All prompts are asked now."""
        started = time.perf_counter()
        self.tracks = [Track(tokenizer, started) for _ in range(count)]

    @property
    def done(self) -> bool:
        """Whether all tracks are."""
        return bool(self.tracks) and all(track.done for track in self.tracks)

    @property
    def num_tokens(self) -> int:
        """New tokens of all tracks."""
        return sum(len(track.tokens) for track in self.tracks)

    @property
    def seconds(self) -> float:
        """Until the last token of any track."""
        return max((track.seconds for track in self.tracks), default=0.0)

    @property
    def tokens_per_second(self) -> float:
        """New tokens of all tracks, by the time from the start to the last of them."""
        return self.num_tokens / self.seconds if self.seconds else 0.0

    @property
    def mean_first_token_seconds(self) -> float | None:
        """Average time to the first token, of those that have one."""
        return _mean(track.first_token_seconds for track in self.tracks if track.first_token_seconds is not None)


def _mean(values: Iterable[float]) -> float | None:
    found = list(values)
    return sum(found) / len(found) if found else None
