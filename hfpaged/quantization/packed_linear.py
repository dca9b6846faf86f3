"""PackedLinear: a linear layer whose weight stays packed, and EmulatedLinear for dense ones with quantized input."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import lcm
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from hfpaged.quantization import memory_layout
from hfpaged.quantization.activation import quantize_activation
from hfpaged.quantization.memory_layout import Layout, Strips, WeightGrid
from hfpaged.quantization.native_strips import StripProduct, can_multiply
from hfpaged.quantization.products import Arithmetic, scale_of
from hfpaged.quantization.record import ActivationScheme, QuantizedLinear
from hfpaged.quantization.scale_factors import TILE_ROWS

# Inputs that one pass of the kernels' inner loop takes.
_GROUP_MULTIPLE = 16
# Attribute of a module that is no part of its state: addresses of its buffers.
_PRODUCT = "_hfpaged_product"
# Weights that are dequantized at a time where no kernel reads them packed: 64 MiB in fp32.
_CHUNK_WEIGHTS = 1 << 24


def cannot_pack(record: QuantizedLinear) -> str | None:
    """Why a record cannot become a `PackedLinear`; None: it can."""
    if not record.format.is_four_bit and not memory_layout.wants_rows(record.codes.device):
        return f"{record.format.value} weights are converted when they are loaded on a CPU"
    if record.zero is not None:
        return "it has zero points"
    if record.permutation is not None:
        return "its groups are not consecutive inputs"
    if record.format.is_four_bit and record.block[1] % _GROUP_MULTIPLE:
        return f"its groups of {record.block[1]} are no multiple of {_GROUP_MULTIPLE}"
    return None


class PackedLinear(nn.Module):
    """y = x @ W.T + bias with W as it is stored. x: [..., K] in fp32, bf16 or fp16; y has its dtype.

    The CPU has kernels for strips. Elsewhere the weight is dequantized in chunks, at every call; what multiplies
    faster is put in the place of this forward when an engine is built (runtime/device/fused_product.py).

    Attributes:
        layout: of codes and scales; it follows the device that the module is moved to.
        codes, scales: tensors of integers, see `memory_layout`.
        global_scale: multiplier of all scales.
        activation: how the input is quantized first; None: it stays as it is.
    """

    def __init__(self, record: QuantizedLinear):
        super().__init__()
        self.in_features, self.out_features = record.in_features, record.out_features
        self.format, self.block = record.format, record.block
        self.global_scale = record.global_scale
        self.activation: ActivationScheme | None = record.activation
        self.layout: Layout = memory_layout.layout_for(record.codes.device, record.format)
        codes, scales = self.layout.store(record)
        self.register_buffer("codes", codes)
        self.register_buffer("scales", scales)
        bias = None if record.bias is None else nn.Parameter(record.bias, requires_grad=False)
        self.register_parameter("bias", bias)

    @property
    def num_bytes(self) -> int:
        """Memory of the packed weight."""
        return self.codes.nbytes + self.scales.nbytes

    @property
    def is_in_strips(self) -> bool:
        """Whether the CPU kernels can read it."""
        return isinstance(self.layout, Strips)

    @property
    def arithmetic(self) -> Arithmetic:
        """What its checkpoint says about the product."""
        activation = self.activation
        return Arithmetic(
            self.format,
            scale_of(self.block, self.out_features, self.in_features),
            None if activation is None else activation.format,
            activation is not None and activation.scale is not None,
        )

    @property
    def group(self) -> int:
        """Inputs that share a scale."""
        return self.block[1]

    def record(self, first: int = 0, last: int | None = None) -> QuantizedLinear:
        """Rows [first, last) of the weight as a normalized record again; `first` is a multiple of 128."""
        last = self.out_features if last is None else last
        grid = WeightGrid(self.format, self.block, self.out_features, self.in_features)
        codes, scales = self.layout.load((self.codes, self.scales), grid, first, last)
        bias = None if self.bias is None else self.bias[first:last]
        return QuantizedLinear(
            self.format, codes, scales, self.block, self.global_scale, bias=bias, activation=self.activation
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Multiply, after quantizing the input where the checkpoint says so."""
        if self.activation is not None:
            x = quantize_activation(x, self.activation)
        if not (self.is_in_strips and can_multiply(x)):
            parts = [functional.linear(x, one.dequantize().to(x.dtype), one.bias) for one in self._chunks()]
            return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)
        product: StripProduct | None = self.__dict__.get(_PRODUCT)
        if product is None or not product.serves(self.codes, self.scales):
            product = StripProduct(self.codes, self.scales, self.global_scale, self.format, self.group)
            self.__dict__[_PRODUCT] = product
        return product(x, None if self.bias is None else self.bias.float(), self.out_features)

    def move_strips(self, place: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Replace codes and scales that the CPU kernels read by the copies that `place` makes."""
        if self.is_in_strips:
            self.codes, self.scales = place(self.codes), place(self.scales)

    def _chunks(self) -> Iterator[QuantizedLinear]:
        # One scale for all rows can be taken apart anywhere.
        step = lcm(TILE_ROWS, self.block[0] if self.block[0] < self.out_features else 1)
        rows = max(1, _CHUNK_WEIGHTS // self.in_features // step) * step
        for first in range(0, self.out_features, rows):
            yield self.record(first, min(first + rows, self.out_features))

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> PackedLinear:
        """Move or cast, as every module, and lay the weight out anew for another kind of device."""
        super()._apply(fn, recurse)
        layout = memory_layout.layout_for(self.codes.device, self.format)
        if type(layout) is not type(self.layout) and not self.codes.is_meta:
            self.codes, self.scales, self.layout = *layout.store(self.record()), layout
        return self

    def __getstate__(self) -> dict[str, Any]:
        # Copies and pickles have other memory, so addresses stay behind.
        return {name: value for name, value in self.__dict__.items() if name != _PRODUCT}

    def extra_repr(self) -> str:
        """For printing a model."""
        return (
            f"{self.format.value}, in_features={self.in_features}, out_features={self.out_features}, group={self.group}"
        )


class EmulatedLinear(nn.Linear):
    """A dense linear layer whose input is quantized as its checkpoint says."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, activation: ActivationScheme):
        super().__init__(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
        self.weight = nn.Parameter(weight, requires_grad=False)
        if bias is not None:
            self.bias = nn.Parameter(bias, requires_grad=False)
        self.activation = activation

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Quantize the input, then multiply."""
        return super().forward(quantize_activation(x, self.activation))


def make_linear(record: QuantizedLinear, dtype: torch.dtype, activations: str) -> nn.Module:
    """The module that runs a record: packed where that is possible, else dense in `dtype`.

    Args:
        activations: "emulate" quantizes inputs as the checkpoint says, "weight-only" leaves them.
    """
    activation = record.activation if activations == "emulate" else None
    if cannot_pack(record) is None:
        module = PackedLinear(record)
        module.activation = activation
        return module
    weight = record.dequantize().to(dtype)
    if activation is not None:
        return EmulatedLinear(weight, record.bias, activation)
    linear = nn.Linear(record.in_features, record.out_features, bias=record.bias is not None, device="meta")
    linear.weight = nn.Parameter(weight, requires_grad=False)
    if record.bias is not None:
        linear.bias = nn.Parameter(record.bias, requires_grad=False)
    return linear
