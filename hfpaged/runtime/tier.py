"""Tier: one way to execute the forward of a step. All read the same batch and KV pool, and give the same logits.

They are equal up to rounding. The tiers: module_tier.py calls the model's own modules, leaf_tier.py gives most of them
a native forward, program_tier.py runs one native program made from all of them, and device/ahead_tier.py has a device
work ahead of the host.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import NamedTuple

import numpy as np
import torch

from hfpaged.program.panels import PackedMatrix
from hfpaged.runtime.batch import StepBatch


class StepOutput(NamedTuple):
    """What a step computed for the S rows that wanted logits.

    Attributes:
        logits: [S, V] in the model's dtype or its values in fp32; None if only the argmax was asked for and is there.
        argmax: int64 [S], where the tier computes it on the way.
        drawn: int64 [N] on the device: a token for each of `StepBatch.draws`, where the tier draws.
    """

    logits: torch.Tensor | None
    argmax: np.ndarray | torch.Tensor | None
    drawn: torch.Tensor | None = None


class Tier(ABC):
    """One way to run the forward of a step. Used by the stepping thread only."""

    name: str

    @abstractmethod
    def run(self, batch: StepBatch, want_logits: bool) -> StepOutput:
        """Write the batch's keys and values and compute the logits of `batch.logit_rows`."""

    @abstractmethod
    def on_weights_changed(self) -> None:
        """Forget everything made from the old weights."""

    def close(self) -> None:
        """Leave the view as it was. Not used after that."""
        return None

    @property
    def replayed_steps(self) -> int:
        """How many steps were started as a captured whole."""
        return 0

    @property
    def capture_problem(self) -> str | None:
        """Why steps are not captured (any more); None: they are, or the tier has no use for it."""
        return None

    def breaks(self) -> dict[str, int]:
        """How many modules run as they are between the pieces of captured steps, by class."""
        return {}

    def capture_ahead(self, most_requests: int) -> int:
        """Capture what steps of up to so many requests will need, showing the progress. Returns how many were."""
        return 0

    def refusals(self) -> dict[str, int]:
        """How many modules could have run natively but keep their own forward, by reason."""
        return {}

    def packed_matrices(self) -> list[PackedMatrix]:
        """The packed weights that it computes from."""
        return []
