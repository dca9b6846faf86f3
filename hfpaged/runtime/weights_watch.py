"""Noticing that a model's weights changed, however they were changed.

Version counters, pointers and object identities prove a change at once, but never its absence: fused optimizers,
`.data +=`, adapter merges and raw writes leave all three as they were. So an idle engine also fingerprints the bytes.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch
from torch import nn

from hfpaged.native import library
from hfpaged.runtime.module_state import walk_modules
from hfpaged.runtime.released_weights import ReleasedWeight

FALLBACK_CHUNK = 1 << 20


class WeightsWatch:
    """Remembers what the weights of `model` were when last looked at."""

    def __init__(self, model: nn.Module, watch_content: bool = True):
        self._watch_content = watch_content
        self._identity = weights_identity(model)
        self._content = weights_fingerprint(model) if watch_content else ()

    def changed(self, model: nn.Module, look_at_content: bool) -> bool:
        """Whether the weights differ from the last look; remembers the present ones.

        Args:
            look_at_content: also read every byte (about the time of a decode step). Without it only what version
                counters, pointers and objects show is seen.
        """
        identity = weights_identity(model)
        changed = identity != self._identity
        self._identity = identity
        if self._watch_content and (changed or look_at_content):
            content = weights_fingerprint(model)
            changed = changed or content != self._content
            self._content = content
        return changed


def weights_identity(model: nn.Module) -> list[tuple]:
    """Object, pointer, version, dtype and shape of every parameter. Cheap; proves changes only.

    Buffers are left out: rotary embeddings rewrite theirs in each forward. Their content is fingerprinted.
    """
    return [
        (id(parameter), plain.data_ptr(), _version(plain), plain.dtype, plain.shape)
        for module in walk_modules(model)
        for parameter in module._parameters.values()
        if parameter is not None
        for plain in plain_tensors(parameter)
    ]


def weights_fingerprint(model: nn.Module) -> tuple[int, ...]:
    """A content hash of every parameter and buffer, in order; tensors that share memory are read once."""
    tensors = {
        (plain.data_ptr(), plain.nbytes, plain.stride()): plain
        for owner in itertools.chain(model.parameters(), model.buffers())
        for plain in plain_tensors(owner)
    }
    # All are under way before the first result is waited for, which matters on a GPU.
    digests = [fingerprint(tensor) for tensor in tensors.values()]
    return tuple(map(int, digests))


def fingerprint(tensor: torch.Tensor) -> int | torch.Tensor:
    """64-bit, position-sensitive hash of a tensor's bytes: native on the CPU, else by torch as an int64 scalar."""
    tensor = tensor.detach()
    if not tensor.is_contiguous():
        tensor = tensor.contiguous()
    if tensor.device.type == "cpu" and library.unavailable() is None:
        return library.fingerprint(tensor.data_ptr(), tensor.nbytes, torch.get_num_threads())
    return _torch_fingerprint(tensor)


def _torch_fingerprint(tensor: torch.Tensor) -> torch.Tensor:
    """Sum over the 64-bit words, each mixed with its position, modulo 2**64."""
    data = tensor.reshape(-1).view(torch.uint8)
    data = torch.nn.functional.pad(data, (0, -data.numel() % 8)).view(torch.int64)
    total = torch.full((), tensor.nbytes, dtype=torch.int64, device=data.device)
    for first in range(0, data.numel(), FALLBACK_CHUNK):
        part = data[first : first + FALLBACK_CHUNK]
        position = torch.arange(first, first + part.numel(), device=data.device)
        # An odd multiplier of each word (SplitMix64's increment) makes swapped words show, the shift makes changes of
        # the words' top bits show, which multiplied by odd numbers would cancel in pairs.
        mixed = part * (position * -7046029254386353131 * 2 + 1)
        total += (mixed ^ (mixed >> 32)).sum()
    return total


def plain_tensors(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The tensors that hold the bytes: `tensor` itself, or the parts of a wrapper subclass (quantized weights).

    A released parameter has none; it is what it was when it was packed.
    """
    if isinstance(tensor, ReleasedWeight):
        return
    if hasattr(tensor, "__tensor_flatten__"):
        for name in tensor.__tensor_flatten__()[0]:
            yield from plain_tensors(getattr(tensor, name))
    elif tensor.device.type != "meta":
        yield tensor


def _version(tensor: torch.Tensor) -> int | None:
    try:
        return tensor._version
    except RuntimeError:
        # Inference tensors keep no count, nor do parameters that were made as one.
        return None
