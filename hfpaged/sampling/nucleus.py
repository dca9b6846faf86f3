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
    # Differences are rounded to float32 as stock rounds them.
    masses = np.exp(scores - highest)
    likelier, mass_of_likelier, band = _around_edge(scores, masses, top_p * total)
    band_masses = np.exp(band - highest).astype(np.float64)
    # Each token's mass and that of all less likely ones; it stays where this is more than 1 - top_p of the total.
    with_rest = total - mass_of_likelier - (band_masses.cumsum() - band_masses)
    rest, tolerance = _rest(total, top_p)
    sure = int(np.count_nonzero(with_rest > rest + tolerance))
    possible = int(np.count_nonzero(with_rest > rest - tolerance))
    if likelier == 0:
        sure = max(sure, 1)
    below = total - mass_of_likelier - band_masses.sum()
    if sure == 0 or (likelier + len(band) < len(scores) and below > rest - tolerance):
        return None
    kept = _likeliest(scores, band[max(sure, possible) - 1], likelier + max(sure, possible))
    if possible <= sure:
        return Nucleus(kept, np.zeros_like(kept))
    return Nucleus(kept, kept & ~_likeliest(scores, band[sure - 1], likelier + sure))


def _rest(total: float, top_p: float) -> tuple[float, float]:
    """The mass that tokens outside may have together at most, and how sure that is."""
    rest = (1 - top_p) * total
    return rest, _TOLERANCE * rest + _TOTAL_TOLERANCE * total


def _around_edge(scores: Scores, masses: Scores, target: float) -> tuple[int, float, Scores]:
    """The scores among which the likeliest tokens reach the mass `target`.

    Returns:
        How many tokens are likelier than these, their mass, and the scores in descending order.
    """
    if len(scores) <= _FEW:
        return 0, 0.0, np.sort(scores)[::-1]
    # The upper half of a positive float32 is its exponent and seven bits: masses with equal ones are within 1 %.
    groups = masses.view(np.uint32) >> np.uint32(16)
    groups -= groups.min()
    by_group = np.bincount(groups, weights=masses)[::-1]
    reached = by_group.cumsum()
    index = min(int(np.searchsorted(reached, target)), len(reached) - 1)
    group = len(reached) - 1 - index
    band = np.sort(scores[groups == group])[::-1]
    return int(np.count_nonzero(groups > group)), float(reached[index] - by_group[index]), band


def _likeliest(scores: Scores, least: np.float32, count: int) -> Mask:
    """Mask of the `count` highest scores, the least of which is `least`; the last ones of those that equal it."""
    kept = scores >= least
    surplus = int(np.count_nonzero(kept)) - count
    if surplus:
        kept[np.flatnonzero(scores == least)[:surplus]] = False
    return kept
