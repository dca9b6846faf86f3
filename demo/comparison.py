"""A comparison: the same prompts on the engine, all at once, and then on stock code with the same weights."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import uuid
from collections.abc import AsyncIterator, Callable, Sequence

import hfpaged
from hfpaged.demo import stock_run
from hfpaged.demo.host import Host
from hfpaged.demo.lane import Lane, Track
from hfpaged.errors import InputError, RequestCancelled
from hfpaged.runtime.handle import GenerationHandle

MOST_PROMPTS = 32
SECONDS_BETWEEN_UPDATES = 0.1
ONE_BY_ONE, AS_BATCH = "one after another", "as one padded batch"
_STOCK_RUNS: dict[str, Callable[..., None]] = {
    ONE_BY_ONE: stock_run.run_one_by_one,
    AS_BATCH: stock_run.run_as_batch,
}


class Comparison:
    """Runs once, over `run()`; readable at any time.

    Attributes:
        prompts: texts as typed.
        ours, stock: the two sides.
        equal: for each prompt, whether both sides gave the same tokens; None as long as that is open.
        others: whether somebody else used the engine meanwhile, so that the times mean less.
        stopped: whether it was ended early.

    Raises:
        InputError: no prompt, or too many.
    """

    def __init__(self, host: Host, prompts: Sequence[str], shared: str, new_tokens: int, stock_mode: str):
        if not 0 < len(prompts) <= MOST_PROMPTS:
            raise InputError(f"write 1 to {MOST_PROMPTS} prompts, one a line; there are {len(prompts)}")
        self.prompts = list(prompts)
        self.ours = Lane("hfpaged, all at once")
        self.stock = Lane(f"stock, {stock_mode}")
        self.equal: list[bool | None] = [None] * len(prompts)
        self.others = False
        self.stopped = False
        self._host = host
        self._new_tokens = new_tokens
        self._run_stock = _STOCK_RUNS[stock_mode]
        texts = [f"{shared.strip()}\n\n{prompt}".strip() for prompt in prompts]
        self._ids = [host.chat_prompt([{"role": "user", "content": text}], new_tokens).ids for text in texts]

    @property
    def done(self) -> bool:
        """Whether it has come to its end."""
        return self.stopped or all(same is not None for same in self.equal)

    async def run(self, scope: hfpaged.CancelScope) -> AsyncIterator[Comparison]:
        """Yields itself whenever there is something new to see, a few times a second."""
        async for _ in self._run_ours(scope):
            yield self
        if not self.stopped:
            async for _ in self._run_theirs(scope):
                yield self
        yield self

    # ---- our side ----

    async def _run_ours(self, scope: hfpaged.CancelScope) -> AsyncIterator[None]:
        # Its own salt: what others asked before must not give this side a cached beginning.
        request = {"scope": scope, "cache_salt": uuid.uuid4().hex}
        options = {"max_new_tokens": self._new_tokens, "do_sample": False, "hfpaged": request}
        self.ours.start(self._host.tokenizer, len(self._ids))
        handles = [self._host.engine.submit(ids, **options) for ids in self._ids]
        readers = [
            asyncio.ensure_future(_read(handle, track)) for handle, track in zip(handles, self.ours.tracks, strict=True)
        ]
        try:
            while not self.ours.done:
                await asyncio.wait(readers, timeout=SECONDS_BETWEEN_UPDATES)
                self._look_for_others()
                yield
            for reader in readers:
                reader.result()
        finally:
            for reader in readers:
                reader.cancel()
        self.stopped = any(handle.finish_reason == "cancelled" for handle in handles)

    # ---- stock's side ----

    async def _run_theirs(self, scope: hfpaged.CancelScope) -> AsyncIterator[None]:
        stop = threading.Event()
        twin = self._host.stock_twin()
        await asyncio.to_thread(stock_run.warm_up, twin, self._ids[0][:8])
        self.stock.start(self._host.tokenizer, len(self._ids))
        work = asyncio.ensure_future(asyncio.to_thread(self._run_and_compare, twin, stop))
        try:
            while not work.done():
                await asyncio.wait([work], timeout=SECONDS_BETWEEN_UPDATES)
                if scope.cancelled:
                    stop.set()
                    self.stopped = True
                self._look_for_others()
                yield
            work.result()
        finally:
            stop.set()

    def _run_and_compare(self, twin: object, stop: threading.Event) -> None:
        self._run_stock(twin, self._ids, self._new_tokens, self.stock, stop)
        for index, (ours, theirs) in enumerate(zip(self.ours.tracks, self.stock.tracks, strict=True)):
            if stop.is_set():
                return
            same = ours.tokens == theirs.tokens
            if not same and self._run_stock is stock_run.run_as_batch:
                # Padding changes stock's own rounding; what counts is what it gives for the prompt alone.
                same = ours.tokens == stock_run.alone(twin, self._ids[index], self._new_tokens)
            self.equal[index] = same

    def _look_for_others(self) -> None:
        self.others = self.others or self._host.visitors.num_served > 1


async def _read(handle: GenerationHandle, track: Track) -> None:
    with contextlib.suppress(RequestCancelled):
        async for token in handle:
            track.add(token)
    track.finish()
