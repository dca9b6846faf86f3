"""Weights that a library unpacks in the first forward: an engine's view has no hooks, so they must be there before."""

from __future__ import annotations

from torch import nn

_DECOMPRESS_HOOK = "ct_decompress_hook"


def unpack_lazy_weights(model: nn.Module) -> None:
    """Run the hook by which compressed-tensors unpacks a model before its first forward. It removes itself."""
    for hook in list(model._forward_pre_hooks.values()):
        if getattr(hook, "__name__", "") == _DECOMPRESS_HOOK:
            hook(model, ())
