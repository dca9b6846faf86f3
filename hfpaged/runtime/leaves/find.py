"""Finds the modules of a view that can be leaves, in one traced forward of it."""

from __future__ import annotations

import logging
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from hfpaged.fusion.registry import FusionRefused
from hfpaged.program.description import Attention, Mlp, NotRecognized
from hfpaged.program.norms import identify_norm
from hfpaged.program.recognize_attention import recognize_attention
from hfpaged.program.recognize_layer import LayerReader, layer_call
from hfpaged.program.recognize_mlp import recognize_mlp
from hfpaged.program.trace import AttentionCall, ModuleCall, Trace, same_memory
from hfpaged.runtime.leaves.admission import LeafGate
from hfpaged.runtime.leaves.attention_leaf import AttentionLeaf
from hfpaged.runtime.leaves.head_leaf import HeadLeaf
from hfpaged.runtime.leaves.kernels import LeafKernels
from hfpaged.runtime.leaves.layer_leaf import LayerLeaf
from hfpaged.runtime.leaves.leaf import Leaf, own_forward
from hfpaged.runtime.leaves.linear_leaf import LINEAR_CLASSES, LinearLeaf, linear_of
from hfpaged.runtime.leaves.mlp_leaf import MlpLeaf
from hfpaged.runtime.leaves.norm_leaf import NormLeaf

logger = logging.getLogger(__name__)

_EPSILONS = ("variance_epsilon", "eps", "epsilon")


