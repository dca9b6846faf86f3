"""Recognizes a mixture of experts from the traced calls of its router and its experts module."""

from __future__ import annotations

import torch
from torch.nn import functional

from hfpaged.program.description import Experts, Linear, Mlp, NotRecognized
from hfpaged.program.recognize_mlp import ACTIVATIONS
from hfpaged.program.trace import ModuleCall

_MAX_EXPERTS = 1024
_GATE_UP, _DOWN = "gate_up_proj", "down_proj"


def find_experts_call(calls: list[ModuleCall]) -> ModuleCall | None:
    """The call of a module with three-dimensional gate, up and down weights, if the layer has one."""
    for call in calls:
        parameters = dict(call.module.named_parameters(recurse=False))
        if all(name in parameters and parameters[name].dim() == 3 for name in (_GATE_UP, _DOWN)):
            return call
    return None


def recognize_experts(call: ModuleCall, calls: list[ModuleCall]) -> Experts:
    """Describe the experts of `call`, one of the `calls` of its layer.

    Raises:
        NotRecognized: routing or experts follow another formula.
    """
    names = {name for name, _ in call.module.named_parameters(recurse=False)}
    if names != {_GATE_UP, _DOWN} or len(call.args) != 3:
        raise NotRecognized(f"{call.name} has other parameters or arguments than gated experts without biases")
    hidden, indices, weights = call.args
    router = _router_call(call, calls)
    normalize, round_weights = _routing_formula(router, indices, weights)
    count = call.module.gate_up_proj.shape[0]
    if count > _MAX_EXPERTS:
        raise NotRecognized(f"{call.name} has more than {_MAX_EXPERTS} experts")
    return Experts(
        router=Linear(router.module),
        experts=_identify_experts(call, hidden, indices, weights),
        chosen=indices.shape[-1],
        normalize=normalize,
        round_weights=round_weights,
    )


def _router_call(call: ModuleCall, calls: list[ModuleCall]) -> ModuleCall:
    indices = call.args[1]
    for router in calls:
        if isinstance(router.output, tuple) and any(part is indices for part in router.output):
            parameters = dict(router.module.named_parameters(recurse=False))
            if set(parameters) == {"weight"}:
                return router
    raise NotRecognized(f"{call.name}: no router with a single weight chose its experts")


def _routing_formula(router: ModuleCall, indices: torch.Tensor, weights: torch.Tensor) -> tuple[bool, bool]:
    """(normalize, round_weights) of a softmax router."""
    x = router.input.reshape(-1, router.input.shape[-1])
    logits = functional.linear(x, router.module.weight.detach())
    probabilities = logits.float().softmax(-1)
    top, chosen = probabilities.topk(indices.shape[-1], dim=-1)
    if not torch.equal(chosen.sort(-1).values, indices.sort(-1).values):
        raise NotRecognized(f"{router.name} does not choose by the softmax of its logits")
    top = probabilities.gather(-1, indices)
    for normalize in (True, False):
        candidate = top / top.sum(-1, keepdim=True) if normalize else top
        if torch.allclose(candidate.to(weights.dtype).float(), weights.float(), rtol=1e-5, atol=1e-7):
            return normalize, weights.dtype == x.dtype
    raise NotRecognized(f"{router.name} weights the chosen experts in an unknown way")


def _identify_experts(
    call: ModuleCall, hidden: torch.Tensor, indices: torch.Tensor, weights: torch.Tensor
) -> tuple[Mlp, ...]:
    """Which half of the fused weight is the gate, and the activation: what comes closest for the first token."""
    module = call.module
    inner = module.down_proj.shape[2]
    halves = torch.arange(2 * inner).split(inner)
    alternated = (torch.arange(0, 2 * inner, 2), torch.arange(1, 2 * inner, 2))
    x, expected = hidden.reshape(-1, hidden.shape[-1])[0].float(), call.result.reshape(-1, hidden.shape[-1])[0].float()
    best = None
    for gate_rows, up_rows in (halves, halves[::-1], alternated, alternated[::-1]):
        for activation, function in ACTIVATIONS.items():
            total = torch.zeros_like(expected)
            for expert, weight in zip(indices[0].tolist(), weights[0].float().tolist(), strict=True):
                fused = functional.linear(x, module.gate_up_proj[expert].detach().float())
                y = function(fused[gate_rows]) * fused[up_rows]
                total += functional.linear(y, module.down_proj[expert].detach().float()) * weight
            error = (total - expected).norm().item()
            if best is None or error < best[0]:
                best = (error, gate_rows, up_rows, activation)
    error, gate_rows, up_rows, activation = best
    if error > 0.05 * expected.norm().item():
        raise NotRecognized(f"{call.name}: its experts are no gated MLPs with a known activation")
    return tuple(
        Mlp(
            Linear(module, gate_rows, _GATE_UP, expert),
            Linear(module, up_rows, _GATE_UP, expert),
            Linear(module, None, _DOWN, expert),
            activation,
        )
        for expert in range(module.gate_up_proj.shape[0])
    )
