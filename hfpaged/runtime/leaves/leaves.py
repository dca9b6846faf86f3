"""Leaves: the modules of an engine view that run natively, found, checked and put in their places."""

from __future__ import annotations

import weakref
from collections import Counter

from torch import nn

from hfpaged.fusion.registry import FusionRegistry
from hfpaged.program.description import NotRecognized
from hfpaged.program.panels import PackedMatrix
from hfpaged.program.trace import Trace, trace_forward
from hfpaged.runtime.leaves.admission import LeafGate
from hfpaged.runtime.leaves.compare import LeafComparison
from hfpaged.runtime.leaves.find import LeafFinder
from hfpaged.runtime.leaves.head_leaf import HeadLeaf
from hfpaged.runtime.leaves.kernels import LeafKernels
from hfpaged.runtime.leaves.leaf import Leaf
from hfpaged.runtime.placing import put_in_place, take_away
from hfpaged.runtime.view import EngineView


class Leaves:
    """Native forwards in the `__dict__` of modules of one view, until they are removed or this object is dropped.

    Attributes:
        kernels: wants to know of every step.
        head: the leaf that gives the logits, if there is one.
        native: number of modules that have a native forward, by kind.
        refusals: number of modules that could have had one, by "kind: reason".
    """

    def __init__(self, view: EngineView, fusions: FusionRegistry):
        """Find the leaves of `view`, whose step must be bound, pack their weights and compare them with the modules.

        Raises:
            NotRecognized: there are none, or the forward of a few random tokens fails.
        """
        self.kernels = LeafKernels()
        trace = trace_forward(view.model)
        finder = LeafFinder(view.model, trace, LeafGate(fusions), self.kernels)
        self._leaves = self._find_equal(view, finder, trace)
        if not self._leaves:
            raise NotRecognized("none of its modules can run natively")
        self.head = next((leaf for leaf in self._leaves if isinstance(leaf, HeadLeaf)), None)
        self.native = Counter(leaf.kind for leaf in self._leaves for _ in leaf.modules)
        self.refusals = finder.refusals
        self._install()

    def refresh(self) -> None:
        """Take over the present weights of all modules.

        Raises:
            FusionRefused, NotRecognized: a module cannot be a leaf any more. The leaves must be found anew.
        """
        for leaf in self._leaves:
            leaf.admit()
        self.kernels.refresh()

    @property
    def matrices(self) -> list[PackedMatrix]:
        """The packed weights of all leaves."""
        return self.kernels.packed_matrices

    def _find_equal(self, view: EngineView, finder: LeafFinder, trace: Trace) -> list[Leaf]:
        """Leaves whose results are those of their modules. The parts of one that differs may be leaves themselves."""
        comparison = LeafComparison(view.model, view.step, trace)
        differing: dict[nn.Module, str] = {}
        while True:
            finder.refusals.clear()
            self.kernels.clear()
            leaves = finder.find(differing)
            self.kernels.refresh()
            found = comparison.differing(leaves)
            if not found:
                break
            differing |= found
        for module, reason in differing.items():
            if not finder.is_layer(module):
                finder.refuse("differs", reason)
        return leaves

    def remove(self) -> None:
        """Leave the view as it was. Something may hold on to this object: a traceback, or a thread that looks at it."""
        self._finalizer()

    def _install(self) -> None:
        forwards = {leaf.modules[name]: forward for leaf in self._leaves for name, forward in leaf.forwards().items()}
        # A forward refers to its module. Taking it away ends the cycle.
        self._finalizer = weakref.finalize(self, take_away, put_in_place(forwards))
        self._finalizer.atexit = False
