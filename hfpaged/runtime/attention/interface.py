"""What the runtime asks of a paged attention backend."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

from hfpaged.errors import ConfigError
from hfpaged.native import huge_pages
from hfpaged.runtime.device.accelerator import accelerator_for
from hfpaged.runtime.device.staging import PinnedRing

if TYPE_CHECKING:
    from hfpaged.runtime.batch import StepBatch

KVTensors = tuple[torch.Tensor, torch.Tensor]


class LayerShape(NamedTuple):
    """Heads and head dimensions of one layer's keys and values."""

    num_kv_heads: int
    key_dim: int
    value_dim: int


class LatentShape(LayerShape):
    """Of one head that all query heads read, whose values are the first dimensions of its keys: what is stored of a
    token in multi-head latent attention."""


class AttentionParams(NamedTuple):
    """What differs between layers besides shapes.

    Attributes:
        scale: factor of query * key.
        window: a token sees the last `window` tokens, itself included. None: all.
        softcap: scores become tanh(score / softcap) * softcap, after scaling. None: no cap.
        sinks: [H], one more logit per query head that takes probability but has no value. None: no sinks.
    """

    scale: float
    window: int | None = None
    softcap: float | None = None
    sinks: torch.Tensor | None = None


class AttentionBackend(ABC):
    """Causal attention of packed tokens over paged keys and values.

    One backend serves one engine: `allocate` once per layer, then for each step `begin`, and in each layer `write` and
    `run`. It is used by one thread at a time.

    The result of a token depends on the token and on its own request alone, never on what else is in the batch, on how
    its prompt was cut into steps, or on which blocks it has. A backend that guarantees this to the last bit says so in
    its docstring.

    Attributes:
        shared_prefix_steps: steps so far in which blocks that requests share were read once for all of them.
    """

    name: str
    shared_prefix_steps: int = 0
    # Types of the devices it was made for; None: all.
    device_types: frozenset[str] | None = None

    def __init__(self, device: torch.device, dtype: torch.dtype, block_size: int):
        self.device = device
        self.dtype = dtype
        self.block_size = block_size

    @classmethod
    @abstractmethod
    def unavailable(
        cls, device: torch.device, dtype: torch.dtype, shapes: Sequence[LayerShape], block_size: int
    ) -> str | None:
        """Why this backend cannot serve such a model here, in one line. None: it can."""

    @classmethod
    def stored_shape(cls, shape: LayerShape) -> LayerShape:
        """What a layer's keys and values take in memory: its own shape, or a larger one that has a kernel."""
        return shape

    def attends_to_latents(self, shape: LatentShape, num_heads: int) -> bool:
        """Whether it has kernels for so many query heads over one head of this shape. Few backends have any."""
        return False

    @abstractmethod
    def allocate(self, shape: LayerShape, num_blocks: int) -> KVTensors:
        """Zeroed (key, value) tensors of one layer, in the backend's own layout behind the leading block dimension.

        They are ordinary tensors, also when called in inference mode. On the CPU the memory is committed as blocks are
        first written.
        """

    @abstractmethod
    def begin(self, batch: StepBatch) -> None:
        """Prepare a step. `batch` and its arrays stay unchanged until the next call."""

    def require_same_blocks(self, batch: StepBatch) -> None:
        """Raise ConfigError if the batch's tables are of blocks of another size than the cache."""
        if batch.block_size != self.block_size:
            raise ConfigError(f"a batch of block size {batch.block_size} for a cache of block size {self.block_size}")

    @abstractmethod
    def write(self, kv: KVTensors, key: torch.Tensor, value: torch.Tensor) -> None:
        """Put the step's new keys and values into their slots.

        Args:
            kv: what `allocate` returned for the layer.
            key: [T, Hkv, Dk], any strides.
            value: [T, Hkv, Dv], any strides.
        """

    @abstractmethod
    def run(self, kv: KVTensors, query: torch.Tensor, params: AttentionParams) -> torch.Tensor:
        """Attend with the step's queries over everything written so far for their requests.

        Slots beyond a request's context may hold anything, NaN included, without effect.

        Args:
            kv: what `allocate` returned for the layer; `write` has been called for this step.
            query: [T, H, Dk], any strides. Query head h reads KV head h // (H // Hkv).
            params: the layer's.

        Returns:
            [T, H, Dv], contiguous, in the dtype of the cache.
        """


class AheadBackend(AttentionBackend):
    """A backend whose device works behind the host: none of its methods waits for the step that they belong to.

    Attributes:
        accelerator: the device.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype, block_size: int):
        super().__init__(device, dtype, block_size)
        self.accelerator = accelerator_for(device)
        self._slot_ring = PinnedRing(self.accelerator, torch.int64)

    def begin(self, batch: StepBatch) -> None:
        """See `AttentionBackend.begin`."""
        (slots,) = self._slot_ring.upload((batch.slots,))
        self.begin_ahead(batch, slots)

    @abstractmethod
    def begin_ahead(self, batch: StepBatch, slots: torch.Tensor, captured_size: int | None = None) -> None:
        """`begin`, with what is on the device already.

        Args:
            slots: int64 [T] on the device, `batch.slots`.
            captured_size: the step is of this many requests with one token each, and is being captured or replayed:
                everything that it reads is written to memory of its own, the same at every call with this size.
        """

    @abstractmethod
    def can_capture(self, batch: StepBatch, size: int) -> bool:
        """Whether a step with this batch, padded to `size`, could be captured or replayed.

        That is: it has seen all layers, and the batch fits the memory of captured steps.
        """


def lazily_zeroed(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros outside inference mode. On the CPU the operating system commits a page when it is first written."""
    with torch.inference_mode(False):
        if device.type != "cpu":
            return torch.zeros(shape, dtype=dtype, device=device)
        # Tiles that fill a page want aligned memory.
        return huge_pages.zeroed(math.prod(shape) * dtype.itemsize).view(dtype).view(shape)
