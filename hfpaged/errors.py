"""The exceptions that users of hfpaged meet. All derive from HfpagedError; a bad value is a ValueError too.

What one part of the package raises for another is defined there.
"""

from __future__ import annotations


class HfpagedError(Exception):
    """Base of all errors of this package."""


class ConfigError(HfpagedError, ValueError):
    """An EngineConfig field or a per-request option has a value that cannot work."""


class InputError(HfpagedError, ValueError):
    """A prompt, mask or token id that cannot be generated from. Raised before anything is queued."""


class UnsupportedModelError(HfpagedError):
    """The model cannot run on the paged engine.

    `reasons` lists why, one sentence each, as `hfpaged.support(model)` gives them.
    """

    def __init__(self, reasons: list[str]):
        self.reasons = list(reasons)
        super().__init__("this model cannot be patched: " + "; ".join(self.reasons))


class UnsupportedOptionError(HfpagedError, ValueError):
    """A generation option that the engine cannot honour on this path. The message names the option and the way out."""


class AlreadyPatchedError(HfpagedError):
    """`patch` was called on a patched model with other options. Call `unpatch` first."""


class NotPatchedError(HfpagedError):
    """An engine was asked for on a model that is not patched."""


class RequestTooLargeError(HfpagedError, ValueError):
    """A request that could never fit the KV pool, even alone. Carries both numbers, in blocks."""

    def __init__(self, needed: int, available: int):
        self.needed, self.available = needed, available
        super().__init__(
            f"the request needs {needed} KV blocks but the pool has {available}; "
            "ask for fewer new tokens, or raise num_blocks or kv_memory_gib"
        )


class RequestCancelled(HfpagedError):
    """The request was cancelled before it finished."""


class InvalidScoresError(HfpagedError, RuntimeError):
    """The processed scores of a sampled row contain NaN or +inf, or every token is excluded.

    A RuntimeError too, because that is what `torch.multinomial` raises for such a row in stock `generate`.
    """

    def __init__(
        self, message: str = "cannot sample: the processed scores contain NaN or +inf, or every token is excluded"
    ):
        super().__init__(message)


class EngineReleasedError(HfpagedError):
    """The engine of this request was released or unpatched while the request was running."""


class AdapterLostError(HfpagedError):
    """The adapter that a running request goes through was deleted, or merged into the weights."""


class EngineDeadError(HfpagedError):
    """The engine or its process has ended, or could not start. The message says how; nothing will be answered."""


class EngineBusyError(HfpagedError):
    """The engine's process does not take more requests at the moment. Nothing was queued; try again later."""


class ForkedEngineError(HfpagedError):
    """The process was forked while requests were running; the child cannot continue them."""


class InvariantError(HfpagedError, AssertionError):
    """`engine.check()` found the block books inconsistent. Always a bug in hfpaged."""


class ReleasedWeightError(HfpagedError):
    """The numbers of a parameter that `packed_only` released cannot be brought back, or were asked for past Python."""


class NativeKernelError(HfpagedError):
    """The compiled kernel library cannot be loaded, or refused its arguments."""


class MissingDependencyError(HfpagedError, ImportError):
    """An optional package is needed for what was asked. The message names the extra that installs it."""


class ModelDownloadError(HfpagedError):
    """The default model is neither cached nor reachable."""


class CheckpointError(HfpagedError, ValueError):
    """A checkpoint is incomplete, contradicts itself, or cannot be loaded. Names the tensor or field."""


class FusionsDisabledError(HfpagedError):
    """Fused code computed wrong numbers for a call that cannot be begun again."""

    def __init__(self) -> None:
        super().__init__("fused code computed wrong numbers for this call; it is off now, so call again")


class CorruptOutputError(HfpagedError):
    """The model computes numbers that are not finite. `layer` names the module where they first appear."""

    def __init__(self, layer: str):
        self.layer = layer
        super().__init__(f"the model's output is not finite; the first module whose output is not: {layer}")
