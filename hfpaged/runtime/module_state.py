"""What the modules of a tree are and what plain attributes they have, to see later whether anything became of them.

Adapters keep their state (active, disabled, merged, scaling) in such attributes, some of it in containers that they
change in place.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from hfpaged.runtime.patched_class import OWN_PREFIX, unpatched_class

# Kept by nn.Module itself.
_MODULE_INTERNALS = frozenset({*vars(nn.Module()), "_compiled_call_impl"})
# What training and `generate` note on a model. No forward in evaluation mode reads it.
_BOOKKEEPING = frozenset(
    {
        "generation_config", "gradient_checkpointing", "_gradient_checkpointing_func", "_require_grads_hook",
        "_require_grads_hooks", "_previous_max_cache_length", "_last_compile_config", "_compiled_call", "_cache",
        "_output_capturing_hooks_installed",
    }
)  # fmt: skip
_MISSING = object()
_SCALARS = (bool, int, float, complex, str, bytes)


def plain_attributes(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """(name, value) of what is neither a parameter, buffer, child or hook, nor the engine's own."""
    for name, value in vars(module).items():
        if name not in _MODULE_INTERNALS and not name.startswith(OWN_PREFIX):
            yield name, value


def walk_modules(module: nn.Module) -> list[nn.Module]:
    """All modules of the tree, a shared one as often as it is reached: cheaper than `modules()`."""
    found = [module]
    for one in found:
        # Most are leaves, and every submission walks the tree.
        if one._modules:
            found += [child for child in one._modules.values() if child is not None]
    return found


def rebindable_forward(module: nn.Module) -> Callable[..., Any] | None:
    """A forward that compressed-tensors put on the instance; None: it has none.

    It is a function of the module it is bound to and of nothing else: it rounds what goes in and out as the module's
    own attributes say, so bound to a twin it computes the same.
    """
    own = vars(module).get("forward")
    function = getattr(own, "__func__", None)
    if function is None or own.__self__ is not module:
        return None
    # Its __module__ is that of the forward it wraps; its globals tell where it was written.
    return function if str(function.__globals__.get("__name__")).startswith("compressed_tensors.") else None


def has_own(module: nn.Module, method: str) -> bool:
    """Whether `method` of this instance is another than its class has.

    The class's own, bound to the instance, does not count: that is how accelerate leaves modules it took its hooks off.
    Nor does a forward that runs a twin as well (see `rebindable_forward`).
    """
    own = vars(module).get(method)
    if own is None or (method == "forward" and rebindable_forward(module) is not None):
        return False
    return getattr(own, "__self__", None) is not module or own.__func__ is not getattr(type(module), method)


class ModuleState:
    """Identity, class and plain attributes of `module`, which it does not keep alive."""

    __slots__ = ("_attributes", "_class", "_module", "_size")

    def __init__(self, module: nn.Module):
        self._module = weakref.ref(module)
        self._class = unpatched_class(module)
        self._size = len(vars(module))
        self._attributes = {
            name: snapshot(value) for name, value in plain_attributes(module) if name not in _BOOKKEEPING
        }

    def describes(self, module: nn.Module) -> bool:
        """Whether this is the module, with attributes that are the same objects, equal scalars or equal containers."""
        if self._module() is not module:
            return False
        if type(module) is not self._class and unpatched_class(module) is not self._class:
            return False
        now = vars(module)
        for name, then in self._attributes.items():
            value = now.get(name, _MISSING)
            if value is not then and not is_same(value, then):
                return False
        return len(now) == self._size or self._has_no_new(module)

    def _has_no_new(self, module: nn.Module) -> bool:
        return all(name in self._attributes or name in _BOOKKEEPING for name, _ in plain_attributes(module))


def stocks(module: nn.Module, name: str) -> Callable[..., Any]:
    """Transformers' own method of a model, whether it is patched or not."""
    return getattr(unpatched_class(module), name).__get__(module)


def snapshot(value: Any) -> Any:
    """The value, or for a container a copy that changes in place do not reach."""
    if type(value) is dict:
        return {key: snapshot(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(snapshot(item) for item in value)
    return value.copy() if type(value) is set else value


def is_same(now: Any, then: Any) -> bool:
    """Whether a value is the object, the equal scalar or the equal container that `snapshot` was taken of."""
    if now is then:
        return True
    if type(now) is not type(then):
        return False
    if type(now) is dict:
        return len(now) == len(then) and all(key in then and is_same(item, then[key]) for key, item in now.items())
    if type(now) in (list, tuple):
        return len(now) == len(then) and all(map(is_same, now, then))
    return isinstance(now, (set, frozenset, *_SCALARS)) and now == then
