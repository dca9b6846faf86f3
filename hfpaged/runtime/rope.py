"""Rotary embeddings whose frequencies depend on the longest position of a forward (dynamic NTK scaling, longrope)."""

from __future__ import annotations

from torch import nn

LENGTH_DEPENDENT = frozenset({"dynamic", "longrope"})


def pin_frequencies(rotary: nn.Module) -> None:
    """Hold the frequencies of an engine view's rotary module at those for lengths within its original range.

    Transformers chooses them anew in each forward and writes them to buffers that the view shares with the live model.
    The engine only takes requests within that range (`rope_reach`), where the choice is always the same: so the module
    gets a dictionary of buffers of its own, and looks at positions no more. Does nothing to other modules.
    """
    types = vars(rotary).get("rope_type")
    per_layer_type = isinstance(types, dict)
    prefixes = {f"{layer_type}_": kind for layer_type, kind in types.items()} if per_layer_type else {"": types}
    pinned = [prefix for prefix, kind in prefixes.items() if kind in LENGTH_DEPENDENT]
    if not pinned:
        return
    rotary.__dict__["_buffers"] = dict(rotary._buffers)
    for prefix in pinned:
        rotary._buffers[f"{prefix}inv_freq"] = getattr(rotary, f"{prefix}original_inv_freq")
    rotary.rope_type = dict.fromkeys(types, "default") if per_layer_type else "default"
