"""How decoder layers pass numbers from one of their modules to the next, seen in a forward with random numbers.

What a layer's modules return is replaced by random numbers meanwhile. Wherever those turn up again, alone or in a sum,
no name and no class has to be trusted to say where they went.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from hfpaged.program.description import NotRecognized
from hfpaged.runtime.device.called_by import called_by
from hfpaged.runtime.device.sameness import are_equal

_TOKENS = 5
# Types of arguments that a layer may give its modules by itself.
_CONSTANTS = (bool, int, float, str, type(None))


class PassedCall(NamedTuple):
    """A layer's call of one of its modules with what the call before it returned.

    Attributes:
        keyword: of that argument; None: it is the first one.
        given: other keywords, whose values the layer was given by the same keywords.
        constants: other keywords and what they always are.
    """

    module: nn.Module
    keyword: str | None
    given: frozenset[str]
    constants: Mapping[str, Any]

    def __call__(self, x: torch.Tensor, options: Mapping[str, Any]) -> torch.Tensor:
        """Make the call in a layer that got these options."""
        passed = {name: options[name] for name in self.given}
        args = (x,) if self.keyword is None else ()
        named = {} if self.keyword is None else {self.keyword: x}
        return _first(self.module(*args, **named, **passed, **self.constants))


class LayerFlow(NamedTuple):
    """A layer that computes s = x + before(x), then s + behind(norm(s)).

    Attributes:
        before, behind: calls, each of what the one before it returned.
        options: the keywords that the layer is called with.
    """

    before: tuple[PassedCall, ...]
    norm: nn.Module
    behind: tuple[PassedCall, ...]
    options: frozenset[str]


class _Call(NamedTuple):
    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    result: torch.Tensor


class _Seen:
    """What one layer did in the forward."""

    def __init__(self) -> None:
        self.runs = 0
        self.args: tuple[Any, ...] = ()
        self.kwargs: dict[str, Any] = {}
        self.calls: list[_Call] = []
        self.output: Any = None

    def run(self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The layer's forward. What it has read is spoiled behind it, so that nobody else can have read it later."""
        self.runs += 1
        self.args, self.kwargs = tuple(map(_copy, args)), kwargs
        self.calls = []
        self.output = forward(*args, **kwargs)
        output = _copy(self.output)
        if args and isinstance(args[0], torch.Tensor):
            args[0].fill_(float("nan"))
        return output

    def call(
        self, module: nn.Module, is_attention: bool, forward: Callable[..., Any], args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:  # fmt: skip
        """A call of one of its modules, which returns random numbers. Attention itself needs a step, and is not run."""
        values = (value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor))
        x = next(value for value in values if value.is_floating_point())
        result = torch.randn_like(x)
        copies = {name: _copy(value) if value is x else value for name, value in kwargs.items()}
        self.calls.append(_Call(module, tuple(map(_copy, args)), copies, result.clone()))
        if is_attention:
            return result, None
        own = forward(*args, **kwargs)
        return (result, *own[1:]) if isinstance(own, tuple) else result


def layer_flows(
    model: nn.Module, attention: Iterable[int]
) -> tuple[list[tuple[nn.Module, LayerFlow]], list[NotRecognized]]:
    """The layers of a model around its attention modules, whose ids are given, and what is wrong with the others.

    Waits for the device.
    """
    ids = frozenset(attention)
    layers = [module for module in model.modules() if any(id(child) in ids for child in module.children())]
    seen = {id(layer): _Seen() for layer in layers}
    if not layers:
        return [], []
    try:
        logits = _forward(model, layers, seen, ids)
    except Exception as error:
        first_line = next(iter(str(error).splitlines()), "")
        return [], [NotRecognized(f"its forward fails with random numbers ({type(error).__name__}: {first_line})")]
    if not bool(torch.isfinite(logits).all()):
        return [], [NotRecognized("something else reads what a layer reads")]
    flows, problems = [], []
    for layer in layers:
        try:
            flows.append((layer, _flow_of(seen[id(layer)])))
        except NotRecognized as problem:
            problems.append(problem)
    return flows, problems


def _forward(
    model: nn.Module, layers: Iterable[nn.Module], seen: Mapping[int, _Seen], attention: frozenset[int]
) -> torch.Tensor:
    tokens = torch.arange(_TOKENS, device=model.device)[None]
    with torch.no_grad(), contextlib.ExitStack() as stack:
        for layer in layers:
            stack.enter_context(called_by(layer, seen[id(layer)].run))
            for child in layer.children():
                caller = partial(seen[id(layer)].call, child, id(child) in attention)
                stack.enter_context(called_by(child, caller))
        return model(input_ids=tokens, position_ids=tokens.clone(), use_cache=False, return_dict=True).logits


def _flow_of(seen: _Seen) -> LayerFlow:
    if seen.runs != 1 or len(seen.args) != 1 or not isinstance(seen.output, torch.Tensor):
        raise NotRecognized("it is not called once, with one tensor and options, for one tensor")
    x, calls = seen.args[0], []
    sum_at = total = None
    for index, call in enumerate(seen.calls):
        if index and sum_at is None and _reads(call, seen.args[0] + x):
            sum_at, x = index, seen.args[0] + x
            total = x
        calls.append(_passed(call, x, seen.kwargs))
        x = call.result
    if sum_at is None or not are_equal(total + x, seen.output):
        raise NotRecognized("it does not add its branches to what it reads, one behind the other")
    norm = calls[sum_at]
    if norm.keyword is not None or norm.given or norm.constants:
        raise NotRecognized("what reads the first sum takes options")
    return LayerFlow(tuple(calls[:sum_at]), norm.module, tuple(calls[sum_at + 1 :]), frozenset(seen.kwargs))


def _reads(call: _Call, x: torch.Tensor) -> bool:
    return any(_is_same(value, x) for value in (*call.args, *call.kwargs.values()))


def _passed(call: _Call, x: torch.Tensor, options: Mapping[str, Any]) -> PassedCall:
    keyword = None
    others = dict(call.kwargs)
    if not (len(call.args) == 1 and _is_same(call.args[0], x)):
        keyword = next((name for name, value in others.items() if _is_same(value, x)), None)
        if keyword is None or call.args:
            raise NotRecognized(f"its {type(call.module).__name__} does not read what the module before it returns")
        del others[keyword]
    given = frozenset(name for name, value in others.items() if name in options and options[name] is value)
    constants = {name: value for name, value in others.items() if name not in given}
    if not all(isinstance(value, _CONSTANTS) for value in constants.values()):
        raise NotRecognized(f"its {type(call.module).__name__} gets what the layer makes itself")
    return PassedCall(call.module, keyword, given, constants)


def _is_same(value: Any, x: torch.Tensor) -> bool:
    return isinstance(value, torch.Tensor) and are_equal(value, x)


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value


def _first(result: Any) -> Any:
    return result[0] if isinstance(result, tuple) else result
