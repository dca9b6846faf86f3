"""The engine view: a twin of a live model that shares every parameter and buffer but runs paged attention.

The twin has the same module classes and shares each module's `_parameters` and `_buffers` dictionaries, so whatever
happens to the weights of the live model (optimizer steps, `load_state_dict(assign=True)`, `.half()`) happens to the
twin. It differs in what must not touch the live model: a copy of the config with our attention implementation,
evaluation mode, and no hooks. The live tree is never switched, so training, scoring and saving are stock.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

from torch import nn
from transformers import PreTrainedModel
from transformers.configuration_utils import PretrainedConfig

from hfpaged.compat import ATTENTION_NAME
from hfpaged.errors import UnsupportedModelError
from hfpaged.runtime.step import StepContext

HOOK_DICTS = tuple(
    name for name in vars(nn.Module()) if name.endswith(("_hooks", "_hooks_with_kwargs", "_hooks_always_called"))
)
PRIVATE_ATTRIBUTES = frozenset({"_modules", "training", "_compiled_call_impl", *HOOK_DICTS})


class EngineView:
    """Builds and refreshes the twin of `model`.

    Attributes:
        model: the twin. Only the engine's stepping thread may run it.
        step: what the attention modules of the twin look up during a step.
    """

    def __init__(self, model: PreTrainedModel, original_class: type[PreTrainedModel]):
        self._original_class = original_class
        self.step = StepContext()
        self._build(model)

    def is_stale(self, model: PreTrainedModel) -> bool:
        """Whether a module was replaced, added or removed, or a config changed, so that `refresh` would rebuild."""
        return self._structure(model) != self._built_structure or self._config_state() != self._built_config

    def refresh(self, model: PreTrainedModel) -> bool:
        """Follow changes of the live model that sharing alone does not carry over.

        Plain attributes (an adapter's `scaling` or `merged` state, for example) are copied again. The twin is rebuilt
        when a module was replaced, added or removed, or when the config changed.

        Returns:
            True if anything had changed.
        """
        if self.is_stale(model):
            self.step = StepContext()
            self._build(model)
            return True
        return any([self._copy_attributes(live, twin) for live, twin in self._pairs])

    def _build(self, model: PreTrainedModel) -> None:
        self._config_memo: dict[int, Any] = {}
        self._configs: dict[int, PretrainedConfig] = {}
        self._pairs: list[tuple[nn.Module, nn.Module]] = []
        self._twins: dict[int, nn.Module] = {}
        self.model: PreTrainedModel = self._twin(model, self._original_class)
        self._built_structure = self._structure(model)
        self._built_config = self._config_state()
        if self.model.config._attn_implementation != ATTENTION_NAME:
            raise UnsupportedModelError([f"its config refuses the attention implementation {ATTENTION_NAME!r}"])

    def _twin(self, live: nn.Module, cls: type[nn.Module] | None = None) -> nn.Module:
        if id(live) in self._twins:
            return self._twins[id(live)]
        twin = object.__new__(cls or type(live))
        self._twins[id(live)] = twin
        self._pairs.append((live, twin))
        state = twin.__dict__
        for name in HOOK_DICTS:
            state[name] = OrderedDict()
        state["training"] = False
        self._copy_attributes(live, twin)
        state["_hfpaged_step"] = self.step
        state["_modules"] = {
            name: None if child is None else self._twin(child) for name, child in live._modules.items()
        }
        return twin

    def _copy_attributes(self, live: nn.Module, twin: nn.Module) -> bool:
        changed = False
        state = twin.__dict__
        for name, value in live.__dict__.items():
            if name in PRIVATE_ATTRIBUTES or name.startswith("_hfpaged"):
                continue
            if isinstance(value, PretrainedConfig):
                value = self._copied_config(value)
            if state.get(name, state) is not value:
                state[name] = value
                changed = True
        return changed

    def _copied_config(self, config: PretrainedConfig) -> PretrainedConfig:
        if id(config) not in self._configs:
            # One memo for all: a sub-config reached from two places stays one object.
            copied = copy.deepcopy(config, self._config_memo)
            copied._attn_implementation = ATTENTION_NAME
            self._configs[id(config)] = config
        return self._config_memo[id(config)]

    def _config_state(self) -> list[dict[str, Any]]:
        return [dict(vars(config)) for config in self._configs.values()]

    @staticmethod
    def _structure(model: nn.Module) -> list[int]:
        return [id(module) for module in _walk(model)]


def _walk(module: nn.Module) -> Iterator[nn.Module]:
    """All modules of the tree, a shared one as often as it is reached: cheaper than `modules()`, and order counts."""
    yield module
    for child in module._modules.values():
        if child is not None:
            yield from _walk(child)
