"""Greedy text in 16 bits against stock's: equal, or parting where stock itself could have gone either way."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import PreTrainedModel

# Of the largest logit: bfloat16 has eight bits, and a few roundings add up along the layers.
TOLERANCE = 0.03


def parting(got: Sequence[int], want: Sequence[int]) -> int | None:
    """Index of the first token that differs; None: the texts are equal."""
    return next((i for i, (a, b) in enumerate(zip(got, want, strict=True)) if a != b), None)


def assert_close_text(model: PreTrainedModel, prompt: Sequence[int], got: Sequence[int], want: Sequence[int]) -> None:
    """Fail unless the texts are equal, or part at a near tie of stock's logits. `model` must not be patched."""
    at = parting(got, want)
    if at is None:
        return
    ids = torch.tensor([[*prompt, *want[:at]]], device=model.device)
    with torch.no_grad():
        logits = model(ids).logits[0, -1].float()
    gap = (logits[want[at]] - logits[got[at]]).item()
    bound = TOLERANCE * logits.abs().max().item()
    assert gap <= bound, f"token {at}: {got[at]} instead of {want[at]}, whose logit is {gap:.3f} higher ({bound:.3f})"
