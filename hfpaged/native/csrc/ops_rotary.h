// Rotary position embedding of some heads of a token, in place.
#pragma once
#include "ops_math.h"
#include "program.h"

namespace hfp {
namespace HFP_ISA {

// Heads of one token, one behind the other.
template <class T>
struct TokenHeads {
  T* data;
  int count, dim;
};

// The terms of a rotation, rounded as by a module that computes in T, or left as they are by one that computes in fp32.
template <class T>
inline Vec16 product16(Vec16 x, Vec16 factor, bool round_products) {
  return round_products ? rounded16<T>(x * factor) : x * factor;
}

// Pairs (i, i + dim/2), as rotate_half of Llama and GPT-NeoX.
template <class T>
inline void rotate_halves(const TokenHeads<T>& heads, const float* cosine, const float* sine, int dim,
                          bool round_products) {
  int half = dim / 2;
  for_each16(half, [&](int i, auto count) {
    Vec16 cos_low = load_upto16(cosine + i, count), cos_high = load_upto16(cosine + half + i, count);
    Vec16 sin_low = load_upto16(sine + i, count), sin_high = load_upto16(sine + half + i, count);
    for (int head = 0; head < heads.count; head++) {
      T* x = heads.data + head * heads.dim + i;
      Vec16 low = load_upto16(x, count), high = load_upto16(x + half, count);
      Vec16 new_low = product16<T>(low, cos_low, round_products) - product16<T>(high, sin_low, round_products);
      Vec16 new_high = product16<T>(high, cos_high, round_products) + product16<T>(low, sin_high, round_products);
      store_upto16(x, new_low, count);
      store_upto16(x + half, new_high, count);
    }
  });
}

// Pairs (2i, 2i + 1), as GPT-J and Cohere.
template <class T>
inline void rotate_interleaved(const TokenHeads<T>& heads, const float* cosine, const float* sine, int dim,
                               bool round_products) {
  for_each16(dim, [&](int i, auto count) {
    Vec16 cos = load_upto16(cosine + i, count), sin = load_upto16(sine + i, count);
    for (int head = 0; head < heads.count; head++) {
      T* x = heads.data + head * heads.dim + i;
      Vec16 value = load_upto16(x, count);
      alignas(64) float lanes[kLanes], swapped[kLanes];
      store16(lanes, value);
      for (int lane = 0; lane < kLanes; lane += 2) {
        swapped[lane] = -lanes[lane + 1];
        swapped[lane + 1] = lanes[lane];
      }
      Vec16 crossed = product16<T>(load16(swapped), sin, round_products);
      store_upto16(x, product16<T>(value, cos, round_products) + crossed, count);
    }
  });
}

template <class T>
inline void rotate(const TokenHeads<T>& heads, const RotaryTable& table, int64_t position, const RotateAndStoreOp& op) {
  const float* cosine = table.cosine + position * op.rotary_dim;
  const float* sine = table.sine + position * op.rotary_dim;
  if (op.style == RotaryStyle::kHalves) rotate_halves(heads, cosine, sine, op.rotary_dim, op.round_products);
  else rotate_interleaved(heads, cosine, sine, op.rotary_dim, op.round_products);
}

}  // namespace HFP_ISA
}  // namespace hfp
