// Rotary position embedding of one head, in place.
#pragma once
#include "ops_math.h"
#include "program.h"

namespace hfp {
namespace HFP_ISA {

// x * cosine + rotated * sine, with the roundings of a module that computes in T (or, without them, in fp32).
template <class T>
inline Vec16 rotate16(Vec16 x, Vec16 rotated, Vec16 cosine, Vec16 sine, bool round_products) {
  Vec16 straight = x * cosine, crossed = rotated * sine;
  return round_products ? rounded16<T>(straight) + rounded16<T>(crossed) : straight + crossed;
}

// Pairs (i, i + dim/2), as rotate_half of Llama and GPT-NeoX.
template <class T>
inline void rotate_halves(T* x, const float* cosine, const float* sine, int dim, bool round_products) {
  int half = dim / 2;
  for_each16(half, [&](int i, auto count) {
    Vec16 low = load_upto16(x + i, count), high = load_upto16(x + half + i, count);
    Vec16 cos_low = load_upto16(cosine + i, count), cos_high = load_upto16(cosine + half + i, count);
    Vec16 sin_low = load_upto16(sine + i, count), sin_high = load_upto16(sine + half + i, count);
    store_upto16(x + i, rotate16<T>(low, negate16(high), cos_low, sin_low, round_products), count);
    store_upto16(x + half + i, rotate16<T>(high, low, cos_high, sin_high, round_products), count);
  });
}

// Pairs (2i, 2i + 1), as GPT-J and Cohere.
template <class T>
inline void rotate_interleaved(T* x, const float* cosine, const float* sine, int dim, bool round_products) {
  for_each16(dim, [&](int i, auto count) {
    Vec16 value = load_upto16(x + i, count);
    alignas(64) float lanes[kLanes], swapped[kLanes];
    store16(lanes, value);
    for (int lane = 0; lane < kLanes; lane += 2) {
      swapped[lane] = -lanes[lane + 1];
      swapped[lane + 1] = lanes[lane];
    }
    Vec16 cos = load_upto16(cosine + i, count), sin = load_upto16(sine + i, count);
    store_upto16(x + i, rotate16<T>(value, load16(swapped), cos, sin, round_products), count);
  });
}

template <class T>
inline void rotate(T* x, const RotaryTable& table, int64_t position, const RotateAndStoreOp& op) {
  const float* cosine = table.cosine + position * op.rotary_dim;
  const float* sine = table.sine + position * op.rotary_dim;
  if (op.style == RotaryStyle::kHalves) rotate_halves(x, cosine, sine, op.rotary_dim, op.round_products);
  else rotate_interleaved(x, cosine, sine, op.rotary_dim, op.round_products);
}

}  // namespace HFP_ISA
}  // namespace hfp
