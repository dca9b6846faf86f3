"""Recognizes one attention layer from its traced call: projections, norms of queries and keys, rotation, options."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn

from hfpaged.compat import CACHE_NAMES
from hfpaged.program.abi import RotaryStyle
from hfpaged.program.description import Attention, Linear, Norm, NotRecognized, is_linear
from hfpaged.program.norms import identify_norm
from hfpaged.program.rotary import find_rotary_call, identify_rotation
from hfpaged.program.trace import AttentionCall, ModuleCall, Trace, same_memory

# Options of the attention interface that change nothing for a causal, packed, inference-only step.
_NEUTRAL_OPTIONS = frozenset({"position_ids", "position_embeddings", "layer_idx", "cache_position", *CACHE_NAMES})


@dataclass
class _Projection:
    """A linear module (or rows of one) and its traced output, [T, out]."""

    linear: Linear
    output: torch.Tensor
    memory: torch.Tensor | None  # the module's own result, when these are all of its rows


def recognize_attention(trace: Trace, call: AttentionCall) -> Attention:
    """Describe the layer of `call`.

    Raises:
        NotRecognized: the program has no operation for what happens between projections and attention.
    """
    _require_known_options(call)
    own = _only_call(trace, call.module)
    linears = [inner for inner in calls_inside(trace, own) if is_linear(inner.module)]
    output = next((inner for inner in linears if same_memory(inner.input, call.output)), None)
    if output is None:
        raise NotRecognized(f"{own.name}: no output projection reads what attention returns")
    projections = [inner for inner in linears if same_memory(inner.input, own.input)]
    if len(projections) + 1 != len(linears):
        raise NotRecognized(f"{own.name} has linear modules beside its query, key, value and output projections")
    query, key, value = _split_projections(own.name, projections, call)
    query_norm, query_state = _after_norm(trace, own, query, call.query)
    key_norm, key_state = _after_norm(trace, own, key, call.key)
    cosine, sine = _position_embeddings(own) or (query_state.new_empty(0), query_state.new_empty(0))
    table = [part.reshape(len(call.query), -1) for part in (cosine, sine)]
    rotations = [identify_rotation(*pair, *table) for pair in ((query_state, call.query), (key_state, call.key))]
    if rotations[0] is None or rotations[0] != rotations[1]:
        raise NotRecognized(f"{own.name} changes queries or keys in an unknown way before it attends")
    rotates = rotations[0].style != RotaryStyle.NONE
    return Attention(
        module=call.module,
        query=query.linear,
        key=key.linear,
        value=value.linear,
        output=Linear(output.module),
        heads=call.query.shape[1],
        kv_heads=call.key.shape[1],
        key_dim=call.key.shape[2],
        value_dim=call.value.shape[2],
        scale=call.scale,
        window=call.window,
        softcap=call.softcap,
        sinks=_sinks_name(call),
        query_norm=query_norm,
        key_norm=key_norm,
        rotary=find_rotary_call(trace, cosine) if rotates else None,
        rotation=rotations[0],
    )


def calls_inside(trace: Trace, outer: ModuleCall) -> list[ModuleCall]:
    """Calls of the modules below the one of `outer`."""
    return [call for call in trace.calls if call.name.startswith(outer.name + ".")]


def _only_call(trace: Trace, module: nn.Module) -> ModuleCall:
    calls = trace.calls_of(module)
    if len(calls) != 1:
        raise NotRecognized(f"{type(module).__name__} runs {len(calls)} times in a forward")
    return calls[0]


def _sinks_name(call: AttentionCall) -> str | None:
    if call.sinks is None:
        return None
    for name, parameter in call.module.named_parameters(recurse=False):
        if same_memory(parameter, call.sinks):
            return name
    raise NotRecognized("its attention sinks are no parameter of the attention module")


def _require_known_options(call: AttentionCall) -> None:
    unknown = sorted(
        name
        for name, value in call.options.items()
        if name not in _NEUTRAL_OPTIONS and value is not None and not isinstance(value, (bool, str))
    )
    if unknown or call.options.get("is_causal") is False:
        raise NotRecognized(f"{type(call.module).__name__} attends with {', '.join(unknown) or 'is_causal=False'}")


def _split_projections(
    name: str, calls: list[ModuleCall], attention: AttentionCall
) -> tuple[_Projection, _Projection, _Projection]:
    shapes = (attention.query, attention.key, attention.value)
    if len(calls) == 1:
        return _split_fused(name, calls[0], attention)
    if len(calls) != 3:
        raise NotRecognized(f"{name} has {len(calls)} input projections instead of 1 or 3")
    values = [call for call in calls if _equals(_flat(call.result), attention.value)]
    if not values:
        raise NotRecognized(f"{name}: no projection gives the values that attention gets")
    # Modules run in the order query, key, value wherever the sizes leave a choice; verification would show otherwise.
    query, key = (call for call in calls if call is not values[-1])
    if _flat(query.result).shape[1] != shapes[0].shape[1] * shapes[0].shape[2]:
        query, key = key, query
    return tuple(_whole(call) for call in (query, key, values[-1]))


def _whole(call: ModuleCall) -> _Projection:
    return _Projection(Linear(call.module), _flat(call.result), call.result)


def _split_fused(name: str, call: ModuleCall, attention: AttentionCall) -> tuple[_Projection, _Projection, _Projection]:
    output = _flat(call.result)
    for layout in _fused_layouts(attention):
        if max(int(rows.max()) for rows in layout) < output.shape[1] and _equals(output[:, layout[2]], attention.value):
            return tuple(_Projection(Linear(call.module, rows), output[:, rows], None) for rows in layout)
    raise NotRecognized(f"{name} lays queries, keys and values out in an unknown order")


def _fused_layouts(attention: AttentionCall) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Rows of queries, keys and values in a fused projection: one after the other, or a group of heads at a time."""
    heads, kv_heads = attention.query.shape[1], attention.key.shape[1]
    key_dim, value_dim = attention.key.shape[2], attention.value.shape[2]
    sizes = (heads * key_dim, kv_heads * key_dim, kv_heads * value_dim)
    yield torch.arange(sum(sizes)).split(sizes)
    per_group = (heads // kv_heads * key_dim, key_dim, value_dim)
    grouped = torch.arange(sum(sizes)).reshape(kv_heads, sum(per_group))
    yield tuple(rows.flatten() for rows in grouped.split(per_group, dim=1))


def _after_norm(
    trace: Trace, own: ModuleCall, projection: _Projection, attended: torch.Tensor
) -> tuple[Norm | None, torch.Tensor]:
    """The norm that follows a projection, and the state [T, heads, dim] that goes on to the rotation."""
    tokens, heads, dim = attended.shape
    for call in calls_inside(trace, own):
        if not is_linear(call.module) and same_memory(call.input, projection.memory):
            width = call.input.shape[-1]
            if width not in (dim, heads * dim):
                raise NotRecognized(f"{call.name} normalizes neither heads nor whole rows")
            return identify_norm(call.module, width, attended.dtype), _token_major(call.result, tokens, heads, dim)
    return None, projection.output.reshape(tokens, heads, dim)


def _token_major(state: torch.Tensor, tokens: int, heads: int, dim: int) -> torch.Tensor:
    if state.dim() == 4 and state.shape[1:] == (heads, tokens, dim):
        state = state.transpose(1, 2)
    return state.reshape(tokens, heads, dim)


def _position_embeddings(own: ModuleCall) -> tuple[torch.Tensor, torch.Tensor] | None:
    for value in (*own.kwargs.values(), *own.args):
        if isinstance(value, tuple) and len(value) == 2 and all(isinstance(part, torch.Tensor) for part in value):
            return value
    return None


def _flat(result: torch.Tensor) -> torch.Tensor:
    return result.reshape(-1, result.shape[-1])


def _equals(flat: torch.Tensor, states: torch.Tensor) -> bool:
    """Whether [T, heads * dim] holds exactly the numbers of [T, heads, dim]."""
    return flat.shape[1] == states[0].numel() and torch.equal(flat.reshape(states.shape), states)
