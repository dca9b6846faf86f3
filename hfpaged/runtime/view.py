"""The engine view: a twin of a live model that shares every parameter and buffer but runs paged attention.

The twin has the same module classes and shares each module's `_parameters` and `_buffers` dictionaries, so whatever
happens to the weights of the live model (optimizer steps, `load_state_dict(assign=True)`, `.half()`) happens to the
twin. It differs in what must not touch the live model: a copy of the config with our attention implementation,
evaluation mode, no hooks, and no rotary frequencies that change with length. The live tree is never switched, so
training, scoring and saving are stock.
"""

from __future__ import annotations

import copy
from types import MethodType
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.configuration_utils import PretrainedConfig

from hfpaged.compat import ATTENTION_NAME
from hfpaged.errors import UnsupportedModelError
from hfpaged.runtime.module_state import (
    ModuleState,
    has_own,
    is_same,
    plain_attributes,
    rebindable_forward,
    snapshot,
    walk_modules,
)
from hfpaged.runtime.paged_attention import StepContext
from hfpaged.runtime.rope import pin_frequencies

Layout = list[tuple[torch.device, torch.dtype, torch.Size]]


class EngineView:
    """Builds and rebuilds the twin of `model`, which it does not keep alive.

    Attributes:
        model: the twin. Only the engine's stepping thread may run it.
        step: what the attention modules of the twin look up during a step.
    """

    def __init__(self, model: PreTrainedModel, original_class: type[PreTrainedModel]):
        self._original_class = original_class
        self._build(model)

    def is_stale(self, model: PreTrainedModel) -> bool:
        """Whether anything that the twin does not share with the live model differs from when it was built.

        That is: a module was replaced, added or removed, a plain attribute (an adapter's state, a scale) or a config
        changed, or the weights have another shape or dtype or are on another device.
        """
        modules = walk_modules(model)
        return (
            len(modules) != len(self._states)
            or not all(state.describes(module) for state, module in zip(self._states, modules, strict=True))
            or _layout(modules) != self._layout
            or not all(is_same(vars(config), then) for config, then in self._configs)
        )

    def refresh(self, model: PreTrainedModel) -> bool:
        """Build another twin if this one is stale.

        Returns:
            Whether it was.

        Raises:
            UnsupportedModelError: what became of the model has no twin.
        """
        if not self.is_stale(model):
            return False
        self._build(model)
        return True

    def _build(self, model: PreTrainedModel) -> None:
        builder = _TwinBuilder()
        twin = builder.twin(model, self._original_class)
        if twin.config._attn_implementation != ATTENTION_NAME:
            raise UnsupportedModelError([f"its config refuses the attention implementation {ATTENTION_NAME!r}"])
        modules = walk_modules(model)
        self.model: PreTrainedModel = twin
        self.step = builder.step
        self._states = [ModuleState(module) for module in modules]
        self._layout = _layout(modules)
        self._configs = [(config, snapshot(vars(config))) for config in builder.live_configs]


class _TwinBuilder:
    """Makes one twin: a module or config that is reached twice stays one object."""

    def __init__(self) -> None:
        self.step = StepContext()
        self.live_configs: list[PretrainedConfig] = []
        self._copied_configs: dict[int, Any] = {}
        self._twins: dict[int, nn.Module] = {}

    def twin(self, live: nn.Module, cls: type[nn.Module] | None = None) -> nn.Module:
        """The twin of a live module, an instance of `cls` or else of the same class."""
        if id(live) in self._twins:
            return self._twins[id(live)]
        if has_own(live, "forward"):
            raise UnsupportedModelError([f"forward of {type(live).__name__} was replaced on the instance"])
        twin = object.__new__(cls or type(live))
        self._twins[id(live)] = twin
        state = twin.__dict__
        state.update(vars(nn.Module()))
        for name, value in plain_attributes(live):
            if name != "forward":
                state[name] = self._config(value) if isinstance(value, PretrainedConfig) else value
        wrapper = rebindable_forward(live)
        if wrapper is not None:
            state["forward"] = MethodType(wrapper, twin)
        state.update(
            _parameters=live._parameters,
            _buffers=live._buffers,
            _non_persistent_buffers_set=live._non_persistent_buffers_set,
            _modules={name: None if child is None else self.twin(child) for name, child in live._modules.items()},
            training=False,
            _hfpaged_step=self.step,
        )
        pin_frequencies(twin)
        return twin

    def _config(self, live: PretrainedConfig) -> PretrainedConfig:
        if not any(config is live for config in self.live_configs):
            self.live_configs.append(live)
            # One memo for all: a sub-config reached from two places stays one object.
            copied = copy.deepcopy(live, self._copied_configs)
            copied._attn_implementation = ATTENTION_NAME
            # Forwards that know of one look at every input, on the host, to warn of padding. There is none here.
            copied.pad_token_id = None
        return self._copied_configs[id(live)]


def _layout(modules: list[nn.Module]) -> Layout:
    """What everything made for the weights depends on, beside their content."""
    return [
        (parameter.device, parameter.dtype, parameter.shape)
        for module in modules
        for parameter in module._parameters.values()
        if parameter is not None
    ]
