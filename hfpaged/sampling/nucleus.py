"""The nucleus of a distribution: the likeliest tokens that have top_p together, sorted at its edge only.

Stock sorts all scores, sums their float32 softmax from the least likely token on, and drops tokens up to 1 - top_p.
Which tokens stay is the same whoever sums, except for those so near the edge that rounding decides.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Scores = npt.NDArray[np.float32]
Mask = npt.NDArray[np.bool_]

# How far a sum of stock's float32 probabilities may be from exact, relative to it. The largest error seen is 5e-6, on
# vocabularies of up to 152,000 tokens.
_TOLERANCE = 2e-5
# The same for the sum of a row's float32 masses that is handed in. The largest error seen is 5e-8.
_TOTAL_TOLERANCE = 2e-7
# A row with more tokens than this of which rounding decides is left to the full stages.
_MOST_DOUBTFUL = 8
# More scores than this are grouped before a group of them is sorted.
_FEW = 4096


@dataclass(frozen=True, slots=True)
class Nucleus:
    """Which of a row's scores stay.

    Attributes:
        kept: bool[W], those that may stay.
        doubtful: bool[W], those among them of which rounding decides. They are the least likely of all that may stay,
            and stay in order: none without all that are likelier.
    """

    kept: Mask
    doubtful: Mask


def least_score(highest: float, total: float, size: int, top_p: float) -> float:
    """A score that all tokens of the nucleus exceed: so many tokens that do not are too little to be in it.

    Args:
        highest: the highest score.
        total: sum over all `size` scores of exp(score - highest).
    """
    rest, tolerance = _rest(total, top_p)
    with np.errstate(divide="ignore"):
        return highest + float(np.log(max(0.0, rest - 2 * tolerance) / size))


def nucleus(scores: Scores, total: float, top_p: float) -> Nucleus | None:
    """The nucleus of a row whose likeliest tokens have these scores; None if rounding decides about too many.

    Of equal scores at its edge, the last ones stay, as in the full stage.

    Args:
        scores: float32[W], all that exceed `least_score`.
        total: sum of exp(score - highest score) over all tokens of the row.
    """
    highest = scores.max()
    rest, tolerance = _rest(total, top_p)
    band = _around_edge(scores, highest, total - rest)
    edge = _edge(band, highest, total - rest, tolerance)
    if edge is None:
        band = _Band(0, 0.0, np.sort(scores)[::-1], True)
        edge = _edge(band, highest, total - rest, tolerance)
    sure, possible = edge
    if possible - sure > _MOST_DOUBTFUL:
        return None
    kept = _likeliest(scores, band, possible)
    return Nucleus(kept, kept & ~_likeliest(scores, band, sure) if sure < possible else np.zeros_like(kept))


def _rest(total: float, top_p: float) -> tuple[float, float]:
    """The mass that tokens outside may have together at most, and how sure that is."""
    rest = (1 - top_p) * total
    return rest, _TOLERANCE * rest + _TOTAL_TOLERANCE * total


@dataclass(frozen=True, slots=True)
class _Band:
    """Tokens of neighbouring rank.

    Attributes:
        likelier: how many tokens are likelier than all of them.
        mass: of those.
        scores: of the band, in descending order.
        is_last: whether none is less likely.
    """

    likelier: int
    mass: float
    scores: Scores
    is_last: bool


def _around_edge(scores: Scores, highest: np.float32, target: float) -> _Band:
    """The tokens among which the likeliest ones reach the mass `target`; all of them, if they are few."""
    if len(scores) <= _FEW:
        return _Band(0, 0.0, np.sort(scores)[::-1], True)
    masses = np.exp(scores - highest)
    # The upper half of a positive float32 is its exponent and seven bits: masses with equal ones are within 1 %.
    groups = masses.view(np.uint32) >> np.uint32(16)
    groups -= groups.min()
    by_group = np.bincount(groups, weights=masses)[::-1]
    reached = by_group.cumsum()
    index = min(int(np.searchsorted(reached, target)), len(reached) - 1)
    group = len(reached) - 1 - index
    band = np.sort(scores[groups == group])[::-1]
    return _Band(int(np.count_nonzero(groups > group)), float(reached[index] - by_group[index]), band, group == 0)


def _edge(band: _Band, highest: np.float32, target: float, tolerance: float) -> tuple[int, int] | None:
    """How many of all tokens stay for sure, and how many may; None if the band does not show.

    A token stays if the likelier ones have less than the mass `target`; the likeliest always does.
    """
    # Differences are rounded to float32 as stock rounds them.
    masses = np.exp(band.scores - highest).astype(np.float64)
    above = band.mass + masses.cumsum() - masses
    sure = int(np.count_nonzero(above < target - tolerance))
    possible = int(np.count_nonzero(above < target + tolerance))
    if (sure == 0 and band.likelier) or (possible == len(masses) and not band.is_last):
        return None
    return max(1, band.likelier + sure), max(1, band.likelier + possible)


def _likeliest(scores: Scores, band: _Band, count: int) -> Mask:
    """Mask of the `count` likeliest, the least of which is in the band; the last ones of those that equal it."""
    least = band.scores[count - band.likelier - 1]
    kept = scores >= least
    surplus = int(np.count_nonzero(kept)) - count
    if surplus:
        kept[(scores == least).nonzero()[0][:surplus]] = False
    return kept
