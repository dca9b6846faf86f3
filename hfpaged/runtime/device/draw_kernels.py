"""A kernel in Triton that draws a row's token without sorting its scores. Imported at use: Triton is not everywhere.

A program has a row to itself and reads it again for each question, so that its result depends on nothing else in the
batch. Thresholds are found by bisection of the floats in their order as integers: a few bits of the threshold a
reading, always as many readings. Weights of scores are counted in whole 2**-40ths of the highest one's, because the sum
of integers is the same in any order.
"""

# No `from __future__ import annotations`: Triton reads the annotations.
import triton
import triton.language as tl

# The integers that stand for -inf and +inf in the order of floats, and how many bits all of them take.
KEY_OF_MINUS_INF = tl.constexpr(-2139095041)
KEY_OF_INF = tl.constexpr(2139095040)
LOWEST_KEY = tl.constexpr(-(1 << 31))
KEY_BITS = tl.constexpr(32)
UNIT = tl.constexpr(float(1 << 40))


@triton.jit
def float_of(key):
    """The float at a place in the order of floats; int64 -> float32."""
    key = tl.minimum(tl.maximum(key, KEY_OF_MINUS_INF), KEY_OF_INF).to(tl.int32)
    return tl.where(key >= 0, key, key ^ 0x7FFFFFFF).to(tl.float32, bitcast=True)


@triton.jit
def scores_of(logits, ids, vocabulary, inverse):
    """Logits divided by the temperature, float32; -inf behind the vocabulary."""
    scores = tl.load(logits + ids, ids < vocabulary, other=-float("inf")).to(tl.float32) * inverse
    # There is one zero only in the order of floats.
    return tl.where(scores == 0, 0.0, scores)


@triton.jit
def weights_of(scores, highest):
    """exp(score - highest) in whole units, int64."""
    return (tl.exp(scores - highest) * UNIT).to(tl.int64)


