"""Describes modules to the fusion guards, which decide whether they may run natively."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import torch
from torch import nn

from hfpaged.fusion.operand import FusionValues, Operand
from hfpaged.fusion.registry import FusionRefused, FusionRegistry
from hfpaged.program.abi import RotaryStyle
from hfpaged.program.admission import NORM_FUSIONS
from hfpaged.program.description import Attention, Linear, Mlp, Norm
from hfpaged.program.norms import gamma_of


class LeafGate:
    """Asks the guards, and looks at what they take for granted. Every method returns or raises FusionRefused."""

    def __init__(self, registry: FusionRegistry):
        self._registry = registry

    def linear(self, linear: Linear, fusion: str = "linear") -> None:
        """A linear module, whose activations have the dtype of its weight."""
        self._admit(fusion, self._linear_operands(linear), [linear.module])

    def norm(self, norm: Norm, dtype: torch.dtype) -> None:
        """A normalization of activations in `dtype`."""
        operands = {"x": Operand.rows(norm.width, dtype), "out": Operand.rows(norm.width, dtype)}
        weight, bias = getattr(norm.module, "weight", None), getattr(norm.module, "bias", None)
        if weight is not None:
            if gamma_of(norm).shape != (norm.width,):
                raise FusionRefused(NORM_FUSIONS[norm.kind], "its weight is not one number per element")
            # A module that adds to its weight converts it to fp32 first.
            operands["gamma"] = Operand.of(weight, torch.float32 if norm.gamma_offset else None)
        if bias is not None:
            operands["beta"] = Operand.of(bias)
        self._admit(NORM_FUSIONS[norm.kind], operands, [norm.module])

    def mlp(self, mlp: Mlp) -> None:
        """An MLP."""
        self.linear(mlp.down)
        self.linear(mlp.up)
        if mlp.gate is None:
            return
        operands = self._linear_operands(mlp.gate)
        operands["up_weight"] = Operand.of(mlp.up.weight)
        if mlp.up.bias is not None:
            operands["up_bias"] = Operand.of(mlp.up.bias)
        self._admit("gate_up_activation", operands, [mlp.gate.module, mlp.up.module])

    def attention(self, attention: Attention) -> None:
        """An attention layer, up to the paged attention itself."""
        linears = (attention.query, attention.key, attention.value, attention.output)
        for linear in linears:
            self.linear(linear)
        dtype = attention.query.weight.dtype
        if any(linear.weight.dtype != dtype for linear in linears):
            raise FusionRefused("linear", "the projections of an attention layer differ in dtype")
        norms = [norm for norm in (attention.query_norm, attention.key_norm) if norm is not None]
        for norm in norms:
            self.norm(norm, dtype)
        operands = {role: Operand.rows(attention.key_dim, dtype) for role in ("x", "cache")}
        if attention.rotation.style != RotaryStyle.NONE:
            table = dtype if attention.rotation.round_products else torch.float32
            operands["table"] = Operand.rows(attention.rotation.width, table)
        self._admit("rotary_kv_write", operands, [attention.module, *(norm.module for norm in norms)])

    def _linear_operands(self, linear: Linear) -> dict[str, Operand]:
        if linear.packed is not None:
            raise FusionRefused("linear", "its weight is in 4 bits")
        weight = Operand.of(getattr(linear.module, linear.parameter))
        if linear.transposed:
            weight = replace(weight, shape=weight.shape[::-1])
        features = weight.shape[-1]
        if features % 2 and weight.dtype != torch.float32:
            raise FusionRefused("linear", "an odd number of 16-bit inputs")
        operands = {
            "x": Operand.rows(features, weight.dtype),
            "weight": weight,
            "out": Operand.rows(linear.out_features, weight.dtype),
        }
        if linear.bias is not None:
            operands["bias"] = Operand.of(linear.bias)
        return operands

    def _admit(self, fusion: str, operands: dict[str, Operand], modules: Iterable[nn.Module]) -> None:
        values = FusionValues(
            operands,
            autocast=torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None,
            hooked=any(module._forward_hooks or module._forward_pre_hooks for module in modules),
            adapted=any("active_adapters" in dir(type(module)) for module in modules),
        )
        self._registry.admit(fusion, values)
