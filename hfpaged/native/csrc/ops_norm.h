// Normalization of one row slice, in the rounding conventions of Transformers' modules.
#pragma once
#include <cmath>

#include "ops_simd.h"
#include "program.h"

namespace hfp {
namespace HFP_ISA {

// Sum of f(x) over a row: two interleaved chains, folded at the end.
template <class T, class F>
inline float sum_over(const T* x, int n, F&& f) {
  Vec16 sums[2] = {zero16(), zero16()};
  int i = 0;
  for (; i + 2 * kLanes <= n; i += 2 * kLanes) {
    sums[0] = sums[0] + f(load16(x + i));
    sums[1] = sums[1] + f(load16(x + i + kLanes));
  }
  for_each16(n - i, [&](int offset, auto count) {
    Vec16 term = f(load_upto16(x + i + offset, count));
    if (count < kLanes) {
      alignas(64) float lanes[kLanes];
      store16(lanes, term);
      term = load16(lanes, count);  // f(0) need not be 0
    }
    sums[0] = sums[0] + term;
  });
  return sum16(sums[0] + sums[1]);
}

// Calls emit(offset, count, normalized) for the pieces of the row.
template <class T, class Emit>
inline void rms_norm(const T* x, int n, const NormWeights& weights, Emit&& emit) {
  float mean_square = sum_over(x, n, [](Vec16 v) { return v * v; }) / n;
  Vec16 inverse = splat16(1.f / sqrtf(mean_square + weights.epsilon));
  bool round_first = weights.kind == NormKind::kRmsRoundedThenScaled;
  for_each16(n, [&](int i, auto count) {
    Vec16 unit = load_upto16(x + i, count) * inverse;
    Vec16 gamma = load_upto16(weights.gamma + i, count);
    emit(i, count, (round_first ? rounded16<T>(unit) : unit) * gamma);
  });
}

template <class T, class Emit>
inline void layer_norm(const T* x, int n, const NormWeights& weights, Emit&& emit) {
  Vec16 mean = splat16(sum_over(x, n, [](Vec16 v) { return v; }) / n);
  float variance = sum_over(x, n, [&](Vec16 v) { return (v - mean) * (v - mean); }) / n;
  Vec16 inverse = splat16(1.f / sqrtf(variance + weights.epsilon));
  for_each16(n, [&](int i, auto count) {
    Vec16 beta = weights.beta ? load_upto16(weights.beta + i, count) : zero16();
    Vec16 unit = (load_upto16(x + i, count) - mean) * inverse;
    emit(i, count, fma16(unit, load_upto16(weights.gamma + i, count), beta));
  });
}

template <class T, class Emit>
inline void normalize(const T* x, int n, const NormWeights& weights, Emit&& emit) {
  if (weights.kind == NormKind::kLayerNorm) layer_norm(x, n, weights, emit);
  else rms_norm(x, n, weights, emit);
}

// y may be x.
template <class T>
inline void normalize_into(const T* x, T* y, int n, const NormWeights& weights) {
  normalize(x, n, weights, [&](int i, auto count, Vec16 value) { store_upto16(y + i, value, count); });
}

}  // namespace HFP_ISA
}  // namespace hfp
