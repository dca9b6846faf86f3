"""The way to a fused operation: through its guard, counted when it is shut."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable

from hfpaged.errors import HfpagedError
from hfpaged.fusion.catalogue import FUSIONS, Fusion
from hfpaged.fusion.operand import FusionValues

logger = logging.getLogger(__name__)


class FusionRefused(HfpagedError):
    """A guard said no. The replaced code has to run. `fusion` and `reason` say which and why."""

    def __init__(self, fusion: str, reason: str):
        self.fusion, self.reason = fusion, reason
        super().__init__(f"{fusion} cannot be fused: {reason}")


class Admission:
    """Proof that a guard was asked and agreed. Kernels are built into programs only against one of these."""

    __slots__ = ("fusion",)

    def __init__(self, fusion: Fusion, values: FusionValues):
        reason = fusion.guard(values)
        if reason is not None:
            raise FusionRefused(fusion.name, reason)
        self.fusion = fusion


class FusionRegistry:
    """Admits values to fused operations. A workspace has one, whatever tiers it tries.

    Attributes:
        refusals: how often each (fusion, reason) came up.
    """

    def __init__(self, fusions: Iterable[Fusion] = FUSIONS):
        self._fusions = {fusion.name: fusion for fusion in fusions}
        self.refusals: Counter[tuple[str, str]] = Counter()

    def admit(self, name: str, values: FusionValues) -> Admission:
        """Ask the guard of fusion `name`. There is no way around it.

        Raises:
            FusionRefused: with the guard's reason; also counted in `refusals`, and logged the first time.
        """
        try:
            return Admission(self._fusions[name], values)
        except FusionRefused as refused:
            if not self.refusals[refused.fusion, refused.reason]:
                logger.info("hfpaged: %s; the model's own code runs instead", refused)
            self.refusals[refused.fusion, refused.reason] += 1
            raise
