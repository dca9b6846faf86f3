"""Attention in two parts where requests begin with the same blocks: over these once for all, then over the rest.

Each part gives an output and the logarithm of its sum of exponentials, to the base 2 in all of FlashInfer, from which
the library merges the two. Both logarithms come from its own wrappers and go nowhere else, so that none with another
base can get in between. What it merges wrongly does not occur: no part is empty, and layers with a window, whose
distances a part would count wrongly, or with sinks, which would count twice, are not divided.
"""

from __future__ import annotations

import torch

from hfpaged.runtime.attention.flashinfer_probe import HEAD_DIMS, flashinfer
from hfpaged.runtime.attention.flashinfer_wrappers import Geometry, HeadsWrapper, Setting
from hfpaged.runtime.attention.interface import KVTensors
from hfpaged.runtime.attention.page_tables import DividedTables

# Two more launches a layer, and a step that is not captured: not yet measured on a GPU. This is a millisecond's reading
# on a card with 4 TB/s.
LEAST_SAVED_BYTES = 4 << 30


def can_divide(geometry: Geometry) -> bool:
    """Whether such layers can be computed in two parts."""
    is_plain = geometry.window is None and not geometry.has_sinks
    return is_plain and geometry.key_dim == geometry.value_dim and geometry.key_dim in HEAD_DIMS


class DividedWrapper:
    """The two wrappers of a geometry, for steps in which every request has one token: see `PlannedWrapper`."""

    def __init__(self, geometry: Geometry, setting: Setting):
        self._shared = HeadsWrapper(geometry, setting, one_each=False, causal=False)
        self._rest = HeadsWrapper(geometry, setting, one_each=True)

    def plan(self, tables: DividedTables) -> None:
        """Schedule both parts, unless that has been done for these very tables."""
        for wrapper, part in ((self._shared, tables.shared), (self._rest, tables.rest)):
            if not wrapper.is_planned_for(part):
                wrapper.plan(part)

    def run(self, query: torch.Tensor, kv: KVTensors) -> torch.Tensor:
        """Attend: see `PlannedWrapper.run`."""
        states = (*self._shared.run_with_lse(query, kv), *self._rest.run_with_lse(query, kv))
        merged, _ = flashinfer().merge_state(*states)
        return merged
