"""Which LoRA adapter each row of a call goes through: `hfpaged={"adapter": ...}`, or PEFT's own `adapter_names`."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from hfpaged.compat import hooked_adapter_names
from hfpaged.errors import UnsupportedOptionError
from hfpaged.generation.call import GenerateCall
from hfpaged.runtime.adapters import adapter_layers, check_adapter


def row_adapters(model: nn.Module, call: GenerateCall) -> list[str] | None:
    """One adapter name a row; None: all rows go through those that are active.

    Raises:
        InputError, UnsupportedOptionError: an adapter is unknown or cannot be mixed, or their number is neither that of
            the prompts nor that of the rows.
    """
    names = call.options.adapter
    if names is None:
        return None
    if isinstance(names, str):
        names = [names] * call.num_rows
    repeats = max(1, call.config.num_beams or 1, call.config.num_return_sequences or 1)
    if len(names) * repeats == call.num_rows:
        names = [name for name in names for _ in range(repeats)]
    if len(names) != call.num_rows:
        raise UnsupportedOptionError(f"{len(names)} adapters were given for {call.num_rows // repeats} prompts")
    for name in set(names):
        check_adapter(model, name)
    return list(names)


def carry_names(kwargs: dict[str, Any], names: list[str]) -> None:
    """Put PEFT's names among the options of a call of `generate` with these arguments.

    Raises:
        UnsupportedOptionError: the options name adapters, too.
    """
    options = kwargs.get("hfpaged") or {}
    if options.get("adapter") is not None:
        raise UnsupportedOptionError("adapters are named by adapter_names and by hfpaged={'adapter': ...}; keep one")
    kwargs["hfpaged"] = {**options, "adapter": names}


class RowNames:
    """A forward pre-hook on a layer of the live model: Transformers' own forwards of one call mix adapters.

    Forwards on other threads are other calls'.
    """

    def __init__(self, names: list[str]):
        self._names = names
        self._thread = threading.get_ident()

    def __call__(self, layer: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        is_mine = threading.get_ident() == self._thread
        return args, {**kwargs, "adapter_names": self._names} if is_mine else kwargs


@contextmanager
def rows_named(model: nn.Module, call: GenerateCall) -> Iterator[None]:
    """Meanwhile, forwards of the live model on this thread send each row of the call through its adapter."""
    names = row_adapters(model, call)
    layers = [] if names is None else adapter_layers(model)
    hooks = [layer.register_forward_pre_hook(RowNames(names), with_kwargs=True) for layer in layers]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


class HookedNames:
    """The `adapter_names` of a `PeftModel.generate` over a model that was patched before PEFT wrapped it.

    PEFT keeps them in hooks on the layers, and whose call they are of does not show. So while a call with names runs,
    others are refused. A PeftModel that is patched itself hands its names on with each call, without hooks.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._owner: int | None = None
        # PEFT leaves its hooks behind when a call fails.
        self._left_behind: list[list[str]] = []

    @contextmanager
    def claimed(self, model: nn.Module) -> Iterator[list[str] | None]:
        """The names of the call that begins, which are nobody else's meanwhile; None: it has none.

        Raises:
            UnsupportedOptionError: names of other calls are on the model.
        """
        with self._lock:
            names = self._unclaimed(model)
            is_first = self._owner is None
            if names is not None:
                self._owner = threading.get_ident()
        try:
            yield names
        finally:
            if names is not None and is_first:
                with self._lock:
                    self._owner = None
                    self._left_behind.append(names)

    def _unclaimed(self, model: nn.Module) -> list[str] | None:
        hooked = names_in_hooks(model)
        self._left_behind = [names for names in self._left_behind if any(names is one for one in hooked)]
        hooked = [names for names in hooked if not any(names is one for one in self._left_behind)]
        if len(hooked) > 1 or self._owner not in (None, threading.get_ident()):
            raise UnsupportedOptionError(
                "calls beside one with adapter_names need hfpaged.patch(peft_model): this model was patched before "
                "PEFT wrapped it, and does not see whose names they are"
            )
        return hooked[0] if hooked else None


def names_in_hooks(model: nn.Module) -> list[list[str]]:
    """The lists of adapter names that hooks of PEFT's hold, each once."""
    if not hasattr(model, "peft_config"):
        return []
    hooks = (hook for layer in adapter_layers(model) for hook in layer._forward_pre_hooks.values())
    found = {id(names): names for names in map(hooked_adapter_names, hooks) if names is not None}
    return list(found.values())
