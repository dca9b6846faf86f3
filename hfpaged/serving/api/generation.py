"""Generation: one text being generated for a client, from token ids to the pieces that are sent."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field

from transformers import PreTrainedTokenizerBase

from hfpaged.runtime.handle import GenerationHandle
from hfpaged.sampling.logprobs import TokenLogprob
from hfpaged.serving.api.schemas import SamplingBody
from hfpaged.text.detokenizer import Detokenizer

# Most sequences have one piece a step in flight; a merged stream holds that many.
MOST_PIECES_WAITING = 64


@dataclass(frozen=True)
class Piece:
    """What became final: text, and the tokens that came with it, which need not be those that spell it."""

    index: int
    text: str
    tokens: Sequence[int] = ()
    logprobs: Sequence[TokenLogprob] = ()
    finish_reason: str | None = None


@dataclass
class Generation:
    """One text.

    Attributes:
        index: its number in the answer.
        checks_each_token: whether the text may end between two tokens that arrive together, at a stop string.
        dropped_ids: tokens that do not show in the text.
        num_tokens: generated so far, as far as the text goes.
        first_token_at, last_token_at: seconds of `time.perf_counter()`.
        gaps: of each arrival but the first, the seconds since the one before for each of its tokens, and how many.
    """

    index: int
    handle: GenerationHandle
    detokenizer: Detokenizer
    checks_each_token: bool
    dropped_ids: frozenset[int] = frozenset()
    num_tokens: int = 0
    first_token_at: float | None = None
    last_token_at: float | None = None
    finish_reason: str | None = None
    gaps: list[tuple[float, int]] = field(default_factory=list)

    async def pieces(self) -> AsyncIterator[Piece]:
        """The text as it arrives; the last piece has the reason for the end.

        Raises:
            HfpagedError: the engine failed, or this request did.
        """
        read = 0
        while tokens := await self.handle.tokens_after(read):
            self._note_arrival(len(tokens))
            logprobs = self.handle.logprobs[read : read + len(tokens)]
            text, used = self._push(tokens)
            read += len(tokens)
            self.num_tokens += used
            if self.detokenizer.stopped is not None:
                self.handle.cancel()
                self.finish_reason = "stop"
                yield Piece(self.index, text, tokens[:used], logprobs[:used], "stop")
                return
            if text or logprobs:
                yield Piece(self.index, text, tokens, logprobs)
        self.finish_reason = self.handle.finish_reason
        yield Piece(self.index, self.detokenizer.finish(), finish_reason=self.finish_reason)

    def _push(self, tokens: list[int]) -> tuple[str, int]:
        """The text that became final, and how many of the tokens came before its end."""
        if not self.checks_each_token:
            return self.detokenizer.push(self._shown(tokens)), len(tokens)
        text = ""
        for used, token in enumerate(tokens, 1):
            text += self.detokenizer.push(self._shown([token]))
            if self.detokenizer.stopped is not None:
                return text, used
        return text, len(tokens)

    def _shown(self, tokens: list[int]) -> list[int]:
        return [token for token in tokens if token not in self.dropped_ids] if self.dropped_ids else tokens

    def _note_arrival(self, count: int) -> None:
        now = time.perf_counter()
        if self.first_token_at is None:
            self.first_token_at = now
        else:
            self.gaps.append(((now - self.last_token_at) / count, count))
        self.last_token_at = now


async def merged(generations: Sequence[Generation]) -> AsyncIterator[Piece]:
    """The pieces of several texts as they come, with a bounded number waiting."""
    if len(generations) == 1:
        async for piece in generations[0].pieces():
            yield piece
        return
    queue: asyncio.Queue[Piece | BaseException | None] = asyncio.Queue(MOST_PIECES_WAITING)

    async def pump(generation: Generation) -> None:
        try:
            async for piece in generation.pieces():
                await queue.put(piece)
            await queue.put(None)
        except Exception as error:  # raised again by the reader
            await queue.put(error)

    tasks = [asyncio.create_task(pump(generation)) for generation in generations]
    try:
        running = len(tasks)
        while running:
            item = await queue.get()
            if isinstance(item, BaseException):
                raise item
            if item is None:
                running -= 1
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()


def make_detokenizer(tokenizer: PreTrainedTokenizerBase, body: SamplingBody, keep_special: bool) -> Detokenizer:
    """For one text of this request."""
    return Detokenizer(tokenizer, skip_special_tokens=not keep_special, stop_strings=body.stop_strings)
