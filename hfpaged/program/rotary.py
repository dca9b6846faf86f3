"""Rotary embeddings: which style a model uses, and tables of its own cosines and sines.

The tables are what the model's rotary module returns for positions 0, 1, 2, ...: every scaling variant comes out right
without being known here, except those whose frequencies depend on the longest sequence of the forward.
"""

from __future__ import annotations

import itertools

import torch
from torch import nn

from hfpaged.program.abi import RotaryStyle
from hfpaged.program.description import NotRecognized, RotaryCall, Rotation, TableForm
from hfpaged.program.trace import Trace

_LENGTH_DEPENDENT = frozenset({"dynamic", "longrope"})


def require_fixed_frequencies(model: nn.Module) -> None:
    """Refuse rotary modules whose frequencies follow the longest sequence of a forward (and which a forward changes).

    Raises:
        NotRecognized: naming the type.
    """
    for module in model.modules():
        types = getattr(module, "rope_type", None)
        used = set(types.values()) if isinstance(types, dict) else {types}
        varying = sorted(used & _LENGTH_DEPENDENT)
        if varying:
            raise NotRecognized(f"its {varying[0]} rotary embedding depends on the longest sequence of a forward")


def find_rotary_call(trace: Trace, cosine: torch.Tensor) -> RotaryCall:
    """The traced call that returned `cosine`.

    Raises:
        NotRecognized: no module returned it.
    """
    for call in trace.calls:
        if isinstance(call.output, tuple) and len(call.output) == 2 and call.output[0] is cosine:
            return RotaryCall(call.module, call.args, tuple(call.kwargs.items()))
    raise NotRecognized("its cosines and sines do not come from a module of their own")


class RotaryTable:
    """Cosines and sines of one rotary call for positions 0 to `positions` - 1, fp32 [positions, rotary_dim]."""

    def __init__(self, call: RotaryCall, form: TableForm):
        self._call = call
        self._form = form
        self.positions = 0
        self.cosine = self.sine = torch.empty(0, 0)

    def serves(self, call: RotaryCall, form: TableForm) -> bool:
        """Whether `call` gives the same numbers: the same module, asked the same but for the tensors."""
        same_module = call.module is self._call.module and form == self._form
        return same_module and _settings(call) == _settings(self._call)

    def grow(self, positions: int) -> bool:
        """Extend to at least `positions`. Returns whether anything changed."""
        if positions <= self.positions:
            return False
        self.compute(max(positions, 2 * self.positions, 1024))
        return True

    def compute(self, positions: int) -> None:
        """Ask the module for positions 0 to `positions` - 1 anew."""
        index = torch.arange(positions)[None]
        with torch.inference_mode(False), torch.no_grad():
            args = [self._replayed(value, index) for value in self._call.args]
            kwargs = {name: self._replayed(value, index) for name, value in self._call.kwargs}
            cosine, sine = self._call.module(*args, **kwargs)
        self.cosine, self.sine = (
            shaped_table(part.reshape(positions, -1), self._form).float().contiguous() for part in (cosine, sine)
        )
        self.positions = positions

    def _replayed(self, value: object, index: torch.Tensor) -> object:
        if not isinstance(value, torch.Tensor):
            return value
        # An activation is only asked for its dtype and device.
        return torch.empty(1, dtype=value.dtype) if value.is_floating_point() else index


def _settings(call: RotaryCall) -> list[object]:
    values = [*call.args, *(value for _, value in call.kwargs)]
    return [value for value in values if not isinstance(value, torch.Tensor)]


def identify_rotation(
    before: torch.Tensor, after: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor
) -> Rotation | None:
    """How `before` became `after`, both [T, heads, dim], with the model's cosine and sine [T, any width].

    Returns:
        None if it is no known rotation.
    """
    dim, tolerance = before.shape[-1], 1e-6 * after.abs().max().item()
    for (style, form), round_products in itertools.product(_POSSIBLE, (True, False)):
        table = [shaped_table(part, form) for part in (cosine, sine)]
        width = table[0].shape[-1]
        if width > dim or width % 2 or (style != RotaryStyle.NONE and not width):
            continue
        rotation = Rotation(style, form, width, round_products)
        rotated = reference_rotation(before, *table, rotation)
        if torch.allclose(rotated.float(), after.float(), rtol=1e-5, atol=tolerance):
            return rotation
    return None


_POSSIBLE = (
    (RotaryStyle.NONE, TableForm.AS_RETURNED),
    (RotaryStyle.HALVES, TableForm.AS_RETURNED),
    (RotaryStyle.INTERLEAVED, TableForm.AS_RETURNED),
    (RotaryStyle.INTERLEAVED, TableForm.FIRST_HALF_REPEATED),
    (RotaryStyle.HALVES, TableForm.TWICE),
)


def shaped_table(table: torch.Tensor, form: TableForm) -> torch.Tensor:
    """What a module's cosines or sines [..., width] become before they are multiplied with."""
    if form == TableForm.FIRST_HALF_REPEATED:
        return table[..., : table.shape[-1] // 2].repeat_interleave(2, dim=-1)
    return torch.cat([table, table], dim=-1) if form == TableForm.TWICE else table


def reference_rotation(x: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor, rotation: Rotation) -> torch.Tensor:
    """Rotate the first `rotation.width` dimensions of x [T, heads, dim], as the program does."""
    if rotation.style == RotaryStyle.NONE:
        return x
    head, tail = x[..., : rotation.width], x[..., rotation.width :]
    if rotation.style == RotaryStyle.HALVES:
        low, high = head.chunk(2, dim=-1)
        crossed = torch.cat([-high, low], dim=-1)
    else:
        crossed = torch.stack([-head[..., 1::2], head[..., 0::2]], dim=-1).flatten(-2)
    wide = x.dtype if rotation.round_products else torch.float32
    cosine, sine = cosine[:, None].to(wide), sine[:, None].to(wide)
    rotated = head.to(wide) * cosine + crossed.to(wide) * sine
    return torch.cat([rotated.to(x.dtype), tail], dim=-1)
