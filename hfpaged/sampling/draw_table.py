"""DrawTable: what a device has to know to draw tokens, laid out by the host while the scores do not exist yet."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from hfpaged.sampling.sampler import SampleRow, keyed_uniforms
from hfpaged.sampling.stages import MinP, Temperature, TopK, TopP

_KNOWN = (Temperature, TopK, TopP, MinP)
# Rows of `DrawTable.numbers`.
TEMPERATURE, TOP_K, REST, MIN_P, UNIFORM, IS_SAMPLED = range(6)
NUM_NUMBERS = 6
# What leaves all scores as they are: no top_k, no mass that may be excluded, no least share of the highest.
_NEUTRAL = np.array([1.0, 0.0, -1.0, 0.0, 0.0, 0.0])[:, None]


class DrawSettings(NamedTuple):
    """How one row's token is drawn.

    Attributes:
        temperature, top_k, top_p, min_p: as in Transformers; None: the row has no such processor.
        is_argmax: none of them matters, the likeliest token is taken.
    """

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    is_argmax: bool = False

    @classmethod
    def of(cls, row: SampleRow) -> DrawSettings | None:
        """Of a row; None if its scores take more than this, or are wanted themselves."""
        if row.keep_scores:
            return None
        if row.is_argmax:
            return cls(is_argmax=True)
        stages = row.processors.stages if row.processors is not None else ()
        orders = [stage.order for stage in stages if type(stage) in _KNOWN]
        if not row.do_sample or len(orders) < len(stages) or orders != sorted(set(orders)):
            return None
        return cls(
            next((stage.temperature for stage in stages if type(stage) is Temperature), None),
            next((stage.top_k for stage in stages if type(stage) is TopK), None),
            next((stage.top_p for stage in stages if type(stage) is TopP), None),
            next((stage.min_p for stage in stages if type(stage) is MinP), None),
        )

    @property
    def filters(self) -> tuple[float, ...]:
        """The first rows of a column of `DrawTable.numbers`."""
        return (
            1.0 if self.temperature is None else self.temperature,
            self.top_k or 0,
            -1.0 if self.top_p is None else 1 - self.top_p,
            self.min_p or 0.0,
        )


class Draw(NamedTuple):
    """One token to draw.

    Attributes:
        logit_row: the row of the step's logits that it is drawn from.
        row: whose seed to use.
        position: of the token in its sequence.
    """

    logit_row: int
    settings: DrawSettings
    row: SampleRow
    position: int


class DrawTable(NamedTuple):
    """N tokens to draw.

    Attributes:
        logit_rows: int64 [N], which row of a step's logits each is drawn from.
        numbers: float64 [NUM_NUMBERS, N]: temperature (1: none), top_k (0: none), 1 - top_p (-1: none), min_p (0:
            none), the random number, and whether it is drawn at all (0: the likeliest token is taken).
    """

    logit_rows: np.ndarray
    numbers: np.ndarray

    @classmethod
    def of(cls, draws: Sequence[Draw]) -> DrawTable:
        """Lay draws out, each with the random number that `Sampler` would draw it with."""
        numbers = np.repeat(_NEUTRAL, len(draws), axis=1)
        sampled = [index for index, draw in enumerate(draws) if not draw.settings.is_argmax]
        if sampled:
            chosen = [draws[index] for index in sampled]
            numbers[:UNIFORM, sampled] = np.array([draw.settings.filters for draw in chosen]).T
            numbers[UNIFORM, sampled] = keyed_uniforms(
                [draw.row.seed for draw in chosen],
                [draw.row.sample_index for draw in chosen],
                [draw.position for draw in chosen],
            )
            numbers[IS_SAMPLED, sampled] = 1
        return cls(np.array([draw.logit_row for draw in draws], dtype=np.int64), numbers)

    @classmethod
    def neutral(cls, count: int) -> DrawTable:
        """A draw from each of so many rows, as their logits are."""
        numbers = np.repeat(_NEUTRAL, count, axis=1)
        numbers[IS_SAMPLED] = 1
        return cls(np.arange(count), numbers)

    @property
    def sampled(self) -> np.ndarray:
        """int64: the draws that take more than the likeliest token."""
        return np.flatnonzero(self.numbers[IS_SAMPLED])

    def can_be_by_row(self, count: int) -> bool:
        """Whether each of `count` rows of logits is drawn from once at most."""
        return len(self.logit_rows) <= count and len(np.unique(self.logit_rows)) == len(self.logit_rows)

    def by_row(self, count: int) -> np.ndarray:
        """`numbers` for every one of `count` rows of logits, neutral where none is drawn from."""
        numbers = np.repeat(_NEUTRAL, count, axis=1)
        numbers[:, self.logit_rows] = self.numbers
        return numbers


NO_DRAWS = DrawTable.of(())
