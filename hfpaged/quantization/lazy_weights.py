"""Weights that a library unpacks or rearranges in the first forward.

An engine's view shares the tensors of the live modules but not what a forward notes about them, so that must have
happened before the view is made.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from hfpaged.errors import UnsupportedModelError

_DECOMPRESS_HOOK = "ct_decompress_hook"
_REARRANGING_PACKAGE = "gptqmodel"


def unpack_lazy_weights(model: nn.Module) -> None:
    """Have done now what libraries do in the first forward.

    compressed-tensors unpacks the model in a hook, which removes itself. GPTQModel's layers rearrange their weights for
    the dtype and mode of their first input.

    Raises:
        UnsupportedModelError: such layers are in train mode, for which they keep another layout.
    """
    for hook in list(model._forward_pre_hooks.values()):
        if getattr(hook, "__name__", "") == _DECOMPRESS_HOOK:
            hook(model, ())
    for layer in _not_yet_rearranged(model):
        if layer.training:
            raise UnsupportedModelError(["its GPTQ layers have not run yet and are in train mode; call model.eval()"])
        with torch.no_grad():
            layer(torch.zeros(1, layer.in_features, dtype=model.dtype, device=model.device))


def _not_yet_rearranged(model: nn.Module) -> Iterator[nn.Module]:
    for module in model.modules():
        is_theirs = type(module).__module__.partition(".")[0] == _REARRANGING_PACKAGE
        if is_theirs and hasattr(module, "in_features") and getattr(module, "linear_mode", "known") is None:
            yield module
