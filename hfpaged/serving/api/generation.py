"""Generation: one text being generated for a client, from token ids to the pieces that are sent."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from transformers import PreTrainedTokenizerBase

from hfpaged.runtime.handle import GenerationHandle
from hfpaged.sampling.logprobs import TokenLogprob
from hfpaged.serving.api.errors import ApiError
from hfpaged.serving.api.schemas import SamplingBody
from hfpaged.serving.process.messages import ModelInfo
from hfpaged.text.detokenizer import Detokenizer

DEFAULT_TEMPERATURE = 1.0
# Below this, scores divided by it leave the range of float32; the limit is the likeliest token anyway.
GREEDY_BELOW = 1e-5
SEED_STEP = 0x9E3779B97F4A7C15
SEED_MASK = (1 << 64) - 1
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
        num_tokens: generated so far, as far as the text goes.
        first_token_at, last_token_at: seconds of `time.perf_counter()`.
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


def submit_options(body: SamplingBody, info: ModelInfo, max_new_tokens: int, choice: int) -> dict[str, Any]:
    """Keywords of `EngineClient.submit` for one choice."""
    options: dict[str, Any] = {"max_new_tokens": max_new_tokens}
    if body.min_tokens:
        if body.min_tokens > max_new_tokens:
            raise ApiError(400, f"min_tokens is more than the {max_new_tokens} tokens allowed", param="min_tokens")
        options["min_new_tokens"] = body.min_tokens
    if body.ignore_eos:
        options["eos_token_id"] = -1
    penalty = body.repetition_penalty or info.defaults.get("repetition_penalty")
    options["repetition_penalty"] = float(penalty or 1.0)
    temperature = _first(body.temperature, info.defaults.get("temperature"), DEFAULT_TEMPERATURE)
    options["do_sample"] = temperature >= GREEDY_BELOW
    if options["do_sample"]:
        options["temperature"] = float(temperature)
        options["top_p"] = float(_first(body.top_p, info.defaults.get("top_p"), 1.0))
        options["top_k"] = _first(body.top_k, info.defaults.get("top_k"), 0)
        min_p = _first(body.min_p, info.defaults.get("min_p"), 0.0)
        if min_p:
            options["min_p"] = float(min_p)
    return {**options, "hfpaged": _extras(body, info, choice)}


def _extras(body: SamplingBody, info: ModelInfo, choice: int) -> dict[str, Any]:
    seed = secrets.randbits(63) if body.seed is None else (body.seed + choice * SEED_STEP) & SEED_MASK
    extras: dict[str, Any] = {"seed": seed, "cache_salt": body.cache_salt}
    for name in ("presence_penalty", "frequency_penalty"):
        if getattr(body, name):
            extras[name] = float(getattr(body, name))
    if body.logit_bias:
        bias = {int(token): value for token, value in body.logit_bias.items()}
        if max(bias) >= info.output_size:
            raise ApiError(
                400, f"token {max(bias)} is outside the vocabulary of {info.output_size}", param="logit_bias"
            )
        extras["logit_bias"] = bias
    return extras


def room_for(prompt_len: int, wanted: int | None, default: int | None, info: ModelInfo) -> int:
    """How many tokens a prompt's answer may have.

    Args:
        wanted: what the client asked for, which must fit.
        default: if it asked for nothing; None: all there is room for.

    Raises:
        ApiError: the prompt, or the prompt and what was asked for, is too long.
    """
    longest = longest_sequence(info)
    room = longest - prompt_len
    if room < 1 or (wanted or 1) > room:
        asked = f" and max_tokens={wanted}" if wanted else ""
        raise ApiError(
            400,
            f"{prompt_len} prompt tokens{asked} are more than the {longest} tokens that there is room for",
            param="max_tokens" if room >= 1 else "prompt",
            code="context_length_exceeded",
        )
    return wanted or min(room, default or room)


def longest_sequence(info: ModelInfo) -> int:
    """Tokens of the longest sequence that model and pool allow."""
    return min(info.max_length or info.capacity_tokens, info.capacity_tokens)


def make_detokenizer(tokenizer: PreTrainedTokenizerBase, body: SamplingBody, keep_special: bool) -> Detokenizer:
    """For one text of this request."""
    return Detokenizer(tokenizer, skip_special_tokens=not keep_special, stop_strings=body.stop_strings)


def _first(*values: Any) -> Any:
    return next(value for value in values if value is not None)
