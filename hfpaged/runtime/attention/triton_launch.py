"""How the Triton kernels are launched: grids, tile sizes and scratch memory."""

from __future__ import annotations

from functools import lru_cache
from types import ModuleType
from typing import NamedTuple

import torch

from hfpaged.errors import UnsupportedModelError
from hfpaged.runtime.attention.interface import AttentionParams, KVTensors
from hfpaged.runtime.attention.tile_tables import TILE_TOKENS, Tiles, TileTables

# Of a single token's context: how many programs share it, and what is too little to be shared.
SPLITS, SMALLEST_SPLIT = 16, 256
# The smallest side of a matrix product that every GPU has an instruction for.
LEAST_LANES = 16
MOST_COLUMNS = 64
# Of keys, or of values, that a program reads at a time. Twice both fit into what the smallest GPUs have for a program.
COLUMN_BYTES = 16 << 10


class Division(NamedTuple):
    """How the work on some tiles is divided among programs.

    Attributes:
        tokens: of one request that a program takes, at most.
        heads: query heads of one KV head that a program takes.
        splits: programs that share a context.
    """

    tokens: int
    heads: int
    splits: int


class Attention(NamedTuple):
    """One layer of one step: see `attend`. `output` is [T, H, Dv] contiguous."""

    kv: KVTensors
    query: torch.Tensor
    params: AttentionParams
    tables: TileTables
    output: torch.Tensor


def write(kv: KVTensors, slots: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
    """Put keys [T, Hkv, Dk] and values [T, Hkv, Dv], any strides, into slots int64 [T] of a layer's cache."""
    key_dim, value_dim = (cache.shape[-1] for cache in kv)
    kernels().write_kernel[len(slots), key.shape[1]](
        key, value, *kv, slots, *key.stride(), *value.stride(),
        KEY_DIM=key_dim, VALUE_DIM=value_dim, KEY_LANES=lanes(key_dim), VALUE_LANES=lanes(value_dim), num_warps=1,
    )  # fmt: skip


def attend(kv: KVTensors, query: torch.Tensor, params: AttentionParams, tables: TileTables) -> torch.Tensor:
    """Attend with all of a step's tokens.

    Args:
        query: [T, H, Dk] in the dtype of the cache, the last dimension contiguous.

    Returns:
        [T, H, Dv] contiguous.

    Raises:
        UnsupportedModelError: the layer's window is empty.
    """
    if params.window is not None and params.window < 1:
        raise UnsupportedModelError([f"its attention window of {params.window} tokens is empty"])
    output = query.new_empty(*query.shape[:2], kv[1].shape[-1])
    attention = Attention(kv, query, params, tables, output)
    if len(tables.singles.request):
        group = query.shape[1] // kv[0].shape[2]
        attend_tiles(attention, tables.singles, Division(tokens=1, heads=group, splits=SPLITS))
    if len(tables.tiles.request):
        attend_tiles(attention, tables.tiles, Division(tokens=TILE_TOKENS, heads=1, splits=1))
    return output


def attend_tiles(attention: Attention, tiles: Tiles, division: Division) -> None:
    """Fill in the outputs of some of the step's tokens."""
    (key_cache, value_cache), query, params, tables, output = attention
    num_tiles, num_heads, value_dim = len(tiles.request), query.shape[1], value_cache.shape[-1]
    splits = division.splits
    # Programs that have a context for themselves write no shares.
    shares = (num_tiles, num_heads, splits) if splits > 1 else (0,)
    partial = query.new_empty(*shares, value_dim, dtype=torch.float32)
    partial_lse = query.new_empty(shares, dtype=torch.float32)
    common = {
        "NUM_HEADS": num_heads,
        "VALUE_DIM": value_dim,
        "VALUE_LANES": lanes(value_dim),
        "WINDOW": params.window or 0,
        "SPLITS": splits,
        "SMALLEST_SPLIT": SMALLEST_SPLIT,
    }
    kernels().attention_kernel[num_tiles, num_heads // division.heads, splits](
        query, key_cache, value_cache, params.sinks, output, partial, partial_lse,
        tables.query_start, tables.page_start, tables.context_len, tables.pages, *tiles,
        params.scale, *query.stride()[:2],
        NUM_KV_HEADS=key_cache.shape[2], KEY_DIM=query.shape[2], KEY_LANES=lanes(query.shape[2]),
        PAGE_SIZE=key_cache.shape[1], SOFTCAP=params.softcap or 0.0, HAS_SINKS=params.sinks is not None,
        ROWS=lanes(division.tokens * division.heads), TOKENS=division.tokens, HEADS=division.heads,
        COLUMNS=columns(query, value_dim), PRECISION="ieee", num_warps=4, num_stages=2, **common,
    )  # fmt: skip
    if splits > 1:
        kernels().merge_kernel[num_tiles, num_heads](
            output, partial, partial_lse, tables.context_len, *tiles, **common
        )


def columns(query: torch.Tensor, value_dim: int) -> int:
    """How many keys and values a program reads at a time, a power of two."""
    largest = max(lanes(query.shape[2]), lanes(value_dim)) * query.element_size()
    return max(LEAST_LANES, min(MOST_COLUMNS, COLUMN_BYTES // largest))


def lanes(size: int) -> int:
    """The power of two, and side of a matrix product, that holds so many numbers."""
    return max(LEAST_LANES, 1 << (size - 1).bit_length())


@lru_cache(maxsize=1)
def kernels() -> ModuleType:
    """The kernels' module, which imports Triton."""
    from hfpaged.runtime.attention import triton_kernels

    return triton_kernels
