"""Linear layers with packed weights whose product is a kernel that reads the weight as it is stored."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import nn
from torch.nn import functional

from hfpaged.fusion.operand import FLEXIBLE, FusionValues, Operand
from hfpaged.fusion.registry import FusionRegistry
from hfpaged.program.description import NotRecognized
from hfpaged.quantization.activation import fp8_codes
from hfpaged.quantization.packed_linear import PackedLinear
from hfpaged.quantization.products import BF16_FP4, FP4, FP8, SCALED_ROWS, choose_product
from hfpaged.quantization.scale_factors import encoding_scale, product_scale
from hfpaged.runtime.attention.flashinfer_probe import compute_capability, flashinfer
from hfpaged.runtime.device.sameness import calibrated_rows, require_near

_ROWS = 8
_GROUP = 16  # inputs that share a scale in NVFP4


def is_packed_in_rows(module: nn.Module) -> bool:
    """Whether a module is a linear layer with a packed weight in the layout for a GPU."""
    return type(module) is PackedLinear and not module.is_in_strips


def fused_product(module: PackedLinear, dtype: torch.dtype, registry: FusionRegistry) -> Product:
    """The module's forward for activations in `dtype`.

    Raises:
        NotRecognized, FusionRefused: there is no kernel for what its checkpoint says, or not on this device.
    """
    capability = compute_capability(module.codes.device)
    name, reason = choose_product(module.arithmetic, capability)
    if name is None:
        raise NotRecognized(reason)
    product = _PRODUCTS[name](module, dtype)
    registry.admit(name, FusionValues(product.operands(), capability=capability))
    x = calibrated_rows(_ROWS, module.in_features, product.largest_input, module.codes.device, dtype)
    with torch.no_grad():
        require_near(product(x), PackedLinear.forward(module, x))
    return product


class Product(ABC):
    """Stands for the forward of one module.

    Attributes:
        fusion: its name.
        largest_input: magnitude that the module's inputs were calibrated for.
    """

    fusion: str

    def __init__(self, module: PackedLinear, dtype: torch.dtype):
        self._module = module
        self._dtype = dtype
        self.largest_input = 1.0

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        module = self._module
        if x.dtype is not self._dtype or x.numel() == 0:
            return PackedLinear.forward(module, x)
        rows = x.reshape(-1, module.in_features)
        out = self.multiply(rows if rows.is_contiguous() else rows.contiguous())
        if module.bias is not None:
            out = out + module.bias
        return out.view(*x.shape[:-1], module.out_features)

    @abstractmethod
    def multiply(self, rows: torch.Tensor) -> torch.Tensor:
        """[M, K] to [M, N], without the bias."""

    def operands(self) -> dict[str, Operand]:
        """What its guard looks at."""
        module = self._module
        device = module.codes.device.type
        return {
            "x": Operand(self._dtype, (FLEXIBLE, module.in_features), device=device),
            "out": Operand(self._dtype, (FLEXIBLE, module.out_features), device=device),
            "codes": Operand.of(module.codes),
            "scales": Operand.of(module.scales),
        }


class Fp4Product(Product):
    """4-bit floats with 4-bit floats."""

    fusion = FP4

    def __init__(self, module: PackedLinear, dtype: torch.dtype):
        super().__init__(module, dtype)
        scale, device = module.activation.scale, module.codes.device
        self._input_scale = encoding_scale(scale, device)
        self._alpha = product_scale(scale, module.global_scale, device)
        self.largest_input = scale * 6 * 448

    def multiply(self, rows: torch.Tensor) -> torch.Tensor:
        """See `Product.multiply`."""
        library, module = flashinfer(), self._module
        # An environment variable may choose another recipe for the scales of the input.
        codes, scales = library.fp4_quantize(rows, self._input_scale, _GROUP, nvfp4_4over6=None)
        return library.mm_fp4(
            codes, module.codes.t(), scales, module.scales.t(), self._alpha, self._dtype, backend="cutlass"
        )

    def operands(self) -> dict[str, Operand]:
        """See `Product.operands`."""
        scales = {"alpha": Operand.of(self._alpha), "input_scale": Operand.of(self._input_scale)}
        return super().operands() | scales


class Bf16Fp4Product(Product):
    """16-bit floats with 4-bit floats."""

    fusion = BF16_FP4

    def __init__(self, module: PackedLinear, dtype: torch.dtype):
        super().__init__(module, dtype)
        self._alpha = product_scale(1.0, module.global_scale, module.codes.device)

    def multiply(self, rows: torch.Tensor) -> torch.Tensor:
        """See `Product.multiply`."""
        module = self._module
        return flashinfer().mm_bf16_fp4(
            rows, module.codes, module.scales, self._alpha, backend="cute-dsl-native", out_dtype=self._dtype
        )

    def operands(self) -> dict[str, Operand]:
        """See `Product.operands`."""
        return super().operands() | {"alpha": Operand.of(self._alpha)}


class _EightBit(Product):
    """8-bit floats with 8-bit floats."""

    def _codes(self) -> torch.Tensor:
        return self._module.codes.view(torch.float8_e4m3fn)

    def _scales(self) -> torch.Tensor:
        return self._module.scales.view(torch.float32)

    def operands(self) -> dict[str, Operand]:
        """See `Product.operands`."""
        return super().operands() | {"codes": Operand.of(self._codes()), "scales": Operand.of(self._scales())}


class Fp8Product(_EightBit):
    """One scale for the input and one for the weight."""

    fusion = FP8

    def __init__(self, module: PackedLinear, dtype: torch.dtype):
        super().__init__(module, dtype)
        self._scale = module.activation.scale
        self._alpha = self._scale * self._scales().reshape(1)
        self.largest_input = self._scale * 448

    def multiply(self, rows: torch.Tensor) -> torch.Tensor:
        """See `Product.multiply`."""
        codes, _ = fp8_codes(rows, self._scale)
        return flashinfer().mm_fp8(codes, self._codes(), self._alpha, self._dtype, backend="cublas")

    def operands(self) -> dict[str, Operand]:
        """See `Product.operands`."""
        return super().operands() | {"alpha": Operand.of(self._alpha)}


class ScaledRowsProduct(_EightBit):
    """One scale for each row of the input and one for each row of the weight."""

    fusion = SCALED_ROWS

    def multiply(self, rows: torch.Tensor) -> torch.Tensor:
        """See `Product.multiply`."""
        by_row = functional.ScalingType.RowWise
        codes, steps = fp8_codes(rows, self._module.activation.scale)
        if not isinstance(steps, torch.Tensor):
            steps = rows.new_full((len(rows), 1), steps, dtype=torch.float32)
        scales = self._scales().reshape(1, -1).expand(1, self._module.out_features).contiguous()
        return functional.scaled_mm(
            codes, self._codes().t(), steps, by_row, scales, by_row, output_dtype=self._dtype
        )  # fmt: skip


_PRODUCTS: dict[str, type[Product]] = {
    kind.fusion: kind for kind in (Fp4Product, Bf16Fp4Product, Fp8Product, ScaledRowsProduct)
}
