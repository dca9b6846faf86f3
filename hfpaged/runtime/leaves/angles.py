"""Angles: a model's cosines and sines as the rotation kernel reads them."""

from __future__ import annotations

import torch

from hfpaged.program.description import TableForm
from hfpaged.program.rotary import shaped_table


class Angles:
    """fp32 tables [T, width] of the tensors that the attention layers of one step are given.

    All layers are given the same few, so each is converted once.
    """

    def __init__(self) -> None:
        self._tables: dict[tuple[int, TableForm], tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = {}

    def forget(self) -> None:
        """The step is over."""
        self._tables.clear()

    def tables(self, cosine: torch.Tensor, sine: torch.Tensor, form: TableForm) -> tuple[torch.Tensor, torch.Tensor]:
        """fp32, contiguous [T, width] of what the rotary module returned, [1, T, any] or [T, any] in any dtype."""
        key = (id(cosine), form)
        found = self._tables.get(key)
        if found is None:
            flat = (part.reshape(-1, part.shape[-1]) for part in (cosine, sine))
            # `cosine` is kept, so that no other tensor gets its id.
            found = (cosine, *(shaped_table(part, form).float().contiguous() for part in flat))
            self._tables[key] = found
        return found[1:]
