"""The class of what `patch` changes: it looks like the one before, which it remembers, to every check."""

from __future__ import annotations

from typing import Any

_ORIGINAL = "_hfpaged_original_class"
# Attributes of this package's own on what it changes begin with it.
OWN_PREFIX = "_hfpaged"


def patched_class(original: type, *bases: type, **attributes: Any) -> type:
    """A class that looks like `original` (name, module) to every check.

    Args:
        bases: classes in front of `original`.
        attributes: what else the class has.
    """
    looks = {name: getattr(original, name) for name in ("__module__", "__qualname__", "__doc__")}
    return type(original.__name__, (*bases, original), {**looks, _ORIGINAL: original, **attributes})


def has_patched_class(instance: object) -> bool:
    """Whether the class of an instance is one that `patched_class` made."""
    return hasattr(type(instance), _ORIGINAL)


def unpatched_class(instance: Any) -> Any:
    """The class of an instance; of a patched one the class that it had before."""
    cls = type(instance)  # once: another thread may unpatch it meanwhile
    return getattr(cls, _ORIGINAL, cls)


def reduce_to_unpatched(self: object, protocol: int) -> tuple:
    """As `__reduce_ex__`: copies and pickles are not patched, since an engine belongs to one live instance."""
    # Older protocols keep the class among the state; copies and pickles made of newer ones load under any.
    _, (_, *arguments), state, *rest = object.__reduce_ex__(self, max(protocol, 2))
    state = {name: value for name, value in state.items() if not name.startswith(OWN_PREFIX)}
    # copyreg.__newobj__ may not be used: pickle then insists on the class of `self`.
    return (object.__new__, (unpatched_class(self), *arguments), state, *rest)
