"""EngineConfig: every knob of the engine, validated once."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any, Literal

from hfpaged.errors import ConfigError
from hfpaged.native.kv_layout import TILE_TOKENS

PREEMPTION = ("auto", "swap", "recompute")
WEIGHTS = ("watch", "frozen")
ON_UNSUPPORTED = ("raise", "stock")
TIERS = ("auto", "program", "leaves", "modules")


@dataclass(frozen=True)
class EngineConfig:
    """Options of `patch(model, **options)`.

    Attributes:
        block_size: tokens per KV block.
        num_blocks: size of the KV pool in blocks. None: from `kv_memory_gib`.
        kv_memory_gib: memory the pool may grow to, in GiB. None: a quarter of what is free at the first request.
        max_batch_tokens: most tokens (prompt chunks and decodes together) in one step.
        max_requests: most requests in one step.
        prefix_caching: share the KV blocks of equal prefixes, within and across calls.
        preemption: what happens to a request that must give its blocks back: "swap" them to the host, "recompute"
            them later, or "auto", whichever is cheaper.
        attention_backend: "auto", or the name of one ("flashinfer", "triton", "native", "torch").
        weights: "watch" fingerprints the weights at each call that finds the engine idle; "frozen" promises that
            they never change.
        release_after_call: free the KV pool as soon as no request is running (training loops).
        on_unsupported: what `generate` does with a call the engine cannot take for a reason of the model's
            own making: "stock" runs Transformers' own code, counted in `engine.stats()`; "raise" says so.
        tier: how a step is executed: "program" compiles the decoder into one native program (CPU), "leaves" runs the
            model's own layers with native linear modules, norms, MLPs and attention (CPU), "modules" runs the model's
            own forward around paged attention, "auto" takes the first of these that the model allows.
        packed_only: give up the memory of the parameters whose packed copies serve the engine, until something else
            asks for their numbers. For inference on the tiers "program" and "leaves".
        sentinel: have the model's own modules compute steps again whose logits are not finite, or that have a request
            begin with one token eight times. None: for quantized models.
    """

    block_size: int = 16
    num_blocks: int | None = None
    kv_memory_gib: float | None = None
    max_batch_tokens: int = 512
    max_requests: int = 256
    prefix_caching: bool = True
    preemption: Literal["auto", "swap", "recompute"] = "auto"
    attention_backend: str = "auto"
    weights: Literal["watch", "frozen"] = "watch"
    release_after_call: bool = False
    on_unsupported: Literal["raise", "stock"] = "stock"
    tier: Literal["auto", "program", "leaves", "modules"] = "auto"
    packed_only: bool = False
    sentinel: bool | None = None

    def __post_init__(self) -> None:
        for name in ("block_size", "max_batch_tokens", "max_requests"):
            _require_positive_int(name, getattr(self, name))
        if self.num_blocks is not None:
            _require_positive_int("num_blocks", self.num_blocks)
        if self.kv_memory_gib is not None and not (_is_number(self.kv_memory_gib) and 0 < self.kv_memory_gib < 1 << 20):
            raise ConfigError(f"kv_memory_gib must be a positive number of GiB, got {self.kv_memory_gib!r}")
        for name in ("prefix_caching", "release_after_call", "packed_only"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{name} must be True or False, got {getattr(self, name)!r}")
        if self.sentinel not in (None, True, False):
            raise ConfigError(f"sentinel must be True, False or None, got {self.sentinel!r}")
        _require_choice("preemption", self.preemption, PREEMPTION)
        _require_choice("weights", self.weights, WEIGHTS)
        _require_choice("on_unsupported", self.on_unsupported, ON_UNSUPPORTED)
        _require_choice("tier", self.tier, TIERS)
        if not isinstance(self.attention_backend, str):
            raise ConfigError(f"attention_backend must be a name, got {self.attention_backend!r}")
        if self.packed_only:
            self._require_packed_tier_possible()

    def _require_packed_tier_possible(self) -> None:
        """Refuse what no model could run on packed weights with; `choose_tier` refuses the rest."""
        if self.tier == "modules":
            raise ConfigError("packed_only needs packed weights, which tier='modules' does not have")
        if self.attention_backend not in ("auto", "native"):
            raise ConfigError(f"packed_only needs the native attention backend, not {self.attention_backend!r}")
        if self.block_size % TILE_TOKENS:
            raise ConfigError(
                f"packed_only needs a block_size that is a multiple of {TILE_TOKENS}, got {self.block_size}"
            )

    @classmethod
    def from_options(cls, options: dict[str, Any]) -> EngineConfig:
        """Build a config from keyword options, refusing names that do not exist."""
        known = {field.name for field in fields(cls)}
        unknown = sorted(set(options) - known)
        if unknown:
            raise ConfigError(f"unknown engine option(s) {', '.join(unknown)}; known: {', '.join(sorted(known))}")
        return replace(cls(), **options)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _require_positive_int(name: str, value: Any) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(f"{name} must be a positive integer, got {value!r}")


def _require_choice(name: str, value: Any, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ConfigError(f"{name} must be one of {', '.join(choices)}, got {value!r}")