@triton.jit
def last_threshold(
    logits, vocabulary, inverse, highest, kth, bound,
    BY_WEIGHT: tl.constexpr, BLOCK: tl.constexpr, WAYS: tl.constexpr, BITS: tl.constexpr,
):  # fmt: skip
    """The highest float for which a condition holds that holds for all below it.

    By weight: of the scores from `kth` on, those below it weigh no more than `bound`. Else: at least `bound` scores are
    not below it.
    """
    lanes = tl.arange(0, BLOCK)
    ways = tl.arange(0, WAYS).to(tl.int64)
    low = bound * 0 + LOWEST_KEY
    for step in range(KEY_BITS // BITS):
        width = (bound * 0 + 1) << (KEY_BITS - BITS * (step + 1))
        thresholds = float_of(low + ways * width)
        sums = tl.zeros([BLOCK, WAYS], tl.int64)
        for start in range(0, vocabulary, BLOCK):
            scores = scores_of(logits, start + lanes, vocabulary, inverse)
            if BY_WEIGHT:
                weights = tl.where(scores >= kth, weights_of(scores, highest), 0)
                sums += tl.where(scores[:, None] < thresholds[None, :], weights[:, None], 0)
            else:
                sums += (scores[:, None] >= thresholds[None, :]).to(tl.int64)
        sums = tl.sum(sums, 0)
        holds = sums <= bound if BY_WEIGHT else sums >= bound
        low += (tl.sum(holds.to(tl.int64), 0) - 1) * width
    return float_of(low)


@triton.jit
def highest_of(logits, vocabulary, inverse, BLOCK: tl.constexpr):
    """The highest score, and how many are NaN or +inf."""
    lanes = tl.arange(0, BLOCK)
    maxima = tl.full([BLOCK], -float("inf"), tl.float32)
    wrong = tl.zeros([BLOCK], tl.int32)
    for start in range(0, vocabulary, BLOCK):
        scores = scores_of(logits, start + lanes, vocabulary, inverse)
        is_wrong = (scores != scores) | (scores == float("inf"))
        wrong += is_wrong.to(tl.int32)
        maxima = tl.maximum(maxima, tl.where(is_wrong, -float("inf"), scores))
    return tl.max(maxima, 0), tl.sum(wrong, 0)


@triton.jit
def weight_between(logits, vocabulary, inverse, highest, low, high, BLOCK: tl.constexpr):
    """What the scores from `low` on and below `high` weigh, and how many are `high`."""
    lanes = tl.arange(0, BLOCK)
    weight = tl.zeros([BLOCK], tl.int64)
    count = tl.zeros([BLOCK], tl.int64)
    for start in range(0, vocabulary, BLOCK):
        scores = scores_of(logits, start + lanes, vocabulary, inverse)
        weight += tl.where((scores >= low) & (scores < high), weights_of(scores, highest), 0)
        count += (scores == high).to(tl.int64)
    return tl.sum(weight, 0), tl.sum(count, 0)


@triton.jit
def cut_of(
    logits, vocabulary, inverse, highest, kth, rest, BLOCK: tl.constexpr, WAYS: tl.constexpr, BITS: tl.constexpr
):  # fmt: skip
    """The lowest score of which top-p keeps any, and how many of those equal to it go: the ones with the lowest ids."""
    whole, _ = weight_between(logits, vocabulary, inverse, highest, kth, float("inf"), BLOCK)
    bound = (rest * whole.to(tl.float64)).to(tl.int64)
    cut = last_threshold(logits, vocabulary, inverse, highest, kth, bound, True, BLOCK, WAYS, BITS)
    # With top_p = 0 all would go.
    cut = tl.minimum(cut, highest)
    below, ties = weight_between(logits, vocabulary, inverse, highest, kth, cut, BLOCK)
    removed = (bound - below) // tl.maximum(weights_of(cut, highest), 1)
    return cut, tl.minimum(removed, ties - 1)


@triton.jit
def kept_weights(scores, ids, highest, kth, cut, removed, min_p, ties_before, vocabulary):
    """float64 weights of the scores that all filters keep, 0 for others; and the scores equal to the cut so far."""
    is_tie = scores == cut
    rank = ties_before + tl.cumsum(is_tie.to(tl.int64), 0)
    is_kept = (scores >= kth) & ((scores > cut) | (is_tie & (rank > removed)))
    is_kept = is_kept & (tl.exp(scores - highest) >= min_p) & (ids < vocabulary)
    weights = tl.where(is_kept, tl.exp(scores.to(tl.float64) - highest.to(tl.float64)), 0.0)
    return weights, ties_before + tl.sum(is_tie.to(tl.int64), 0)


@triton.jit
def token_of(
    logits, vocabulary, inverse, highest, kth, cut, removed, min_p, uniform, BLOCK: tl.constexpr
):  # fmt: skip
    """The first, by id, at which the sum of the kept weights exceeds the random number times all of it."""
    lanes = tl.arange(0, BLOCK)
    sums = tl.zeros([BLOCK], tl.float64)
    ties_before, last = removed * 0, tl.full([BLOCK], -1, tl.int32)
    for start in range(0, vocabulary, BLOCK):
        ids = start + lanes
        scores = scores_of(logits, ids, vocabulary, inverse)
        weights, ties_before = kept_weights(scores, ids, highest, kth, cut, removed, min_p, ties_before, vocabulary)
        sums += weights
        last = tl.where(weights > 0, ids, last)
    target = uniform * tl.sum(sums, 0)
    # The last kept one, should rounding have it that the sum of all does not exceed its part.
    token = tl.max(last, 0)
    ties_before, before = removed * 0, target * 0
    for start in range(0, vocabulary, BLOCK):
        ids = start + lanes
        scores = scores_of(logits, ids, vocabulary, inverse)
        weights, ties_before = kept_weights(scores, ids, highest, kth, cut, removed, min_p, ties_before, vocabulary)
        exceeds = (weights > 0) & (before + tl.cumsum(weights, 0) > target)
        token = tl.minimum(token, tl.min(tl.where(exceeds, ids, vocabulary), 0))
        before += tl.sum(weights, 0)
    return token


@triton.jit
def draw_kernel(
    logits, argmax, numbers, tokens, vocabulary, count, logits_stride_n,
    BLOCK: tl.constexpr, WAYS: tl.constexpr, BITS: tl.constexpr,
):  # fmt: skip
    """Draw the token of one row; -1 if its scores have NaN or +inf, or nothing but -inf. Grid: (count,).

    `numbers` are those of a `DrawTable`.
    """
    row = tl.program_id(0)
    temperature, top_k = tl.load(numbers + row), tl.load(numbers + count + row).to(tl.int64)
    rest, min_p = tl.load(numbers + 2 * count + row), tl.load(numbers + 3 * count + row).to(tl.float32)
    uniform, is_sampled = tl.load(numbers + 4 * count + row), tl.load(numbers + 5 * count + row)
    if is_sampled == 0:
        tl.store(tokens + row, tl.load(argmax + row))
        return
    logits += row.to(tl.int64) * logits_stride_n
    # Through the reciprocal, rounded as PyTorch rounds it.
    inverse = (1.0 / temperature.to(tl.float32).to(tl.float64)).to(tl.float32)
    highest, wrong = highest_of(logits, vocabulary, inverse, BLOCK)
    if (wrong > 0) | (highest == -float("inf")):
        tl.store(tokens + row, tl.full([], -1, tl.int64))
        return
    kth = highest * 0 - float("inf")
    if (top_k > 0) & (top_k < vocabulary):
        kth = last_threshold(logits, vocabulary, inverse, highest, kth, top_k, False, BLOCK, WAYS, BITS)
    cut, removed = highest * 0 - float("inf"), top_k * 0
    if rest >= 0:
        cut, removed = cut_of(logits, vocabulary, inverse, highest, kth, rest, BLOCK, WAYS, BITS)
    token = token_of(logits, vocabulary, inverse, highest, kth, cut, removed, min_p, uniform, BLOCK)
    tl.store(tokens + row, token.to(tl.int64))
