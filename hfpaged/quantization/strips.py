"""The memory layout of packed 4-bit weights (csrc/strips.h): strips of 16 outputs, eight inputs a word."""

from __future__ import annotations

import torch

from hfpaged.quantization.codes import pack_nibbles, unpack_nibbles

STRIP = 16
WORD_CODES = 8


def codes_to_strips(codes: torch.Tensor) -> torch.Tensor:
    """uint8 [N, K / 2], the even k in the low half of a byte, to int32 [ceil(N / 16), K / 8, 16].

    A word has the codes of one output for eight inputs: those of even k in its low half, of odd k in its high half.
    Outputs past N are code 0. K must be a multiple of 8.
    """
    padded = _whole_strips(codes).to(torch.int32)
    parts = padded.unflatten(1, (-1, WORD_CODES // 2))
    word = torch.zeros_like(parts[..., 0])
    for index in range(WORD_CODES // 2):
        part = parts[..., index]
        word |= (part & 15) << (4 * index)
        word |= (part >> 4) << (16 + 4 * index)
    return word.unflatten(0, (-1, STRIP)).transpose(1, 2).contiguous()


def strips_to_codes(strips: torch.Tensor, out_features: int) -> torch.Tensor:
    """Inverse of `codes_to_strips`: uint8 [N, K / 2]."""
    words = strips.transpose(1, 2).flatten(0, 1)[:out_features]
    low, high = (unpack_nibbles(_bytes(words, first)) for first in (0, 2))
    return pack_nibbles(torch.stack([low, high], dim=-1).flatten(-2))


def scales_to_strips(scales: torch.Tensor) -> torch.Tensor:
    """[N, groups] of any dtype to uint8 [ceil(N / 16), groups, 16 * itemsize]."""
    strips = _whole_strips(scales.contiguous().view(torch.uint8).unflatten(1, (-1, scales.element_size())))
    return strips.unflatten(0, (-1, STRIP)).transpose(1, 2).flatten(2).contiguous()


def strips_to_scales(strips: torch.Tensor, dtype: torch.dtype, out_features: int) -> torch.Tensor:
    """Inverse of `scales_to_strips`: [N, groups]."""
    parts = strips.unflatten(2, (STRIP, dtype.itemsize)).transpose(1, 2)
    return parts.flatten(0, 1)[:out_features].contiguous().view(dtype).squeeze(-1)


def _whole_strips(rows: torch.Tensor) -> torch.Tensor:
    missing = -rows.shape[0] % STRIP
    return torch.cat([rows, rows.new_zeros(missing, *rows.shape[1:])]) if missing else rows


def _bytes(words: torch.Tensor, first: int) -> torch.Tensor:
    return words.contiguous().view(torch.uint8).unflatten(-1, (-1, 4))[..., first : first + 2].flatten(-2)
