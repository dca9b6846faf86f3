"""PackedLinear: a linear layer whose weight stays in 4 bits, and EmulatedLinear for dense ones with quantized input."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional

from hfpaged.quantization.activation import quantize_activation
from hfpaged.quantization.native_strips import StripProduct, can_multiply
from hfpaged.quantization.record import ActivationScheme, QuantizedLinear, WeightFormat
from hfpaged.quantization.strips import codes_to_strips, scales_to_strips, strips_to_codes, strips_to_scales

# Inputs that one pass of the kernels' inner loop takes.
_GROUP_MULTIPLE = 16
# Attribute of a module that is no part of its state: addresses of its buffers.
_PRODUCT = "_hfpaged_product"
_SCALE_DTYPES = {
    WeightFormat.NVFP4: torch.float8_e4m3fn,
    WeightFormat.MXFP4: torch.uint8,
    WeightFormat.INT4: torch.float32,
}


def cannot_pack(record: QuantizedLinear) -> str | None:
    """Why a record cannot become a `PackedLinear`; None: it can."""
    if not record.format.is_four_bit:
        return f"{record.format.value} weights are converted when they are loaded"
    if record.zero is not None:
        return "it has zero points"
    if record.permutation is not None:
        return "its groups are not consecutive inputs"
    if record.block[1] % _GROUP_MULTIPLE:
        return f"its groups of {record.block[1]} are no multiple of {_GROUP_MULTIPLE}"
    return None


class PackedLinear(nn.Module):
    """y = x @ W.T + bias with W in the strips of csrc/strips.h. x: [..., K] in fp32, bf16 or fp16; y has its dtype.

    All buffers are integers, so that casting the model leaves them alone.

    Attributes:
        codes: int32 [ceil(N / 16), K / 8, 16].
        scales: uint8, bytes of one scale for each output and group, [ceil(N / 16), K / group, 16 * itemsize].
        global_scale: multiplier of all scales.
        activation: how the input is quantized first; None: it stays as it is.
    """

    def __init__(self, record: QuantizedLinear):
        super().__init__()
        self.in_features, self.out_features = record.in_features, record.out_features
        self.format, self.group = record.format, record.block[1]
        self.global_scale = record.global_scale
        self.activation: ActivationScheme | None = record.activation
        scale_dtype = _SCALE_DTYPES[record.format]
        self.register_buffer("codes", codes_to_strips(record.codes))
        self.register_buffer("scales", scales_to_strips(record.scales.to(scale_dtype)))
        bias = None if record.bias is None else nn.Parameter(record.bias, requires_grad=False)
        self.register_parameter("bias", bias)

    @property
    def num_bytes(self) -> int:
        """Memory of the packed weight."""
        return self.codes.nbytes + self.scales.nbytes

    def record(self) -> QuantizedLinear:
        """The weight as a normalized record again."""
        return QuantizedLinear(
            self.format,
            strips_to_codes(self.codes, self.out_features),
            strips_to_scales(self.scales, _SCALE_DTYPES[self.format], self.out_features),
            (1, self.group),
            self.global_scale,
            bias=self.bias,
            activation=self.activation,
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Multiply, after quantizing the input where the checkpoint says so."""
        if self.activation is not None:
            x = quantize_activation(x, self.activation)
        if not can_multiply(x):
            return functional.linear(x, self.record().dequantize().to(x.dtype), self.bias)
        product: StripProduct | None = self.__dict__.get(_PRODUCT)
        if product is None or not product.serves(self.codes, self.scales):
            product = StripProduct(self.codes, self.scales, self.global_scale, self.format, self.group)
            self.__dict__[_PRODUCT] = product
        return product(x, None if self.bias is None else self.bias.float(), self.out_features)

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
    """The module that runs a record: packed where kernels exist, else dense in `dtype`.

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
