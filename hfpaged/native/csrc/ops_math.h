// Elementary functions on Vec16 and the activations built from them.
#pragma once
#include "ops_simd.h"

namespace hfp {
namespace HFP_ISA {

template <int N>
inline Vec16 horner16(const float (&coefficients)[N], Vec16 x) {
  Vec16 p = splat16(coefficients[0]);
  for (int i = 1; i < N; i++) p = fma16(p, x, splat16(coefficients[i]));
  return p;
}

// exp by range reduction to [-ln2/2, ln2/2] and a polynomial of degree 7 (relative error below 2e-7).
inline Vec16 exp16(Vec16 x) {
  x = min16(max16(x, splat16(-104.f)), splat16(88.7f));
  Vec16 n = round_to_int16(x * splat16(1.44269504f));
  // ln 2 in two parts (Cody and Waite), so that n * ln 2 is subtracted without rounding.
  Vec16 r = fma16(n, splat16(-0.693145752f), x);
  r = fma16(n, splat16(-1.42860677e-6f), r);
  constexpr float taylor[] = {1.f / 5040, 1.f / 720, 1.f / 120, 1.f / 24, 1.f / 6, 0.5f, 1.f, 1.f};
  return scale_by_power16(horner16(taylor, r), n);
}

// 2^x for x up to 127; what is too small for a float becomes 0. The polynomial has the least relative error (2e-9) of
// those of degree 6 on [-1/2, 1/2] that are 1 at 0.
inline Vec16 exp2_16(Vec16 x) {
  x = max16(x, splat16(-151.f));
  Vec16 n = round_to_int16(x);
  constexpr float minimax[] = {1.5353362e-4f, 1.3398874e-3f, 9.6184369e-3f, 5.5503324e-2f,
                               2.4022648e-1f, 6.9314718e-1f, 1.f};
  return scale_by_power16(horner16(minimax, x - n), n);
}

inline Vec16 negate16(Vec16 x) { return zero16() - x; }
inline Vec16 abs16(Vec16 x) { return max16(x, negate16(x)); }

inline Vec16 tanh16(Vec16 x) {
  // Odd, so computed for |x|: 1 - 2 / (e^2x + 1) cancels for small x, where x - x^3/3 + 2x^5/15 serves.
  Vec16 a = abs16(x);
  Vec16 one = splat16(1.f);
  Vec16 large = one - splat16(2.f) / (exp16(a + a) + one);
  Vec16 square = a * a;
  Vec16 series = fma16(square, splat16(-17.f / 315), splat16(2.f / 15));
  series = fma16(square, series, splat16(-1.f / 3));
  Vec16 small = fma16(a * square, series, a);
  Vec16 magnitude = blend_by_sign16(large, small, a - splat16(0.15f));
  return blend_by_sign16(magnitude, negate16(magnitude), x);
}

// Polynomials of N. Juffa's erff: below 2 units in the last place.
inline Vec16 erf16(Vec16 x) {
  constexpr float near_zero[] = {-5.96761703e-4f, 4.99119423e-3f,  -2.67681349e-2f,
                                 1.12819925e-1f,  -3.76125336e-1f, 1.28379166e-1f};
  constexpr float tail[] = {-1.06777877e-1f, -6.34846687e-1f, -1.28717512e-1f};
  Vec16 a = abs16(x), square = x * x;
  Vec16 small = fma16(horner16(near_zero, square), a, a);
  Vec16 r = fma16(splat16(-1.72853470e-5f), a, splat16(3.83197126e-4f));
  r = fma16(r, square, fma16(splat16(-3.88396438e-3f), a, splat16(2.42546219e-2f)));
  for (float c : tail) r = fma16(r, a, splat16(c));
  Vec16 large = splat16(1.f) - exp16(fma16(r, a, negate16(a)));
  Vec16 magnitude = blend_by_sign16(large, small, a - splat16(0.927734375f));
  return blend_by_sign16(magnitude, negate16(magnitude), x);
}

inline Vec16 silu16(Vec16 x) { return x / (splat16(1.f) + exp16(negate16(x))); }

inline Vec16 gelu_erf16(Vec16 x) {
  return splat16(0.5f) * x * (splat16(1.f) + erf16(x * splat16(0.70710678f)));
}

inline Vec16 gelu_tanh16(Vec16 x) {
  Vec16 inner = splat16(0.79788456f) * fma16(splat16(0.044715f) * x * x, x, x);
  return splat16(0.5f) * x * (splat16(1.f) + tanh16(inner));
}

}  // namespace HFP_ISA
}  // namespace hfp
