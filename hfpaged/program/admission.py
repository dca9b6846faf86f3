"""Describes the parts of a recognized model to the fusion guards, which decide whether the program may run them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import torch
from torch import nn

from hfpaged.fusion.operand import FusionValues, Operand
from hfpaged.fusion.registry import Admission, FusionRegistry
from hfpaged.program.abi import NormKind
from hfpaged.program.description import Attention, Experts, Linear, Mlp, Model, Norm
from hfpaged.quantization.packed_linear import PackedLinear

NORM_FUSIONS = {
    NormKind.RMS_ROUNDED_THEN_SCALED: "rms_norm.rounded_then_scaled",
    NormKind.RMS_SCALED_THEN_ROUNDED: "rms_norm.scaled_then_rounded",
    NormKind.LAYER_NORM: "layer_norm",
}


class Gatekeeper:
    """Asks the guards about parts of a model with activations in `dtype`.

    Every method returns the admission or raises FusionRefused.
    """

    def __init__(self, registry: FusionRegistry, dtype: torch.dtype):
        self._registry = registry
        self._dtype = dtype

    def admit_all(self, model: Model) -> None:
        """Ask every guard again, about the weights as they are now."""
        self.embedding(model.embedding)
        for layer in model.layers:
            attention = layer.attention
            for linear in (attention.query, attention.key, attention.value):
                self.linear(linear)
            self.linear(attention.output, residual=True)
            self.rotary(attention)
            self.attention(attention)
            self._admit_mlp(layer.mlp)
            for norm in (layer.attention_norm, layer.attention_out_norm, layer.mlp_norm, layer.mlp_out_norm):
                if norm is not None:
                    self.norm(norm)
        self.norm(model.final_norm)
        self.head(model.head)

    def embedding(self, module: nn.Module) -> Admission:
        """The token embedding."""
        operands = {"table": Operand.of(module.weight), "out": self._rows(module.weight.shape[1])}
        return self._admit("embedding", operands, [module])

    def linear(self, linear: Linear, residual: bool = False) -> Admission:
        """A linear module, with or without the addition to the residual stream."""
        operands = self._linear_operands(linear)
        if residual:
            operands["residual"] = operands["out"]
        name = "linear_residual" if residual else "linear"
        return self._admit(_packed_or(name, linear), operands, [linear.module])

    def gate_up(self, mlp: Mlp) -> Admission:
        """Gate and up projections of a gated MLP."""
        operands = self._linear_operands(mlp.gate)
        if mlp.up.packed is None:
            operands["up_weight"] = Operand.of(mlp.up.weight)
        else:
            operands |= {f"up_{role}": operand for role, operand in _packed_operands(mlp.up.packed).items()}
        if mlp.up.bias is not None:
            operands["up_bias"] = Operand.of(mlp.up.bias)
        return self._admit(_packed_or("gate_up_activation", mlp.gate), operands, [mlp.gate.module, mlp.up.module])

    def norm(self, norm: Norm) -> Admission:
        """A normalization. Its gamma is fp32 for the guard where the module converts it before it multiplies."""
        operands = {"x": self._rows(norm.width), "out": self._rows(norm.width)}
        weight, bias = getattr(norm.module, "weight", None), getattr(norm.module, "bias", None)
        if weight is not None:
            operands["gamma"] = Operand.of(weight, torch.float32 if norm.gamma_offset else None)
        if bias is not None:
            operands["beta"] = Operand.of(bias)
        return self._admit(NORM_FUSIONS[norm.kind], operands, [norm.module])

    def rotary(self, attention: Attention) -> Admission:
        """Norms of queries and keys, rotation, and the write to the cache."""
        norms = [norm for norm in (attention.query_norm, attention.key_norm) if norm is not None]
        for norm in norms:
            self.norm(norm)
        operands = {"x": self._rows(attention.key_dim), "cache": self._rows(attention.key_dim)}
        if attention.rotary is not None:
            table_dtype = self._dtype if attention.rotation.round_products else torch.float32
            operands["table"] = self._rows(attention.rotation.width, table_dtype)
        return self._admit("rotary_kv_write", operands, [norm.module for norm in norms])

    def attention(self, attention: Attention) -> Admission:
        """Attention over the cache."""
        roles = {"x": attention.key_dim, "cache": attention.key_dim, "out": attention.value_dim}
        operands = {role: self._rows(width) for role, width in roles.items()}
        if attention.sinks is not None:
            operands["sinks"] = Operand.of(getattr(attention.module, attention.sinks))
        return self._admit("paged_attention", operands, [attention.module])

    def router(self, experts: Experts) -> Admission:
        """The choice of experts."""
        self.linear(experts.router)
        return self._admit("router", {"x": self._rows(len(experts.experts))}, [experts.router.module])

    def head(self, head: Linear) -> Admission:
        """The head with its argmax."""
        return self._admit("head_argmax", self._linear_operands(head), [head.module])

    def _admit_mlp(self, mlp: Mlp | Experts) -> None:
        if isinstance(mlp, Experts):
            self.router(mlp)
        for each in mlp.experts if isinstance(mlp, Experts) else (mlp,):
            self.linear(each.down, residual=True)
            if each.gate is None:
                self.linear(each.up)
            else:
                self.gate_up(each)

    def _linear_operands(self, linear: Linear) -> dict[str, Operand]:
        operands = {"x": self._rows(linear.in_features), "out": self._rows(linear.out_features)}
        if linear.packed is None:
            weight = Operand.of(getattr(linear.module, linear.parameter))
            operands["weight"] = replace(weight, shape=weight.shape[::-1]) if linear.transposed else weight
        else:
            operands |= _packed_operands(linear.packed)
        if linear.bias is not None:
            operands["bias"] = Operand.of(linear.bias)
        return operands

    def _rows(self, width: int, dtype: torch.dtype | None = None) -> Operand:
        return Operand.rows(width, dtype or self._dtype)

    def _admit(self, name: str, operands: dict[str, Operand], modules: Iterable[nn.Module]) -> Admission:
        values = FusionValues(
            operands,
            autocast=torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None,
            hooked=any(self._is_hooked(module) for module in modules),
            adapted=any("active_adapters" in dir(type(module)) for module in modules),
        )
        return self._registry.admit(name, values)

    @staticmethod
    def _is_hooked(module: nn.Module) -> bool:
        hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks)
        return any(hooks) or "forward" in module.__dict__


def _packed_or(name: str, linear: Linear) -> str:
    return name if linear.packed is None else f"packed_{name}"


def _packed_operands(module: PackedLinear) -> dict[str, Operand]:
    return {"codes": Operand.of(module.codes), "scales": Operand.of(module.scales)}
