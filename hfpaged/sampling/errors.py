"""The error a row gets when its scores are no distribution."""

from __future__ import annotations

from hfpaged.errors import HfpagedError

INVALID_SCORES = "cannot sample: the processed scores contain NaN or +inf, or every token is excluded"


class InvalidScoresError(HfpagedError, RuntimeError):
    """The processed scores of a sampled row contain NaN or +inf, or every token is excluded.

    A RuntimeError too, because that is what `torch.multinomial` raises for such a row in stock `generate`.
    """
