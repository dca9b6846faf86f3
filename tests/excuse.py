"""The only excuse for a token that differs from stock's: stock itself was undecided, to the precision of float32."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from transformers import PreTrainedModel

LARGEST_EXCUSABLE_GAP = 1e-5


def assert_same_greedy_text(
    model: PreTrainedModel, prompt: Sequence[int], got: Sequence[int], want: Sequence[int]
) -> None:
    """Fail unless the greedy texts are equal, or part where the fp64 gap of stock's top two logits is tiny.

    Args:
        model: any model with the weights in question; it is copied, and may be patched.
        prompt: token ids that both texts continue.
        got, want: new tokens of the engine and of stock.
    """
    got, want = list(got), list(want)
    if got == want:
        return
    same = next((i for i, pair in enumerate(zip(got, want, strict=False)) if pair[0] != pair[1]), None)
    assert same is not None, f"{len(got)} new tokens instead of {len(want)} after a prompt of {len(prompt)}"
    gap = top_two_gap(model, [*prompt, *want[:same]])
    where = f"new token {same} after a prompt of {len(prompt)}: {got[same]} instead of {want[same]}, fp64 gap {gap:.2e}"
    assert gap < LARGEST_EXCUSABLE_GAP, f"{where}\n  got {got}\n want {want}"
    print(f"excused: {where}")


def top_two_gap(model: PreTrainedModel, tokens: Sequence[int]) -> float:
    """How far the two highest next-token logits are apart, recomputed in fp64."""
    exact = copy.deepcopy(model).double()
    with torch.no_grad():
        logits = exact(torch.tensor([list(tokens)], device=exact.device)).logits[0, -1]
    highest = logits.topk(2).values
    return float(highest[0] - highest[1])
