"""Chooses the tier of a workspace: the fastest that its model, its attention backend and its user allow."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import NamedTuple

import torch

from hfpaged.config import EngineConfig
from hfpaged.errors import ConfigError
from hfpaged.fusion.registry import FusionRegistry
from hfpaged.program.description import NotRecognized
from hfpaged.program.program import StepProgram
from hfpaged.program.threads import usable_cpus
from hfpaged.runtime.attention.interface import AheadBackend, AttentionBackend
from hfpaged.runtime.device.ahead_tier import AheadTier
from hfpaged.runtime.kv_cache import KVCache
from hfpaged.runtime.leaf_tier import LeafTier
from hfpaged.runtime.module_tier import ModuleTier
from hfpaged.runtime.program_tier import ProgramTier
from hfpaged.runtime.thread_state import ThreadState
from hfpaged.runtime.tier import Tier
from hfpaged.runtime.view import EngineView

logger = logging.getLogger(__name__)

ASKED_FOR = "it was asked for"
FUSIONS_OFF = "the sentinel found that fused code computes something else than the modules"


class TierChoice(NamedTuple):
    """The tier in use, and why not a faster one."""

    tier: Tier
    reason: str | None


def choose_tier(
    config: EngineConfig,
    view: EngineView,
    backend: AttentionBackend,
    cache: KVCache,
    state: ThreadState,
    fusions: FusionRegistry | None,
) -> TierChoice:
    """The fastest tier that can run the model, or the one that `config.tier` names. The view's step must be bound.

    Args:
        fusions: admits what the tiers fuse, and counts what it refuses; None: nothing is fused any more.

    Raises:
        ConfigError: the named tier cannot run this model; the message says why.
    """

    def by_modules(reason: str) -> TierChoice:
        return TierChoice(build_module_tier(config, view, backend, cache, state, fusions), reason)

    if fusions is None:
        return by_modules(FUSIONS_OFF)
    if config.tier == "modules":
        return by_modules(ASKED_FOR)
    # A container's CPU quota may be less than the cores that PyTorch counts.
    threads = min(torch.get_num_threads(), usable_cpus())
    builders = {
        "program": lambda: ProgramTier(StepProgram.build(view.model, threads, fusions), cache),
        "leaves": lambda: LeafTier(view, backend, state, threads, fusions),
    }
    tier, refused = _first_that_builds(config.tier, builders, lambda: _require_native(backend, state))
    reason = "; ".join(dict.fromkeys(refused))
    if tier is not None:
        return TierChoice(tier, ASKED_FOR if config.tier == "leaves" else reason or None)
    if config.packed_only:
        raise ConfigError(f"packed_only=True needs packed weights, which this model cannot run on: {reason}")
    logger.info("hfpaged runs %s by its modules: %s", type(view.model).__name__, reason)
    return by_modules(reason)


def _first_that_builds(
    name: str, builders: dict[str, Callable[[], Tier]], check: Callable[[], None]
) -> tuple[Tier | None, list[str]]:
    """The first of the tiers that can be built, or the one of that name, and why not those before it.

    Args:
        name: a tier, or "auto".
        check: raises NotRecognized where none of them can run.

    Raises:
        ConfigError: the named tier cannot run this model; the message says why.
    """
    refused: list[str] = []
    for one, build in builders.items():
        if name not in ("auto", one):
            continue
        try:
            check()
            return build(), refused
        except NotRecognized as error:
            if name == one:
                raise ConfigError(f"tier={name!r} cannot run this model: {error.reason}") from error
            refused.append(error.reason)
    return None, refused


def build_module_tier(
    config: EngineConfig,
    view: EngineView,
    backend: AttentionBackend,
    cache: KVCache,
    state: ThreadState,
    fusions: FusionRegistry | None,
) -> ModuleTier | AheadTier:
    """The model's own modules: called step by step, or a step ahead of a device that works behind the host."""
    if not isinstance(backend, AheadBackend):
        return ModuleTier(view, backend, state)
    return AheadTier(view, backend, state, cache.num_blocks, most_drawn_ahead(config), fusions)


def most_drawn_ahead(config: EngineConfig) -> int:
    """How many tokens a step may draw on a device: one for each request, and some for forks of them."""
    return 4 * config.max_requests


def _require_native(backend: AttentionBackend, state: ThreadState) -> None:
    """What every tier but the modules' asks for beside the model."""
    if backend.name != "native":
        raise NotRecognized(f"the attention backend is {backend.name}, not native")
    if state.autocast_dtype is not None:
        raise NotRecognized("autocast is on")
