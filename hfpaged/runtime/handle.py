"""GenerationHandle: a caller's end of one request. The stepping thread fills it, any thread reads it."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Sequence

import torch

from hfpaged.errors import EngineDeadError, RequestCancelled
from hfpaged.runtime.token_iterators import AsyncTokenIterator, TokenIterator
from hfpaged.sampling.logprobs import TokenLogprob


class GenerationHandle:
    """Iterate over it (`for` or `async for`) to get token ids as they are drawn, or call `result()`.
    Closing such an iterator (`close()` or `aclose()`) cancels the request; leaving the loop does not.

    Attributes:
        request_id: unique within the engine, ascending in order of submission.
        prompt_len: tokens of the prompt.
        tokens: new token ids so far. Grows; read it freely.
        scores: processed scores a token, fp32 [V] each; only if asked for.
        logits: raw logits a token, fp32 [V] each; only if asked for.
        logprobs: a `TokenLogprob` a new token, there as soon as the token is; only if asked for.
        prompt_logprobs: a `TokenLogprob` a token of the prompt, and None for the first, which nothing comes before;
            complete when the first new token is there; only if asked for.
        finish_reason: None while running, then "stop" (end of sequence, stop string or another criterion), "length",
            "cancelled" or "error".
        submitted_at, started_at: seconds of `time.perf_counter()` when it was submitted, and when it first took part
            in a step; the latter is None while it waits.
    """

    def __init__(self, request_id: int, prompt_len: int, on_cancel: Callable[[GenerationHandle], None]):
        self.request_id = request_id
        self.prompt_len = prompt_len
        self.tokens: list[int] = []
        self.scores: list[torch.Tensor] = []
        self.logits: list[torch.Tensor] = []
        self.logprobs: list[TokenLogprob] = []
        self.prompt_logprobs: list[TokenLogprob | None] = []
        self.finish_reason: str | None = None
        self.submitted_at = time.perf_counter()
        self.started_at: float | None = None
        self._error: BaseException | None = None
        self._on_cancel = on_cancel
        # Two conditions of one lock, so that whoever waits for the end is not woken by every token.
        self._lock = threading.RLock()
        self._changed, self._ended = threading.Condition(self._lock), threading.Condition(self._lock)
        self._num_waiting = 0  # threads, for `_changed`
        self._async_waiters: list[tuple[asyncio.AbstractEventLoop, asyncio.Future]] = []
        self._next_logits: torch.Tensor | None = None
        self._is_abandoned = False

    # ---- for callers ----

    @property
    def done(self) -> bool:
        """Whether the request has ended, in whatever way."""
        return self.finish_reason is not None

    @property
    def error(self) -> BaseException | None:
        """What ended the request in error, if something did."""
        return self._error

    def result(self, timeout: float | None = None) -> list[int]:
        """Wait for the end and return the new token ids.

        Raises:
            RequestCancelled: it was cancelled.
            TimeoutError: it did not end within `timeout` seconds (it goes on).
            EngineDeadError: the process is exiting, so it will not end.
            Exception: whatever ended it in error.
        """
        if not self._wait_for(self._ended, lambda: self.done, timeout):
            raise TimeoutError(f"the request has not finished within {timeout} s")
        self._raise_if_failed()
        return list(self.tokens)

    def cancel(self) -> None:
        """End the request; its blocks are free within a step. Does nothing if it has ended."""
        if not self.done:
            self._on_cancel(self)

    def __iter__(self) -> TokenIterator:
        return TokenIterator(self)

    def __aiter__(self) -> AsyncTokenIterator:
        return AsyncTokenIterator(self)

    def wait_for_token(self, index: int) -> int | None:
        """Wait for the new token number `index`; None if the request ended before it.

        Raises:
            RequestCancelled, Exception: as `result()`, after the last token.
        """
        self._wait_for(self._changed, lambda: self.done or len(self.tokens) > index)
        if len(self.tokens) > index:
            return self.tokens[index]
        self._raise_if_failed()
        return None

    async def tokens_after(self, read: int) -> list[int]:
        """Wait until there are more than `read` tokens and return all beyond; nothing once the request has ended.

        Raises:
            RequestCancelled, Exception: as `result()`, after the last token.
        """
        while len(self.tokens) == read and not self.done:
            await self._wait_async(read)
        tokens = self.tokens[read:]
        if not tokens:
            self._raise_if_failed()
        return tokens

    def take_logits(self) -> torch.Tensor | None:
        """Of a steered request: wait for the logits of its last tokens, as many as were asked for.

        Returns:
            fp32 [k, V]; None once it has been ended.

        Raises:
            Exception: whatever ended the request in error.
        """
        self._wait_for(self._changed, lambda: self.done or self._next_logits is not None)
        logits = self.poll_logits()
        if logits is None:
            self._raise_if_failed()
        return logits

    # ---- for the stepping thread ----

    def poll_logits(self) -> torch.Tensor | None:
        """As `take_logits`, for a caller that steps the engine itself: None if they are not there (yet)."""
        with self._lock:
            logits, self._next_logits = self._next_logits, None
        return logits

    def begin(self, at: float) -> None:
        """The request takes part in a step that began at this time. Only the first one counts."""
        if self.started_at is None:
            self.started_at = at

    def add_prompt_logprobs(self, logprobs: Sequence[TokenLogprob | None]) -> None:
        """More of the prompt's tokens were scored."""
        self.prompt_logprobs += logprobs

    def push(
        self,
        tokens: Sequence[int],
        logprobs: Sequence[TokenLogprob] = (),
        scores: Sequence[torch.Tensor] = (),
        logits: Sequence[torch.Tensor] = (),
    ) -> None:
        """Tokens were drawn. What goes with them is there for each of them, or not at all."""
        self.logprobs += logprobs
        self.scores += scores
        self.logits += logits
        self.tokens += tokens
        # Tokens come far more often than somebody waits for one. Whoever waits says so before looking for tokens.
        if self._num_waiting or self._async_waiters:
            with self._lock:
                self._notify()

    def restart(self) -> None:
        """What was drawn was wrong: drop it. Readers that have taken tokens already go on behind as many new ones."""
        with self._lock:
            for drawn in (self.tokens, self.scores, self.logits, self.logprobs):
                drawn.clear()
            del self.prompt_logprobs[:]

    def offer_logits(self, logits: torch.Tensor) -> None:
        """The logits of a steered request's last tokens, fp32 [k, V], are there."""
        with self._lock:
            self._next_logits = logits
            self._notify()

    def finish(self, reason: str, error: BaseException | None = None) -> None:
        """The request ended. Only the first end counts."""
        with self._lock:
            if not self.done:
                self._error, self.finish_reason = error, reason
                self._ended.notify_all()
                self._notify()

    def abandon(self) -> None:
        """The process is exiting: no token will come any more."""
        self._is_abandoned = True

    def _notify(self) -> None:
        self._changed.notify_all()
        waiters, self._async_waiters = self._async_waiters, []
        for loop, future in waiters:
            try:
                loop.call_soon_threadsafe(_wake, future)
            except RuntimeError:
                # That reader's event loop is closed: nobody waits there any more.
                continue

    async def _wait_async(self, read: int) -> None:
        loop = asyncio.get_running_loop()
        future = loop.create_future()
        waiter = (loop, future)
        with self._lock:
            self._async_waiters.append(waiter)
            if self.done or len(self.tokens) > read:
                self._async_waiters.remove(waiter)
                return
            self._require_hope()
        await future

    def _wait_for(self, news: threading.Condition, predicate: Callable[[], bool], timeout: float | None = None) -> bool:
        """Wait until `predicate()` holds, which `news` tells of, or `timeout` seconds. Returns whether it does."""
        with self._lock:
            self._num_waiting += news is self._changed
            try:
                if predicate():
                    return True
                self._require_hope()
                return news.wait_for(predicate, timeout)
            finally:
                self._num_waiting -= news is self._changed

    def _require_hope(self) -> None:
        """Raise EngineDeadError rather than have an exit handler wait for ever.

        A daemon thread may wait: it ends with the process, and if it ran on, what it frees could make that abort.
        """
        if self._is_abandoned and not threading.current_thread().daemon:
            raise EngineDeadError("the request has not ended, and the process is exiting")

    def _raise_if_failed(self) -> None:
        if self._error is not None:
            raise self._error
        if self.finish_reason == "cancelled":
            raise RequestCancelled("the request was cancelled")


def _wake(future: asyncio.Future) -> None:
    if not future.done():
        future.set_result(None)
