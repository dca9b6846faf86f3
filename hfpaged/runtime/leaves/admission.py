"""Asks the fusion guards whether modules may run natively."""

from __future__ import annotations

import torch
from torch import nn

from hfpaged.fusion.registry import FusionRefused, FusionRegistry
from hfpaged.program.admission import NORM_FUSIONS, Gatekeeper
from hfpaged.program.description import Attention, Layer, Linear, Mlp, Norm
from hfpaged.program.norms import gamma_of


class LeafGate:
    """Asks the guards, and looks at what they take for granted. What they do not admit raises FusionRefused."""

    def __init__(self, registry: FusionRegistry):
        self._registry = registry

    def of(self, dtype: torch.dtype) -> Gatekeeper:
        """What admits parts whose activations have that dtype."""
        return _LeafKeeper(self._registry, dtype)

    def linear(self, linear: Linear) -> None:
        """A linear module, whose activations have the dtype of its weight."""
        self._look_at(linear)
        self.of(linear.weight.dtype).linear(linear)

    def head(self, head: Linear) -> None:
        """A linear module that gives the logits."""
        self.linear(head)
        self.of(head.weight.dtype).head(head)

    def norm(self, norm: Norm, dtype: torch.dtype) -> None:
        """A normalization of activations in `dtype`."""
        if getattr(norm.module, "weight", None) is not None and gamma_of(norm).shape != (norm.width,):
            raise FusionRefused(NORM_FUSIONS[norm.kind], "its weight is not one number per element")
        self.of(dtype).norm(norm)

    def mlp(self, mlp: Mlp) -> None:
        """An MLP."""
        self.linear(mlp.down)
        self.linear(mlp.up)
        if mlp.gate is not None:
            self.linear(mlp.gate)
            self.of(mlp.gate.weight.dtype).gate_up(mlp)

    def attention(self, attention: Attention) -> None:
        """An attention layer."""
        linears = (attention.query, attention.key, attention.value, attention.output)
        for linear in linears:
            self.linear(linear)
        dtype = attention.query.weight.dtype
        if any(linear.weight.dtype != dtype for linear in linears):
            raise FusionRefused("linear", "the projections of an attention layer differ in dtype")
        for norm in (attention.query_norm, attention.key_norm):
            if norm is not None:
                self.norm(norm, dtype)
        self.of(dtype).rotary(attention)
        self.of(dtype).attention(attention)

    def layer(self, layer: Layer) -> None:
        """A decoder layer with an MLP."""
        self.attention(layer.attention)
        self.mlp(layer.mlp)
        dtype = layer.attention.query.weight.dtype
        for norm in (layer.attention_norm, layer.attention_out_norm, layer.mlp_norm, layer.mlp_out_norm):
            if norm is not None:
                self.norm(norm, dtype)
        for linear in (layer.attention.output, layer.mlp.down):
            self.of(dtype).linear(linear, residual=True)

    @staticmethod
    def _look_at(linear: Linear) -> None:
        if linear.packed is not None:
            raise FusionRefused("linear", "its weight is in 4 bits")
        if linear.in_features % 2 and linear.weight.dtype != torch.float32:
            raise FusionRefused("linear", "an odd number of 16-bit inputs")


class _LeafKeeper(Gatekeeper):
    @staticmethod
    def _is_hooked(module: nn.Module) -> bool:
        # A forward of its own on the instance is the leaf's.
        return bool(module._forward_hooks or module._forward_pre_hooks or module._backward_hooks)
