"""Workspace: all that exists between an engine's first request and its release. Attention backend, KV pool, books."""

from __future__ import annotations

import weakref
from collections import deque
from dataclasses import replace
from typing import NamedTuple

from hfpaged.config import EngineConfig
from hfpaged.core.block_pool import BlockPool
from hfpaged.core.preemption import PreemptionPolicy
from hfpaged.core.prefix_cache import PrefixCache
from hfpaged.core.scheduler import Scheduler, SchedulerLimits
from hfpaged.fusion.catalogue import FUSIONS
from hfpaged.fusion.flashinfer_catalogue import FLASHINFER_FUSIONS
from hfpaged.fusion.product_catalogue import QUANTIZED_PRODUCTS
from hfpaged.fusion.registry import FusionRegistry
from hfpaged.runtime.adapters import AdapterRows
from hfpaged.runtime.attention.interface import AheadBackend, AttentionBackend
from hfpaged.runtime.attention.select import choose_backend
from hfpaged.runtime.block_store import HostBlockStore
from hfpaged.runtime.device.ahead_tier import AheadTier
from hfpaged.runtime.device.launched_step import LaunchedStep
from hfpaged.runtime.device.step_launcher import StepLauncher
from hfpaged.runtime.kv_cache import KVCache
from hfpaged.runtime.latent import expand_latents, keep_latents
from hfpaged.runtime.module_tier import ModuleTier
from hfpaged.runtime.paged_attention import SeenLayer
from hfpaged.runtime.pool_size import pool_size
from hfpaged.runtime.released_weights import ReleasedWeights
from hfpaged.runtime.request_spec import RequestSpec
from hfpaged.runtime.runner import Runner, probe_layers
from hfpaged.runtime.thread_state import ThreadState
from hfpaged.runtime.tier_choice import build_module_tier, choose_tier, most_drawn_ahead
from hfpaged.runtime.view import EngineView

# An unmeasured machine: one token of compute costs about as much as moving sixteen blocks to the host and back.
SWAP_COST_PER_BLOCK = 1.0
COMPUTE_COST_PER_TOKEN = 16.0


class Workspace:
    """Built under the thread state of the first request; a request under another one needs another workspace.

    Args:
        fuses: whether fused code may run.

    Attributes:
        fusions: the guards of all fused operations, and what they refused.
        adapters: chooses a LoRA adapter for each token of a step; None where all requests have the active one. Requests
            of the two kinds do not share a workspace.
        launcher: launches steps ahead of a device that works behind the host; None where each step is waited for.
        in_flight: launched steps whose tokens have not been read, oldest first: two at most.
    """

    def __init__(
        self,
        view: EngineView,
        config: EngineConfig,
        state: ThreadState,
        mixes_adapters: bool = False,
        fuses: bool = True,
    ):
        if mixes_adapters:
            config = replace(config, tier="modules", packed_only=False)
        self._config = config
        self.view = view
        self.state = state
        self.backend, self.rejected_backends, seen, self._keeps_latents = _choose_attention(view, state, config)
        self.bytes_per_block = KVCache.bytes_per_block(self.backend, seen)
        num_blocks = pool_size(config, view.model.device, self.bytes_per_block)
        self.store = HostBlockStore(capacity=num_blocks)
        is_ahead = isinstance(self.backend, AheadBackend)
        self.cache = KVCache(self.backend, seen, num_blocks, spare_blocks=1 if is_ahead else 0)
        view.step.bind(self.backend, self.cache.layers)
        self.fusions = FusionRegistry((*FUSIONS, *FLASHINFER_FUSIONS, *QUANTIZED_PRODUCTS))
        self.tier, self.tier_reason = choose_tier(
            config, view, self.backend, self.cache, state, self.fusions if fuses else None
        )
        if is_ahead and mixes_adapters:
            self.tier.captured.forbid("each token goes through the adapter of its own request")
        self.released = ReleasedWeights()
        # Where the model itself was dropped, what else holds its parameters must not find them empty.
        weakref.finalize(self, self.released.restore).atexit = False
        self.runner = Runner(self.tier, self.cache, self.store, config.block_size)
        self.launcher = StepLauncher(self.backend.accelerator, most_drawn_ahead(config)) if is_ahead else None
        self.in_flight: deque[LaunchedStep] = deque()
        self.pool = BlockPool(num_blocks, config.block_size)
        self.prefix_cache = PrefixCache(self.pool)
        self.scheduler = _new_scheduler(config, self.pool, self.prefix_cache, self.store)
        # The last thing that can go wrong has not: nobody would remove these hooks from the view.
        self.adapters = AdapterRows(view.model) if mixes_adapters else None

    def release_weights(self) -> bool:
        """Give up the memory of the parameters that the tier has packed. Returns whether any was."""
        return self.released.release(self.view.model, self.tier.packed_matrices())

    def close(self) -> None:
        """Give the model back what was taken from it, and drop the references to the pool."""
        self.released.restore()
        self.tier.close()
        if self.adapters is not None:
            self.adapters.remove()
        expand_latents(self.view)
        self.view.step.unbind()

    def suits(self, spec: RequestSpec) -> bool:
        """Whether a request may share steps with those that are here."""
        return self.state == spec.thread_state and (self.adapters is not None) == (spec.adapter is not None)

    def plain_tier(self, view: EngineView) -> ModuleTier | AheadTier:
        """The modules of another view of the same model, nothing fused, over this workspace's keys and values."""
        self.released.restore()
        if self._keeps_latents:
            keep_latents(view, self.backend)
        probe_layers(view, self.state)
        view.step.bind(self.backend, self.cache.layers)
        return build_module_tier(self._config, view, self.backend, self.cache, self.state, None)

    def switch_to(self, view: EngineView, tier: ModuleTier | AheadTier, reason: str) -> None:
        """Go on with another tier. The keys and values stay."""
        self.view.step.unbind()
        self.tier.close()
        self.view, self.tier, self.tier_reason = view, tier, reason
        self.runner.switch_to(tier)


class _AttentionChoice(NamedTuple):
    """What computes attention, why not what would have been preferred, the layers, and whether they keep latents."""

    backend: AttentionBackend
    rejected: dict[str, str]
    layers: list[SeenLayer]
    keeps_latents: bool


def _choose_attention(view: EngineView, state: ThreadState, config: EngineConfig) -> _AttentionChoice:
    # A workspace that failed to be built may have left them.
    expand_latents(view)
    layers = probe_layers(view, state)
    backend, rejected = choose_backend(
        config.attention_backend,
        view.model.device,
        layers[0].dtype,
        [layer.shape for layer in layers],
        config.block_size,
    )
    keeps_latents = keep_latents(view, backend)
    if keeps_latents:
        layers = probe_layers(view, state)
    return _AttentionChoice(backend, rejected, layers, keeps_latents)


def _new_scheduler(
    config: EngineConfig, pool: BlockPool, prefix_cache: PrefixCache, store: HostBlockStore
) -> Scheduler:
    policy = PreemptionPolicy(config.preemption, COMPUTE_COST_PER_TOKEN, SWAP_COST_PER_BLOCK, can_store=store.can_store)
    return Scheduler(pool, prefix_cache, SchedulerLimits(config.max_batch_tokens, config.max_requests), policy)
