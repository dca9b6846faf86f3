"""What recognition found out about a model: plain data that the assembler turns into operations.

Weights are named by (module, parameter), never by tensor, so that repacking reads what the live module holds then.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from functools import cached_property

import torch
from torch import nn

from hfpaged.errors import HfpagedError
from hfpaged.program.abi import Activation, NormKind, RotaryStyle
from hfpaged.quantization.packed_linear import PackedLinear


class NotRecognized(HfpagedError):
    """The model cannot be compiled into a step program. `reason` says why, in one sentence."""

    def __init__(self, reason: str):
        self.reason = reason
        super().__init__(reason)


def is_linear(module: nn.Module) -> bool:
    """Whether a module is exactly a linear layer, dense or in strips of 4 bits, that takes its input as it is."""
    if type(module) is PackedLinear:
        return module.activation is None and module.is_in_strips
    return type(module) is nn.Linear


@dataclass(frozen=True)
class Linear:
    """Rows of a weight matrix of a live module, in the order the program wants its outputs.

    Attributes:
        module: holds the weight, and the bias if it has one.
        rows: int64 indices of the selected rows; None: all, as they are.
        parameter: name of the weight in the module.
        expert: index into the leading dimension of a three-dimensional weight.
        transposed: the module keeps [in, out].
    """

    module: nn.Module
    rows: torch.Tensor | None = None
    parameter: str = "weight"
    expert: int | None = None
    transposed: bool = False

    @property
    def weight(self) -> torch.Tensor:
        """[out, in] as the live module holds it now; rows not selected yet. Not there if it is packed."""
        weight = getattr(self.module, self.parameter).detach()
        if self.transposed:
            return weight.t()
        return weight if self.expert is None else weight[self.expert]

    @property
    def bias(self) -> torch.Tensor | None:
        """[out], or None."""
        return getattr(self.module, "bias", None) if self.parameter == "weight" else None

    @property
    def packed(self) -> PackedLinear | None:
        """The module, if its weight is in 4 bits."""
        return self.module if isinstance(self.module, PackedLinear) else None

    @property
    def in_features(self) -> int:
        """Inputs."""
        return self.weight.shape[1] if self.packed is None else self.packed.in_features

    @property
    def out_features(self) -> int:
        """Outputs after the selection of rows."""
        if self.rows is not None:
            return len(self.rows)
        return self.weight.shape[0] if self.packed is None else self.packed.out_features


@dataclass(frozen=True)
class Norm:
    """A normalization over `width` elements. gamma is the module's weight plus `gamma_offset`, or ones without one."""

    module: nn.Module
    kind: NormKind
    width: int
    epsilon: float
    gamma_offset: float = 0.0


class TableForm(Enum):
    """How a model multiplies with what its rotary module returns."""

    AS_RETURNED = "as returned"
    FIRST_HALF_REPEATED = "every number of the first half twice in a row"  # GLM
    TWICE = "the whole row twice"  # GPT-OSS


@dataclass(frozen=True)
class Rotation:
    """How queries and keys are rotated.

    Attributes:
        width: dimensions of a head that rotate, from the first one.
        round_products: the module computes in the dtype of its activations, not in fp32.
    """

    style: RotaryStyle
    form: TableForm
    width: int
    round_products: bool


@dataclass(frozen=True)
class RotaryCall:
    """How the model calls its rotary module: the arguments of the traced call, positions replaced when replayed."""

    module: nn.Module
    args: tuple
    kwargs: tuple[tuple[str, object], ...]


@dataclass(frozen=True)
class Attention:
    """One attention layer. `query`, `key` and `value` may be rows of one fused module.

    Attributes:
        window: tokens that are seen, the own one included; 0: all.
        softcap: 0: none.
        sinks: name of the parameter of `module` with one extra logit per head.
        rotary: None where nothing rotates.
    """

    module: nn.Module
    query: Linear
    key: Linear
    value: Linear
    output: Linear
    heads: int
    kv_heads: int
    key_dim: int
    value_dim: int
    scale: float
    window: int
    softcap: float
    sinks: str | None
    query_norm: Norm | None
    key_norm: Norm | None
    rotary: RotaryCall | None
    rotation: Rotation


@dataclass(frozen=True)
class Mlp:
    """A gated (`gate` set) or plain MLP."""

    gate: Linear | None
    up: Linear
    down: Linear
    activation: Activation

    @property
    def linears(self) -> list[Linear]:
        """All of them."""
        return [linear for linear in (self.gate, self.up, self.down) if linear is not None]


@dataclass(frozen=True)
class Experts:
    """A mixture of gated experts behind a softmax router.

    Attributes:
        normalize: the weights of a token's chosen experts add up to 1.
        round_weights: the weights are rounded to the dtype of the activations.
    """

    router: Linear
    experts: tuple[Mlp, ...]
    chosen: int
    normalize: bool
    round_weights: bool

    @property
    def linears(self) -> list[Linear]:
        """All of them."""
        return [self.router, *(linear for expert in self.experts for linear in expert.linears)]


@dataclass(frozen=True)
class Layer:
    """One decoder layer.

    Attributes:
        parallel: attention and MLP both read the layer's input; their sum is added to it.
        shared_norm: in a parallel layer, the MLP reads what attention reads.
        branch_multiplier: factor on each branch before it is added.
    """

    module: nn.Module
    attention: Attention
    mlp: Mlp | Experts
    attention_norm: Norm | None
    attention_out_norm: Norm | None
    mlp_norm: Norm | None
    mlp_out_norm: Norm | None
    parallel: bool
    shared_norm: bool
    branch_multiplier: float


@dataclass(frozen=True)
class LogitScaling:
    """What a model does to its head's output, in this order. 1, 1 and 0: nothing."""

    multiplier: float = 1.0
    divisor: float = 1.0
    softcap: float = 0.0


@dataclass(frozen=True)
class Model:
    """A whole decoder. `embedding_scale` is already rounded to the model's dtype where the model rounds it."""

    dtype: torch.dtype
    hidden_size: int
    embedding: nn.Module
    embedding_scale: float
    layers: tuple[Layer, ...]
    final_norm: Norm
    head: Linear
    logit_scaling: LogitScaling

    @property
    def attention_layers(self) -> tuple[Attention, ...]:
        """The attention part of each layer."""
        return tuple(layer.attention for layer in self.layers)

    @cached_property
    def sampled_weights(self) -> int:
        """Numbers in the weight matrices that only sampled tokens meet: those behind the last layer's attention."""
        last = self.layers[-1]
        linears = [last.attention.output, *last.mlp.linears, self.head]
        return sum(linear.in_features * linear.out_features for linear in linears)
