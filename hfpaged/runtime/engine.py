"""EngineCore: the engine of one patched model, as other threads see it. Every call goes to the stepping thread."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

from transformers import PreTrainedModel

from hfpaged.config import EngineConfig
from hfpaged.runtime.driver import Driver
from hfpaged.runtime.handle import GenerationHandle
from hfpaged.runtime.request_spec import RequestSpec
from hfpaged.runtime.stats import EngineCounters, EngineSnapshot, engine_stats
from hfpaged.runtime.stepper import Stepper


class EngineCore:
    """Requests in, handles out. All methods may be called from any thread.

    Making one starts no thread, allocates no pool and touches no device.
    """

    def __init__(self, model: PreTrainedModel, original_class: type[PreTrainedModel], config: EngineConfig):
        self.config = config
        self.counters = EngineCounters()
        self._ids = itertools.count()
        # Named, so that no function of the driver refers to this object: the model would wait for the collector.
        self._stepper = stepper = Stepper(model, original_class, config, self.counters)
        self._driver = Driver(stepper.step, lambda: bool(stepper.live), stepper.give_up, stepper.requests.abandon)

    def submit_specs(self, specs: Sequence[RequestSpec]) -> list[GenerationHandle]:
        """Queue the rows of one call together and return their handles in order.

        Raises:
            RequestTooLargeError: one of them could never fit the pool; none is queued.
        """
        self._require_fits(specs)
        handles = [GenerationHandle(next(self._ids), len(spec.prompt), self._cancel_one) for spec in specs]
        self._driver.post(lambda: self._stepper.admit(specs, handles))
        return handles

    def feed(self, tokens: Sequence[tuple[GenerationHandle, list[int] | None]], logits_for: int = 1) -> None:
        """Give steered requests their next tokens; None ends one.

        Args:
            logits_for: how many of the last tokens get logits. All requests must have taken their last ones.
        """
        self._driver.post(lambda: self._stepper.requests.feed(tokens, logits_for))

    def fork(self, handles: Sequence[GenerationHandle]) -> list[GenerationHandle]:
        """Copies of steered requests that have taken their logits: each shares all its original's blocks."""
        children = [GenerationHandle(next(self._ids), handle.prompt_len, self._cancel_one) for handle in handles]
        self._driver.post(lambda: self._stepper.requests.fork(handles, children))
        return children

    def rollback(self, handles: Sequence[GenerationHandle], count: int) -> None:
        """Forget the last `count` tokens of steered requests that have taken their logits."""
        self._driver.post(lambda: self._stepper.requests.rollback(handles, count))

    def cancel(self, handles: Sequence[GenerationHandle]) -> None:
        """End those that still run; their blocks are free within a step."""
        running = [handle for handle in handles if not handle.done]
        # An iterator may be closed by the garbage collection at the exit of the process, when nothing runs any more.
        if running and not self._driver.ended:
            self._driver.post(lambda: self._stepper.requests.end(running, "cancelled"))

    def live_model(self) -> PreTrainedModel:
        """The patched model.

        Raises:
            EngineReleasedError: it has been garbage collected.
        """
        return self._stepper.workspaces.live_model()

    def check(self) -> None:
        """Raise `InvariantError` if the block books are inconsistent. Runs between two steps."""
        self._driver.call(self._stepper.check)

    def reset_prefix_cache(self) -> None:
        """Forget all cached prefixes. Running requests are not disturbed."""
        self._driver.call(self._stepper.drop_prefixes)

    def weights_changed(self) -> None:
        """Say that the weights changed: needed with `weights="frozen"` only."""
        self._driver.call(self._stepper.on_weights_changed)

    def capture_ahead(self) -> int:
        """Capture the steps that requests like the last ones will need. Returns how many; 0 where none ever are."""
        return self._driver.call(self._stepper.capture_ahead)

    def release(self) -> None:
        """Free the KV pool and everything made from the weights; the next request builds them again.

        Requests that still run end with `EngineReleasedError`.
        """
        if self._stepper.workspaces or self._stepper.live:
            self._driver.call(self._stepper.release)

    def stats(self) -> dict[str, Any]:
        """Gauges and counters by name. Cheap; consistent with each other only while nothing runs."""
        return engine_stats(self.counters, list(self._stepper.workspaces))

    def snapshot(self, max_blocks: int = 4096, max_requests: int = 64) -> EngineSnapshot:
        """Which request holds which blocks, as plain data. Taken between two steps, so it waits for at most one.

        Args:
            max_blocks: blocks to tell about, the first by id; low ids are used first.
            max_requests: requests to tell about, running ones first.
        """
        if not self._stepper.workspaces:
            return EngineSnapshot(self.stats(), ())
        return self._driver.call(
            lambda: EngineSnapshot(self.stats(), self._stepper.snapshot_books(max_blocks, max_requests))
        )

    def add_listener(self, listener: Callable[[], None]) -> None:
        """Have `listener` called on the stepping thread whenever handles may have news. It must not block or raise."""
        self._driver.listeners.append(listener)

    def _require_fits(self, specs: Sequence[RequestSpec]) -> None:
        workspace = self._stepper.workspaces.current
        if workspace is None:
            workspace = self._driver.call(lambda: self._stepper.prepare(specs[0]))
        for spec in specs:
            workspace.pool.require_room(spec.max_tokens)

    def _cancel_one(self, handle: GenerationHandle) -> None:
        self.cancel([handle])
