// Online softmax of one row over one chunk of scores, and merging of partial results.
#pragma once
#include "attention.h"
#include "attention_dot.h"
#include "ops_math.h"

namespace hfp {
namespace HFP_ISA {
namespace {

// A range of positions or of tiles.
struct Span {
  int first, last;
  bool empty() const { return first >= last; }
};
inline int smaller(int a, int b) { return a < b ? a : b; }
inline int larger(int a, int b) { return a > b ? a : b; }
inline Span intersect(Span a, Span b) { return {larger(a.first, b.first), smaller(a.last, b.last)}; }
// The tiles that hold any of these positions.
inline Span tiles_of(Span positions) {
  return {positions.first / kTileTokens, (positions.last + kTileTokens - 1) / kTileTokens};
}

// Scores are in units of ln 2, so that their exponentials are powers of two.
constexpr float kLog2E = 1.44269504f;

// Running result of some rows: sum[r] of 2^(score - max[r]), and out[r] the same sum over weighted values.
// sum is 0 for a row that has seen no token yet, and at least about 1 for any other.
struct Partial {
  float* max;
  float* sum;
  float* out;  // [rows][stride]
  int rows, stride;

  Partial(float* memory, int rows, int value_dim)
      : max(memory), sum(memory + rows), out(memory + 2 * rows), rows(rows), stride((value_dim + 15) / 16 * 16) {}

  void clear() const { memset(max, 0, sizeof(float) * partial_floats(rows, stride)); }
};

// 2^x, at most 2^127.
inline float power_of_two(float x) {
  float lanes[kLanes];
  store16(lanes, exp2_16(min16(splat16(x), splat16(127.f))));
  return lanes[0];
}

inline void scale_row(float* row, int count, float factor) {
  for (int i = 0; i < count; i += kLanes) store16(row + i, load16(row + i) * splat16(factor));
}

// x where span.first <= lane < span.last, else `other`.
inline Vec16 keep_lanes(Vec16 x, Span span, float other) {
  static const float kIndex[kLanes] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  Vec16 index = load16(kIndex);
  x = blend_by_sign16(x, splat16(other), index - splat16(float(span.first)));
  return blend_by_sign16(x, splat16(other), splat16(float(span.last - 1)) - index);
}

// Masks and caps the scores of one row in place.
//
// Args:
//   scores: [kChunkTokens].
//   seen: tokens of the chunk that the row attends to, not empty.
//   cap: if not 0, each score becomes cap * tanh(score).
// Returns the largest of those scores.
inline float mask_scores(float* scores, Span seen, float cap) {
  constexpr float kMinusInfinity = -__builtin_inff();
  Vec16 top = splat16(kMinusInfinity);
  Span tiles = tiles_of(seen);
  for (int tile = tiles.first; tile < tiles.last; tile++) {
    int start = tile * kTileTokens;
    float* p = scores + start;
    Vec16 x = load16(p);
    bool whole = seen.first <= start && seen.last >= start + kTileTokens;
    if (cap > 0) x = tanh16(x) * splat16(cap);
    if (!whole) x = keep_lanes(x, {seen.first - start, seen.last - start}, kMinusInfinity);
    if (!whole || cap > 0) store16(p, x);
    top = max16(top, x);
  }
  return largest16(top);
}

// Turns one row's scores of a chunk into factors for its values and updates the row's running result.
//
// Args:
//   scores: [kChunkTokens]; only the tokens in `seen` count.
//   tiles: tiles that will be multiplied with the factors; at least those of `seen`.
//   factors: [kChunkTokens / 2], written for `tiles`: zero outside `seen`.
template <class T>
inline void soften(float* scores, Span seen, Span tiles, float cap, typename Dot<T>::Factor* factors,
                   const Partial& result, int row) {
  constexpr int kFactorsPerTile = kTileTokens / 2;
  Span own = seen.empty() ? Span{tiles.last, tiles.last} : tiles_of(seen);
  memset(factors + tiles.first * kFactorsPerTile, 0, sizeof(*factors) * kFactorsPerTile * (own.first - tiles.first));
  memset(factors + own.last * kFactorsPerTile, 0, sizeof(*factors) * kFactorsPerTile * (tiles.last - own.last));
  if (seen.empty()) return;
  float top = mask_scores(scores, seen, cap);
  bool first = result.sum[row] == 0;
  float max = !first && result.max[row] > top ? result.max[row] : top;
  Vec16 sum = zero16();
  for (int tile = own.first; tile < own.last; tile++) {
    int start = tile * kTileTokens;
    Vec16 x = exp2_16(load16(scores + start) - splat16(max));
    if (seen.first > start || seen.last < start + kTileTokens)
      x = keep_lanes(x, {seen.first - start, seen.last - start}, 0.f);
    sum = sum + x;
    Dot<T>::factors(factors + tile * kFactorsPerTile, x);
  }
  float kept = first ? 0.f : power_of_two(result.max[row] - max);
  result.sum[row] = result.sum[row] * kept + sum16(sum);
  result.max[row] = max;
  if (!first && kept != 1.f) scale_row(result.out + int64_t(row) * result.stride, result.stride, kept);
}

// into += part, row by row. The order of merges is part of the result.
inline void merge(const Partial& into, const Partial& part) {
  for (int row = 0; row < into.rows; row++) {
    if (part.sum[row] == 0) continue;
    float* out = into.out + int64_t(row) * into.stride;
    const float* added = part.out + int64_t(row) * into.stride;
    if (into.sum[row] == 0) {
      into.max[row] = part.max[row];
      into.sum[row] = part.sum[row];
      memcpy(out, added, sizeof(float) * into.stride);
      continue;
    }
    float max = into.max[row] > part.max[row] ? into.max[row] : part.max[row];
    float kept = power_of_two(into.max[row] - max), weight = power_of_two(part.max[row] - max);
    into.sum[row] = into.sum[row] * kept + part.sum[row] * weight;
    into.max[row] = max;
    for (int i = 0; i < into.stride; i += kLanes)
      store16(out + i, fma16(load16(added + i), splat16(weight), load16(out + i) * splat16(kept)));
  }
}

}  // namespace
}  // namespace HFP_ISA
}  // namespace hfp
