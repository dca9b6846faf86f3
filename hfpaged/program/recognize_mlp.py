"""Recognizes an MLP from the traced calls of its linear modules."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn import functional

from hfpaged.program.abi import Activation
from hfpaged.program.description import Linear, Mlp, NotRecognized, is_linear
from hfpaged.program.trace import ModuleCall, same_memory

ACTIVATIONS: dict[Activation, Callable[[torch.Tensor], torch.Tensor]] = {
    Activation.SILU: functional.silu,
    Activation.GELU_ERF: functional.gelu,
    Activation.GELU_TANH: lambda x: functional.gelu(x, approximate="tanh"),
    Activation.RELU: functional.relu,
}
# Largest difference in units of the dtype's epsilon, relative to the largest number: an activation written in Python
# rounds after every operation where the program rounds once.
_TOLERANCE = 4.0


def recognize_mlp(name: str, calls: list[ModuleCall]) -> Mlp:
    """Describe the MLP of layer `name` whose linear modules ran as `calls`, the last one being the down projection.

    Raises:
        NotRecognized: the input of the down projection is no known activation of the others' outputs.
    """
    if any(not is_linear(call.module) for call in calls) or len(calls) not in (2, 3):
        raise NotRecognized(f"{name}: its MLP has {len(calls)} linear modules instead of 2 or 3")
    *inputs, down = calls
    if any(not same_memory(call.input, inputs[0].input) for call in inputs):
        raise NotRecognized(f"{name}: the projections of its MLP read different inputs")
    product = down.input.reshape(-1, down.input.shape[-1])
    for gate, up in _arrangements(inputs, product.shape[1]):
        activation = _matching_activation(gate, up, inputs, product)
        if activation is not None:
            return Mlp(gate, up, Linear(down.module), activation)
    raise NotRecognized(f"{name}: its MLP is no known activation of its projections")


def _arrangements(inputs: list[ModuleCall], width: int) -> list[tuple[Linear | None, Linear]]:
    """Which projection (or which half of a fused one) may be the gate, and which the other factor."""
    if len(inputs) == 2:
        first, second = (Linear(call.module) for call in inputs)
        return [(first, second), (second, first)]
    module = inputs[0].module
    if module.out_features == width:
        return [(None, Linear(module))]
    if module.out_features == 2 * width:
        first, second = (Linear(module, rows) for rows in torch.arange(2 * width).split(width))
        return [(first, second), (second, first)]
    return []


def _matching_activation(
    gate: Linear | None, up: Linear, inputs: list[ModuleCall], product: torch.Tensor
) -> Activation | None:
    def output_of(linear: Linear) -> torch.Tensor:
        result = next(call.result for call in inputs if call.module is linear.module)
        flat = result.reshape(-1, result.shape[-1])
        return flat if linear.rows is None else flat[:, linear.rows]

    errors = {}
    for activation, function in ACTIVATIONS.items():
        expected = function(output_of(up)) if gate is None else function(output_of(gate)) * output_of(up)
        errors[activation] = (expected.float() - product.float()).abs().max().item()
    best = min(errors, key=errors.__getitem__)
    limit = _TOLERANCE * torch.finfo(product.dtype).eps * product.float().abs().max().item()
    return best if errors[best] <= limit else None
