"""Which LoRA adapter each row of a call goes through: `hfpaged={"adapter": ...}`, or PEFT's own `adapter_names`."""

from __future__ import annotations

from torch import nn

from hfpaged.compat import hooked_adapter_names
from hfpaged.errors import UnsupportedOptionError
from hfpaged.generation.call import GenerateCall
from hfpaged.runtime.adapters import adapter_layers, check_adapter


class CarriedNames(list[str]):
    """Adapter names, one a row, that a call carries itself: a hook that has them, too, concerns no other call."""


def row_adapters(model: nn.Module, call: GenerateCall, heeds_hooks: bool) -> list[str] | None:
    """One adapter name a row; None: all rows go through those that are active.

    Args:
        heeds_hooks: the call may have come through `PeftModel.generate`, whose names are hooks on the model.

    Raises:
        InputError, UnsupportedOptionError: an adapter is unknown or cannot be mixed, or their number is not the rows'.
    """
    names = call.options.adapter
    if names is None:
        names = hooked_names(model) if heeds_hooks else None
        if names is None:
            return None
    elif isinstance(names, str):
        names = [names] * call.num_rows
    elif not isinstance(names, CarriedNames):
        repeats = max(1, call.config.num_return_sequences or 1)
        names = [name for name in names for _ in range(repeats)]
    if len(names) != call.num_rows:
        raise UnsupportedOptionError(f"{len(names)} adapters were given for {call.num_rows} rows")
    for name in set(names):
        check_adapter(model, name)
    return list(names)


def hooked_names(model: nn.Module) -> list[str] | None:
    """The `adapter_names` of a `PeftModel.generate` that is going on, which PEFT keeps in hooks on the layers.

    Whose thread it is on does not show. Only if the PeftModel itself was patched do its calls carry their names.
    """
    hooks = (hook for layer in adapter_layers(model) for hook in layer._forward_pre_hooks.values())
    found = (names for names in map(hooked_adapter_names, hooks) if names is not None)
    return next((names for names in found if not isinstance(names, CarriedNames)), None)
