"""One forward of a model with every module call and every attention call recorded.

Recognition reads the data flow of a decoder layer from it: which norm feeds which projection is a question of whose
output tensor is whose input tensor, so no class or attribute name has to be trusted.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, PreTrainedModel

from hfpaged.program.description import NotRecognized

TRACE_ATTENTION = "hfpaged_trace"
_FAR_TOKENS = 9
_FAR = 4096
_TOKENS = 29  # a prime, so that no number of heads can be taken for it


@dataclass
class ModuleCall:
    """One call of a module. Tensors are kept alive, so that equal addresses mean the same memory."""

    module: nn.Module
    name: str
    args: tuple
    kwargs: dict[str, Any]
    output: Any

    @property
    def input(self) -> torch.Tensor | None:
        """The first floating-point tensor among the arguments."""
        return next((value for value in (*self.args, *self.kwargs.values()) if _is_activation(value)), None)

    @property
    def result(self) -> torch.Tensor | None:
        """The output, or the first element of a tuple output, if that is a floating-point tensor."""
        output = self.output[0] if isinstance(self.output, (tuple, list)) and self.output else self.output
        return output if _is_activation(output) else None


@dataclass
class AttentionCall:
    """One call of the attention interface: query [T, H, Dk], key [T, Hkv, Dk], value [T, Hkv, Dv] and the options."""

    module: nn.Module
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    output: torch.Tensor
    scale: float
    window: int
    softcap: float
    sinks: torch.Tensor | None
    options: dict[str, Any]


@dataclass
class Trace:
    """Everything recorded in one forward, in the order the calls ended."""

    token_ids: torch.Tensor
    positions: torch.Tensor
    logits: torch.Tensor
    calls: list[ModuleCall] = field(default_factory=list)
    attention: list[AttentionCall] = field(default_factory=list)

    def calls_of(self, module: nn.Module) -> list[ModuleCall]:
        """Calls of one module."""
        return [call for call in self.calls if call.module is module]


def same_memory(a: torch.Tensor | None, b: torch.Tensor | None) -> bool:
    """Whether both are the same elements in memory, whatever their shapes."""
    return a is not None and b is not None and a.data_ptr() == b.data_ptr() and a.numel() == b.numel()


def trace_forward(model: PreTrainedModel, seed: int = 0) -> Trace:
    """Run one sequence of random tokens through `model`, which must have no hooks of its own, and record it.

    Raises:
        NotRecognized: the forward fails, or its logits are not finite.
    """
    generator = torch.Generator().manual_seed(seed)
    vocab = model.get_input_embeddings().weight.shape[0]
    token_ids = torch.randint(vocab, (1, _TOKENS), generator=generator)
    positions = _positions(model)[None]
    trace = Trace(token_ids[0], positions[0], torch.empty(0))
    with torch.inference_mode(False), torch.no_grad(), _recording(model, trace):
        try:
            output = model(input_ids=token_ids, position_ids=positions, use_cache=False, return_dict=True)
        except NotRecognized:
            raise
        except Exception as error:
            raise NotRecognized(f"tracing its forward failed: {type(error).__name__}: {error}") from error
    trace.logits = output.logits[0]
    if not bool(torch.isfinite(trace.logits).all()):
        raise NotRecognized("its logits for random tokens are not finite")
    return trace


def _positions(model: PreTrainedModel) -> torch.Tensor:
    """Positions 0, 1, ... at first, then some far apart: what changes with the distance from the start must show."""
    known = getattr(model.config.get_text_config(), "max_position_embeddings", None) or _FAR
    near = _TOKENS - _FAR_TOKENS
    last = max(_TOKENS, min(known, _FAR)) - 1
    far = torch.linspace(near, last, _FAR_TOKENS).long()
    return torch.cat([torch.arange(near), far])


@contextlib.contextmanager
def _recording(model: PreTrainedModel, trace: Trace) -> Iterator[None]:
    handles = []
    try:
        for name, module in model.named_modules():
            handles.append(module.register_forward_hook(_recorder(trace, name), with_kwargs=True))
        with _traced_attention(model, trace):
            yield
    finally:
        for handle in handles:
            handle.remove()


def _recorder(trace: Trace, name: str) -> Any:
    def record(module: nn.Module, args: tuple, kwargs: dict[str, Any], output: Any) -> None:
        trace.calls.append(ModuleCall(module, name, args, kwargs, output))

    return record


@contextlib.contextmanager
def _traced_attention(model: PreTrainedModel, trace: Trace) -> Iterator[None]:
    configs = {id(m.config): m.config for m in model.modules() if hasattr(getattr(m, "config", None), "to_dict")}
    before = {key: config._attn_implementation for key, config in configs.items()}
    try:
        for config in configs.values():
            config._attn_implementation = TRACE_ATTENTION
            config._hfpaged_trace = trace
        yield
    finally:
        for key, config in configs.items():
            config._attn_implementation = before[key]
            del config._hfpaged_trace


def _trace_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    query, key, value = (states[0].transpose(0, 1) for states in (query, key, value))
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    call = AttentionCall(
        module, query, key, value, query, scale, int(sliding_window or 0), float(softcap or 0.0), s_aux, options
    )
    call.output = reference_attention(call)[None]
    module.config._hfpaged_trace.attention.append(call)
    return call.output, None


def reference_attention(call: AttentionCall) -> torch.Tensor:
    """Causal attention of one sequence from its start, computed in fp32. Returns [T, H, Dv] contiguous."""
    groups = call.query.shape[1] // call.key.shape[1]
    key, value = (states.float().repeat_interleave(groups, dim=1) for states in (call.key, call.value))
    scores = torch.einsum("qhd,khd->hqk", call.query.float(), key) * call.scale
    if call.softcap:
        scores = torch.tanh(scores / call.softcap) * call.softcap
    index = torch.arange(len(call.query))
    distance = index[:, None] - index[None, :]
    hidden = (distance < 0) | ((distance >= call.window) if call.window else False)
    scores = scores.masked_fill(hidden, float("-inf"))
    if call.sinks is not None:
        sinks = call.sinks.float().reshape(-1, 1, 1).expand(-1, scores.shape[1], 1)
        weights = torch.cat([scores, sinks], dim=-1).softmax(-1)[..., :-1]
    else:
        weights = scores.softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, value).to(call.query.dtype).contiguous()


def _is_activation(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()


AttentionInterface.register(TRACE_ATTENTION, _trace_attention)
