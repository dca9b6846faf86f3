"""Which kernel multiplies with a packed weight on a GPU, and why not a faster one. Pure: it looks at no device.

FlashInfer 0.7 has products of 4-bit with 4-bit, of 16-bit with 4-bit and of 8-bit with 8-bit floats. Which of them
computes what a checkpoint says depends on its inputs: weights alone in 4 bits never become 4-bit arithmetic.
"""

from __future__ import annotations

from typing import NamedTuple

from hfpaged.quantization.record import WeightFormat

FP4 = "flashinfer.fp4_product"
BF16_FP4 = "flashinfer.bf16_fp4_product"
FP8 = "flashinfer.fp8_product"
SCALED_ROWS = "torch.scaled_rows_product"

# Compute capabilities that a product was compiled for.
FP4_FROM = (10, 0)
BF16_FP4_ON = ((12, 0), (12, 1))
FP8_FROM = (8, 9)


class Arithmetic(NamedTuple):
    """What a checkpoint says about a linear layer.

    Attributes:
        scale_of: what one scale of the weight is for: "tensor", "row" or "block".
        activation: format of the quantized input; None: it stays as it is.
        has_input_scale: the checkpoint has one scale for all of the input.
    """

    format: WeightFormat
    scale_of: str
    activation: str | None
    has_input_scale: bool


class Choice(NamedTuple):
    """`fusion` multiplies; None: the weight is dequantized in chunks at every call, because of `reason`."""

    fusion: str | None
    reason: str | None = None


def scale_of(block: tuple[int, int], out_features: int, in_features: int) -> str:
    """What one scale is for, see `Arithmetic`, where blocks have so many rows and columns."""
    rows, columns = block
    if columns < in_features:
        return "block"
    if rows >= out_features:
        return "tensor"
    return "row" if rows == 1 else "block"


def choose_product(arithmetic: Arithmetic, capability: tuple[int, int]) -> Choice:
    """The product for a layer on a GPU of some compute capability."""
    if arithmetic.format is WeightFormat.NVFP4:
        return _for_nvfp4(arithmetic, capability)
    if arithmetic.format is WeightFormat.FP8:
        return _for_fp8(arithmetic, capability)
    if arithmetic.format is WeightFormat.MXFP4 and arithmetic.activation is not None:
        return Choice(None, "FlashInfer rounds the scales of MXFP4 inputs up, where the format has them rounded down")
    return Choice(None, f"FlashInfer has no product of 16-bit inputs with {arithmetic.format.value} weights")


def _for_nvfp4(arithmetic: Arithmetic, capability: tuple[int, int]) -> Choice:
    if capability < FP4_FROM:
        return Choice(None, f"FlashInfer multiplies NVFP4 from {_named(FP4_FROM)} on, this is {_named(capability)}")
    if arithmetic.activation is None:
        if capability in BF16_FP4_ON:
            return Choice(BF16_FP4)
        return Choice(None, f"for {_named(capability)} the product of 16-bit inputs needs a second copy of the weight")
    if arithmetic.activation != "nvfp4" or not arithmetic.has_input_scale:
        return Choice(None, "its inputs are not quantized to NVFP4 with one global scale")
    return Choice(FP4)


def _for_fp8(arithmetic: Arithmetic, capability: tuple[int, int]) -> Choice:
    if arithmetic.activation != "fp8":
        return Choice(None, "its inputs are not quantized to FP8, and 8-bit floats are multiplied with their like only")
    if capability < FP8_FROM:
        return Choice(None, f"8-bit floats are multiplied from {_named(FP8_FROM)} on, this is {_named(capability)}")
    if arithmetic.scale_of == "block":
        return Choice(None, "its scales are those of blocks that do not divide the weight")
    return Choice(FP8 if arithmetic.scale_of == "tensor" and arithmetic.has_input_scale else SCALED_ROWS)


def _named(capability: tuple[int, int]) -> str:
    return f"compute capability {capability[0]}.{capability[1]}"
