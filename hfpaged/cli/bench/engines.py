"""The engines that a benchmark compares, all on the same loaded model and all greedy."""

from __future__ import annotations

import asyncio
import inspect
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from transformers import ContinuousBatchingConfig, GenerationConfig, PreTrainedModel

import hfpaged
from hfpaged.cli.bench.latency import TokenTimes
from hfpaged.cli.bench.workload import BenchRequest
from hfpaged.errors import HfpagedError
from hfpaged.runtime.handle import GenerationHandle

# No token has this id, so a request ends by its length alone.
NEVER_ENDS = -1

WARM_UP = (BenchRequest([5, 6, 7], 4),)


class EngineFailure(HfpagedError):
    """An engine lost a request, or generated another number of tokens than asked."""


class Engine(ABC):
    """One way to run a workload. `with engine:` surrounds its turn; only `run` is timed.

    Attributes:
        watches_tokens: set it to have `token_times` filled where the engine hands out tokens one by one, which costs it
            a little time.
        token_times: of the requests of the last run, in their order; empty where nobody watched.
    """

    name: str

    def __init__(self, model: PreTrainedModel):
        self.model = model
        self.watches_tokens = False
        self.token_times: list[TokenTimes] = []

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def warm_up(self, work: Sequence[BenchRequest]) -> None:
        """What comes before a timed run of `work`: whatever is slow once only."""
        self.run(WARM_UP)

    @abstractmethod
    def run(self, work: Sequence[BenchRequest]) -> list[int]:
        """Run all requests; returns the number of tokens generated for each, in their order."""

    def stats(self) -> dict[str, Any]:
        """What to report beside the time."""
        return {}


class Hfpaged(Engine):
    """This package: every request submitted at once to the engine of the patched model."""

    name = "hfpaged"

    def __init__(self, model: PreTrainedModel, tier: str = "auto"):
        super().__init__(model)
        self._tier = tier
        if tier != "auto":
            self.name = f"hfpaged, {tier}"

    def __enter__(self) -> Engine:
        hfpaged.patch(self.model, tier=self._tier)
        return self

    def __exit__(self, *_: object) -> None:
        hfpaged.unpatch(self.model)

    def warm_up(self, work: Sequence[BenchRequest]) -> None:
        """All of it once, then its prefixes are forgotten: what is timed does not wait for untouched memory."""
        self.run(work)
        hfpaged.engine(self.model).reset_prefix_cache()

    def run(self, work: Sequence[BenchRequest]) -> list[int]:
        engine = hfpaged.engine(self.model)
        handles = [
            engine.submit(
                request.prompt_token_ids,
                max_new_tokens=request.max_new_tokens,
                do_sample=False,
                eos_token_id=NEVER_ENDS,
            )
            for request in work
        ]
        if self.watches_tokens:
            self.token_times = asyncio.run(_watch(handles))
        return [len(handle.result()) for handle in handles]

    def stats(self) -> dict[str, Any]:
        return hfpaged.engine(self.model).stats()


async def _watch(handles: Sequence[GenerationHandle]) -> list[TokenTimes]:
    async def times_of(handle: GenerationHandle) -> TokenTimes:
        times = TokenTimes(handle.submitted_at)
        while tokens := await handle.tokens_after(len(times.arrivals)):
            times.arrivals += [time.perf_counter()] * len(tokens)
        return times

    return await asyncio.gather(*map(times_of, handles))


class HfStatic(Engine):
    """Transformers' generate() on one left-padded batch of all requests, as long as the longest answer."""

    name = "hf-static"

    def run(self, work: Sequence[BenchRequest]) -> list[int]:
        width = max(len(request.prompt_token_ids) for request in work)
        longest = max(request.max_new_tokens for request in work)
        ids = torch.full((len(work), width), self.model.config.pad_token_id or 0)
        mask = torch.zeros_like(ids)
        for row, request in enumerate(work):
            start = width - len(request.prompt_token_ids)
            ids[row, start:] = torch.tensor(request.prompt_token_ids)
            mask[row, start:] = 1
        device = self.model.device
        out = self.model.generate(
            ids.to(device),
            attention_mask=mask.to(device),
            max_new_tokens=longest,
            min_new_tokens=longest,
            do_sample=False,
        )
        return [min(out.shape[1] - width, request.max_new_tokens) for request in work]


class HfContinuousBatching(Engine):
    """Transformers' own continuous batching, with pages as small as a CPU needs and enough of them for the workload."""

    name = "hf-cb"

    PAGE_TOKENS = 16
    MAX_PAGES = 8192
    POLL_SECONDS = 5

    def run(self, work: Sequence[BenchRequest]) -> list[int]:
        manager = self.model.init_continuous_batching(
            GenerationConfig(do_sample=False, eos_token_id=NEVER_ENDS, max_new_tokens=256), self._config(work)
        )
        manager.start()
        try:
            for index, request in enumerate(work):
                manager.add_request(
                    request.prompt_token_ids, request_id=str(index), max_new_tokens=request.max_new_tokens
                )
            return self._collect(manager, len(work))
        finally:
            manager.stop()

    def _config(self, work: Sequence[BenchRequest]) -> ContinuousBatchingConfig:
        fields = {
            "num_blocks": min(64 + sum(self._pages(request) for request in work), self.MAX_PAGES),
            "max_batch_tokens": 512,
            "max_requests_per_batch": 64,
        }
        known = inspect.signature(ContinuousBatchingConfig).parameters
        # Renamed, and added, in the releases after 5.17.
        fields["page_size" if "page_size" in known else "block_size"] = self.PAGE_TOKENS
        if "auto_switch_to_flash" in known:
            fields["auto_switch_to_flash"] = False
        return ContinuousBatchingConfig(**fields)

    def _collect(self, manager: Any, count: int) -> list[int]:
        lengths: dict[int, int] = {}
        while len(lengths) < count:
            result = manager.get_result(timeout=self.POLL_SECONDS)
            if result is None:
                if not manager.is_running():
                    raise EngineFailure(f"{self.name}: the manager stopped after {len(lengths)} of {count} requests")
                continue
            if result.error:
                raise EngineFailure(f"{self.name}: request {result.request_id}: {result.error}")
            lengths[int(result.request_id)] = len(result.generated_tokens)
        return [lengths[index] for index in range(count)]

    def _pages(self, request: BenchRequest) -> int:
        # One page for a started one and one to spare, for each request.
        return (len(request.prompt_token_ids) + request.max_new_tokens) // self.PAGE_TOKENS + 2


ENGINES: dict[str, type[Engine]] = {engine.name: engine for engine in (Hfpaged, HfStatic, HfContinuousBatching)}
