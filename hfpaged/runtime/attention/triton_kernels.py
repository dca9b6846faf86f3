"""Kernels of paged attention in Triton. Imported at use: Triton is not everywhere.

Keys and values are [block, block_size, Hkv, D], contiguous. A program attends with some rows of queries to one KV head,
block by block, with the running maximum and sum of FlashAttention-2 (Dao, 2023). A step's single tokens have their
context split over several programs, whose states are merged in a fixed order (Dao et al., Flash-Decoding, 2023). Where
a context is split depends on its length alone, so that a token's result does not depend on what else is in the batch.

Scores are to the base 2: they carry a factor of log2(e). Sums, maxima and outputs are fp32 until they are stored.
"""

# No `from __future__ import annotations`: Triton reads the annotations.
import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def write_kernel(
    key, value, key_cache, value_cache, slots,
    key_stride_t, key_stride_h, key_stride_d, value_stride_t, value_stride_h, value_stride_d,
    KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, KEY_LANES: tl.constexpr, VALUE_LANES: tl.constexpr,
):  # fmt: skip
    """Put one token's key and value of one head into its slot. Grid: (T, Hkv)."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    row = tl.load(slots + token) * tl.num_programs(1) + head
    dims = tl.arange(0, KEY_LANES)
    states = tl.load(key + token * key_stride_t + head * key_stride_h + dims * key_stride_d, dims < KEY_DIM)
    tl.store(key_cache + row * KEY_DIM + dims, states, dims < KEY_DIM)
    dims = tl.arange(0, VALUE_LANES)
    states = tl.load(value + token * value_stride_t + head * value_stride_h + dims * value_stride_d, dims < VALUE_DIM)
    tl.store(value_cache + row * VALUE_DIM + dims, states, dims < VALUE_DIM)


@triton.jit
def first_seen(position, WINDOW: tl.constexpr):
    """The first token that the token at a position sees."""
    first = position * 0
    if WINDOW > 0:
        first = tl.maximum(position - WINDOW + 1, 0)
    return first


@triton.jit
def tokens_of_a_split(num_tokens, SPLITS: tl.constexpr, SMALLEST: tl.constexpr):
    """Tokens that each of the programs reads which share so many; a multiple of the smallest share."""
    shares = (num_tokens + SPLITS * SMALLEST - 1) // (SPLITS * SMALLEST)
    return shares * SMALLEST


@triton.jit
def capped(scores, SOFTCAP: tl.constexpr):
    """tanh(scores / cap) * cap."""
    if SOFTCAP > 0:
        scores = SOFTCAP * (1 - 2 / (1 + tl.exp(2 * scores / SOFTCAP)))
    return scores


@triton.jit
def with_columns(highest, total, summed, scores, values, PRECISION: tl.constexpr):
    """The state of rows, with more tokens: their scores [rows, columns] to the base 2, -inf where unseen, and values.

    Returns the highest scores and the sums of weights, [rows], and the weighted sums of values, [rows, lanes].
    """
    higher = tl.maximum(highest, tl.max(scores, 1))
    # A row may not have seen anything yet.
    base = tl.where(higher == -float("inf"), 0.0, higher)
    weights = tl.exp2(scores - base[:, None])
    decay = tl.exp2(highest - base)
    total = total * decay + tl.sum(weights, 1)
    summed = summed * decay[:, None] + tl.dot(weights.to(values.dtype), values, input_precision=PRECISION)
    return higher, total, summed


@triton.jit
def attention_kernel(
    query, key_cache, value_cache, sinks, output, partial, partial_lse,
    query_start, page_start, context_len, pages, tile_request, tile_first,
    scale, query_stride_t, query_stride_h,
    NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    KEY_LANES: tl.constexpr, VALUE_LANES: tl.constexpr, PAGE_SIZE: tl.constexpr,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, HAS_SINKS: tl.constexpr,
    ROWS: tl.constexpr, TOKENS: tl.constexpr, HEADS: tl.constexpr, COLUMNS: tl.constexpr,
    SPLITS: tl.constexpr, SMALLEST_SPLIT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Attend with the tokens of one tile. Grid: (tiles, NUM_HEADS / HEADS, SPLITS).

    A tile is up to TOKENS tokens of one request, each with HEADS query heads that read the same KV head: ROWS or fewer
    rows. Split programs write their share's output and log-sum-exp to `partial` [tile, head, split, VALUE_DIM] and
    `partial_lse` [tile, head, split], and nothing if they have no share.
    """
    tile, split = tl.program_id(0), tl.program_id(2)
    first_head = tl.program_id(1) * HEADS
    kv_head = first_head // (NUM_HEADS // NUM_KV_HEADS)
    request, first = tl.load(tile_request + tile), tl.load(tile_first + tile)
    context, end = tl.load(context_len + request), tl.load(query_start + request + 1)
    table = pages + tl.load(page_start + request)

    rows = tl.arange(0, ROWS)
    token, head = first + rows // HEADS, first_head + rows % HEADS
    is_row = (rows < TOKENS * HEADS) & (token < end)
    position = context - end + token
    # What any row of the tile sees.
    lower = first_seen(context - end + first, WINDOW)
    upper = context - end + tl.minimum(first + TOKENS, end)
    if SPLITS > 1:
        share = tokens_of_a_split(upper - lower, SPLITS, SMALLEST_SPLIT)
        lower += split * share
        upper = tl.minimum(upper, lower + share)
        if lower >= upper:
            return

    key_dims, value_dims = tl.arange(0, KEY_LANES), tl.arange(0, VALUE_LANES)
    queries = tl.load(
        query + token[:, None].to(tl.int64) * query_stride_t + head[:, None] * query_stride_h + key_dims[None, :],
        is_row[:, None] & (key_dims < KEY_DIM)[None, :], other=0.0,
    )  # fmt: skip
    highest = tl.full([ROWS], -float("inf"), tl.float32)
    total = tl.full([ROWS], 0.0, tl.float32)
    if HAS_SINKS:
        # A sink is a score without a value. Of split rows the first program has it.
        if split == 0:
            highest = tl.load(sinks + head, is_row, other=0.0).to(tl.float32) * LOG2E
            total = total + 1.0
    summed = tl.full([ROWS, VALUE_LANES], 0.0, tl.float32)

    for start in range(lower, upper, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        is_column = column < upper
        page = tl.load(table + column // PAGE_SIZE, is_column, other=0).to(tl.int64)
        slot = (page * PAGE_SIZE + column % PAGE_SIZE) * NUM_KV_HEADS + kv_head
        keys = tl.load(
            key_cache + slot[None, :] * KEY_DIM + key_dims[:, None],
            is_column[None, :] & (key_dims < KEY_DIM)[:, None], other=0.0,
        )  # fmt: skip
        scores = capped(tl.dot(queries, keys, input_precision=PRECISION) * scale, SOFTCAP)
        is_seen = is_column[None, :] & (column[None, :] <= position[:, None])
        if WINDOW > 0:
            is_seen = is_seen & (column[None, :] > position[:, None] - WINDOW)
        scores = tl.where(is_seen, scores * LOG2E, -float("inf"))
        values = tl.load(
            value_cache + slot[:, None] * VALUE_DIM + value_dims[None, :],
            is_column[:, None] & (value_dims < VALUE_DIM)[None, :], other=0.0,
        )  # fmt: skip
        highest, total, summed = with_columns(highest, total, summed, scores, values, PRECISION)

    total = tl.where(is_row, total, 1.0)
    result = summed / total[:, None]
    is_result = is_row[:, None] & (value_dims < VALUE_DIM)[None, :]
    if SPLITS > 1:
        place = (tile * NUM_HEADS + head).to(tl.int64) * SPLITS + split
        tl.store(partial + place[:, None] * VALUE_DIM + value_dims[None, :], result, is_result)
        tl.store(partial_lse + place, highest + tl.log2(total), is_row)
    else:
        place = token.to(tl.int64) * NUM_HEADS + head
        tl.store(
            output + place[:, None] * VALUE_DIM + value_dims[None, :], result.to(output.dtype.element_ty), is_result
        )


@triton.jit
def merge_kernel(
    output, partial, partial_lse, context_len, tile_request, tile_first,
    NUM_HEADS: tl.constexpr, VALUE_DIM: tl.constexpr, VALUE_LANES: tl.constexpr, WINDOW: tl.constexpr,
    SPLITS: tl.constexpr, SMALLEST_SPLIT: tl.constexpr,
):  # fmt: skip
    """Merge the shares of one token and query head that `attention_kernel` left. Grid: (tiles, NUM_HEADS)."""
    tile, head = tl.program_id(0), tl.program_id(1)
    request, token = tl.load(tile_request + tile), tl.load(tile_first + tile)
    context = tl.load(context_len + request)
    num_seen = context - first_seen(context - 1, WINDOW)
    share = tokens_of_a_split(num_seen, SPLITS, SMALLEST_SPLIT)

    splits, dims = tl.arange(0, SPLITS), tl.arange(0, VALUE_LANES)
    is_share = splits * share < num_seen
    place = (tile * NUM_HEADS + head).to(tl.int64) * SPLITS + splits
    lse = tl.load(partial_lse + place, is_share, other=-float("inf"))
    weights = tl.exp2(lse - tl.max(lse, 0))
    results = tl.load(
        partial + place[:, None] * VALUE_DIM + dims[None, :],
        is_share[:, None] & (dims < VALUE_DIM)[None, :], other=0.0,
    )  # fmt: skip
    merged = tl.sum(results * weights[:, None], 0) / tl.sum(weights, 0)
    place = token.to(tl.int64) * NUM_HEADS + head
    tl.store(output + place * VALUE_DIM + dims, merged.to(output.dtype.element_ty), dims < VALUE_DIM)
