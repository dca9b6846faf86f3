"""FusedForwards: modules of a view run by FlashInfer's kernels, where those compute what the module's own code does."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import nn

from hfpaged.fusion.registry import FusionRefused, FusionRegistry
from hfpaged.program.description import NotRecognized
from hfpaged.runtime.device.fused_layer import fused_layer
from hfpaged.runtime.device.fused_mlp import fused_mlp, may_be_gated_mlp
from hfpaged.runtime.device.fused_norm import fused_norm, may_be_norm
from hfpaged.runtime.device.fused_product import fused_product, is_packed_in_rows
from hfpaged.runtime.device.fused_rotation import Angles, fused_rotation, rotates
from hfpaged.runtime.device.layer_flow import layer_flows
from hfpaged.runtime.placing import Forward, Place, put_in_place, take_away
from hfpaged.runtime.view import EngineView


class Kind(NamedTuple):
    """One kind of modules that have kernels.

    Attributes:
        is_candidate: whether a module looks like one.
        fused: its forward in a dtype, admitted by a registry. Raises whatever is wrong with that.
    """

    name: str
    is_candidate: Callable[[nn.Module], bool]
    fused: Callable[[nn.Module, torch.dtype, FusionRegistry], Forward]


class FusedForwards:
    """Kernels in the place of the forwards of modules of one view, until they are removed or this object is dropped.

    Each one was admitted by its guard, and has given its module's own results on random numbers.

    Attributes:
        fused: how many modules of each kind.
        refusals: how many others look like one, by "kind: reason".
    """

    def __init__(self, view: EngineView, dtype: torch.dtype, fusions: FusionRegistry):
        self.fused: Counter[str] = Counter()
        self.refusals: Counter[str] = Counter()
        kinds = (
            Kind("norm", may_be_norm, fused_norm),
            Kind("mlp", may_be_gated_mlp, fused_mlp),
            Kind("rotation", rotates, partial(fused_rotation, angles=Angles())),
            Kind("product", is_packed_in_rows, fused_product),
        )
        self._places: list[Place] = []
        # A forward refers to its module. Taking it away ends the cycle, and leaves the view as it was.
        self._finalizer = weakref.finalize(self, take_away, self._places)
        self._finalizer.atexit = False
        flows, problems = layer_flows(view.model, view.step.layers)
        self.refusals.update(f"layer: {problem.reason}" for problem in problems)
        for layer, flow in flows:
            self._fuse("layer", layer, partial(fused_layer, layer, flow, dtype, fusions))
        for kind in kinds:
            for module in filter(kind.is_candidate, list(view.model.modules())):
                self._fuse(kind.name, module, partial(kind.fused, module, dtype, fusions))

    def remove(self) -> None:
        """Leave the view as it was."""
        self._finalizer()

    def _fuse(self, kind: str, module: nn.Module, build: Callable[[], Forward]) -> None:
        try:
            forward = build()
        except (NotRecognized, FusionRefused) as refused:
            self.refusals[f"{kind}: {refused.reason}"] += 1
        except Exception as error:  # a kernel that does not compile or run costs its speed and nothing else
            first_line = next(iter(str(error).splitlines()), "")
            self.refusals[f"{kind}: {type(error).__name__}: {first_line}"] += 1
        else:
            self.fused[kind] += 1
            self._places += put_in_place({module: forward})