class LeafFinder:
    """Builds the leaves of `model`, the largest first: decoder layers, then attention layers and MLPs, then the rest.

    Attributes:
        refusals: how many modules keep their own forward, by "kind: reason". A decoder layer is none of them: its
            parts are, if they do.
    """

    def __init__(self, model: PreTrainedModel, trace: Trace, gate: LeafGate, kernels: LeafKernels):
        self.refusals: Counter[str] = Counter()
        self._model, self._trace = model, trace
        self._gate, self._kernels = gate, kernels
        self._names = {module: name for name, module in model.named_modules()}
        self._calls: dict[nn.Module, list[ModuleCall]] = defaultdict(list)
        self._order = {id(call): index for index, call in enumerate(trace.calls)}
        for call in trace.calls:
            self._calls[call.module].append(call)
        self._wrapped = {module for module in self._names if self._is_wrapped(module)}
        self._covered: set[nn.Module] = set()
        self._leaves: list[Leaf] = []

    def find(self, excluded: Iterable[nn.Module]) -> list[Leaf]:
        """All leaves but those of `excluded` modules, whose parts may be leaves nevertheless."""
        excluded, self._covered, self._leaves = set(excluded), set(), []
        for call in self._trace.attention:
            self._find_layer(call, excluded)
        for call in self._trace.attention:
            if call.module not in self._covered | excluded:
                self._try("attention", lambda call=call: self._attention(call))
        for module in self._model.modules():
            inner = self._mlp_calls(module)
            if inner and module not in self._covered | excluded:
                self._try("mlp", lambda module=module, inner=inner: self._mlp(module, inner))
        self._covered |= excluded
        for module in self._names:
            if module not in self._covered and self._may_be_norm(module):
                self._try("norm", lambda module=module: self._norm(module))
        self._find_head()
        for group in self._linear_groups():
            self._try("linear", lambda group=group: LinearLeaf(group, self._gate, self._kernels))
        return self._leaves

    def _try(self, kind: str, build: Callable[[], Leaf]) -> None:
        """Add a leaf. Whatever goes wrong, its modules run as they are."""
        try:
            leaf = build()
        except (FusionRefused, NotRecognized) as refused:
            self.refuse(kind, refused.reason)
        except Exception as error:
            self.refuse(kind, f"{type(error).__name__}: {error}")
        else:
            self._take(leaf)

    def _take(self, leaf: Leaf) -> None:
        self._leaves.append(leaf)
        for module in leaf.modules.values():
            self._covered.update(module.modules())

    def is_layer(self, module: nn.Module) -> bool:
        """Whether it is a decoder layer, whose parts are looked at one by one if it is no leaf."""
        return any(call.module in module.modules() and call.module is not module for call in self._trace.attention)

    def refuse(self, kind: str, reason: str) -> None:
        """Count a module that stays as it is; those of all layers together."""
        self.refusals[f"{kind}: {re.sub(r'[.][0-9]+[.]', '.*.', reason)}"] += 1

    def _find_layer(self, traced: AttentionCall, excluded: set[nn.Module]) -> None:
        """Take the whole decoder layer around an attention layer, if it is nothing but what leaves consist of."""
        try:
            call = layer_call(self._trace, traced)
            if call.module not in excluded:
                self._take(self._layer(call, traced))
        except (FusionRefused, NotRecognized) as refused:
            logger.debug("%s keeps its own forward: %s", type(traced.module).__name__, refused.reason)

    def _layer(self, call: ModuleCall, traced: AttentionCall) -> Leaf:
        layer = LayerReader(self._trace, call, traced).read()
        if not isinstance(layer.mlp, Mlp):
            raise NotRecognized(f"{call.name} has experts")
        norms = (layer.attention_norm, layer.attention_out_norm, layer.mlp_norm, layer.mlp_out_norm)
        linears = (layer.mlp.gate, layer.mlp.up, layer.mlp.down)
        parts = [part.module for part in (*norms, *linears) if part is not None]
        self._require_no_more(call.module, [*parts, *_parts_of_attention(layer.attention)])
        return LayerLeaf(layer, call, self._gate, self._kernels)

    def _attention(self, traced: AttentionCall) -> Leaf:
        attention = recognize_attention(self._trace, traced)
        self._require_no_more(attention.module, _parts_of_attention(attention))
        call = self._calls[attention.module][0]
        return AttentionLeaf(attention, call, self._gate, self._kernels)

    def _mlp_calls(self, module: nn.Module) -> list[ModuleCall] | None:
        """Calls of the two or three linear modules right below `module`, in order, if it may be an MLP."""
        calls = [call for child in module.children() if type(child) is nn.Linear for call in self._calls[child]]
        if len(self._calls[module]) != 1 or len(calls) not in (2, 3):
            return None
        own = self._calls[module][0]
        calls.sort(key=lambda call: self._order[id(call)])
        whole = same_memory(calls[0].input, own.input) and same_memory(calls[-1].result, own.result)
        return calls if whole and _has_one_argument(own) else None

    def _mlp(self, module: nn.Module, inner: list[ModuleCall]) -> Leaf:
        self._require_no_more(module, [call.module for call in inner])
        mlp = recognize_mlp(type(module).__name__, inner)
        return MlpLeaf(self._names[module], module, mlp, self._gate, self._kernels)

    def _may_be_norm(self, module: nn.Module) -> bool:
        calls = self._calls[module]
        if not calls or not any(hasattr(module, name) for name in _EPSILONS) or next(module.children(), None):
            return False
        return all(_has_one_argument(call) and call.input is call.args[0] for call in calls)

    def _norm(self, module: nn.Module) -> Leaf:
        self._require_unwrapped(module)
        kinds = {(call.input.shape[-1], call.input.dtype) for call in self._calls[module]}
        if len(kinds) > 1:
            raise NotRecognized(f"{type(module).__name__} is given rows of different widths or dtypes")
        width, dtype = kinds.pop()
        norm = identify_norm(module, width, dtype)
        return NormLeaf(self._names[module], norm, dtype, self._gate, self._kernels)

    def _find_head(self) -> None:
        """The head has a native argmax where its output is the logits, or a cast of them."""
        head = self._model.get_output_embeddings()
        calls = self._calls[head]
        if type(head) is not nn.Linear or len(calls) != 1 or not _has_one_argument(calls[0]) or head in self._covered:
            return
        logits = self._trace.logits
        if torch.equal(calls[0].result.reshape(logits.shape).to(logits.dtype), logits):
            self._try("head", lambda: self._head(head))

    def _head(self, head: nn.Module) -> Leaf:
        self._require_unwrapped(head)
        return HeadLeaf(self._names[head], head, self._gate, self._kernels)

    def _linear_groups(self) -> Iterator[dict[str, nn.Module]]:
        """Linear modules that no other leaf covers, with those that were given the same tensor."""
        groups: dict[object, dict[str, nn.Module]] = defaultdict(dict)
        for module, name in self._names.items():
            if module in self._covered or not isinstance(module, LINEAR_CLASSES):
                continue
            if type(module) not in LINEAR_CLASSES:
                self.refuse("linear", f"it is a {type(module).__name__}")
            elif not all(_has_one_argument(call) for call in self._calls[module]):
                self.refuse("linear", "it is not called with one positional argument")
            elif self._is_admitted(module):
                calls = self._calls[module]
                shared = len(calls) == 1
                key = (id(calls[0].args[0]), module.weight.dtype) if shared else module
                groups[key][name] = module
        yield from groups.values()

    def _is_admitted(self, module: nn.Module) -> bool:
        try:
            self._require_unwrapped(module)
            self._gate.linear(linear_of(module))
        except (FusionRefused, NotRecognized) as refused:
            self.refuse("linear", refused.reason)
            return False
        return True

    def _is_wrapped(self, module: nn.Module) -> bool:
        """Whether it has a forward of its own that may do more than its class's: rounding, for a quantized model."""
        if "forward" not in vars(module):
            return False
        if module._modules or not self._calls[module]:
            return True
        own = own_forward(module)
        with torch.inference_mode(False), torch.no_grad():
            return not all(_equals(own(*call.args, **call.kwargs), call.output) for call in self._calls[module])

    def _require_unwrapped(self, module: nn.Module) -> None:
        wrapped = next((part for part in module.modules() if part in self._wrapped), None)
        if wrapped is not None:
            raise NotRecognized(f"a {type(wrapped).__name__} has a forward of its own")

    def _require_no_more(self, module: nn.Module, parts: Iterable[nn.Module]) -> None:
        """Refuse a module with parameters beside those of `parts`: its description may not be all of it.

        Nor is it where a module in it does more than its class.
        """
        self._require_unwrapped(module)
        known = {id(parameter) for part in parts for parameter in part.parameters(recurse=False)}
        if not known.issuperset(id(parameter) for parameter in module.parameters()):
            raise NotRecognized(f"{type(module).__name__} has more parameters than were recognized")


def _parts_of_attention(attention: Attention) -> list[nn.Module]:
    """The modules whose own parameters are those of an attention layer."""
    linears = (attention.query, attention.key, attention.value, attention.output)
    norms = [norm for norm in (attention.query_norm, attention.key_norm) if norm is not None]
    return [*([attention.module] if attention.sinks else []), *(part.module for part in (*linears, *norms))]


def _equals(one: Any, other: Any) -> bool:
    return isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor) and torch.equal(one, other)


def _has_one_argument(call: ModuleCall) -> bool:
    return len(call.args) == 1 and not call.kwargs
