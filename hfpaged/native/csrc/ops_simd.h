// Vec16: sixteen fp32 numbers, the unit every kernel of the step program is written in.
// The lane count does not depend on the instruction set, so neither does any order of summation.
#pragma once
#include <cmath>
#include <cstring>
#if defined(__AVX2__)
#include <immintrin.h>
#endif

#include "ops_types.h"

#ifndef HFP_ISA
#error "compile through native/build.py: HFP_ISA names the instruction set"
#endif

namespace hfp {
namespace HFP_ISA {

constexpr int kLanes = 16;

#if defined(__AVX512F__)

struct Vec16 {
  __m512 v;
};
inline Vec16 zero16() { return {_mm512_setzero_ps()}; }
inline Vec16 splat16(float x) { return {_mm512_set1_ps(x)}; }
inline Vec16 load16(const float* p) { return {_mm512_loadu_ps(p)}; }
inline void store16(float* p, Vec16 a) { _mm512_storeu_ps(p, a.v); }
inline Vec16 operator+(Vec16 a, Vec16 b) { return {_mm512_add_ps(a.v, b.v)}; }
inline Vec16 operator-(Vec16 a, Vec16 b) { return {_mm512_sub_ps(a.v, b.v)}; }
inline Vec16 operator*(Vec16 a, Vec16 b) { return {_mm512_mul_ps(a.v, b.v)}; }
inline Vec16 operator/(Vec16 a, Vec16 b) { return {_mm512_div_ps(a.v, b.v)}; }
inline Vec16 max16(Vec16 a, Vec16 b) { return {_mm512_max_ps(a.v, b.v)}; }
inline Vec16 min16(Vec16 a, Vec16 b) { return {_mm512_min_ps(a.v, b.v)}; }
inline Vec16 fma16(Vec16 a, Vec16 b, Vec16 c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
inline Vec16 round_to_int16(Vec16 a) {
  return {_mm512_roundscale_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
}
// a * 2^n for an integral n.
inline Vec16 scale_by_power16(Vec16 a, Vec16 n) { return {_mm512_scalef_ps(a.v, n.v)}; }
inline uint32_t equal_mask16(Vec16 a, Vec16 b) { return _mm512_cmp_ps_mask(a.v, b.v, _CMP_EQ_OQ); }
// b where the sign bit of `sign` is set, else a.
inline Vec16 blend_by_sign16(Vec16 a, Vec16 b, Vec16 sign) {
  return {_mm512_mask_blend_ps(_mm512_movepi32_mask(_mm512_castps_si512(sign.v)), a.v, b.v)};
}

inline Vec16 load16(const bf16* p) {
  __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  return {_mm512_castsi512_ps(_mm512_slli_epi32(wide, 16))};
}

inline __m256i bf16_bits(Vec16 a) {
#if defined(__AVX512BF16__)
  return (__m256i)_mm512_cvtneps_pbh(a.v);
#else
  __m512i bits = _mm512_castps_si512(a.v);
  __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
  __mmask16 nan = _mm512_cmp_ps_mask(a.v, a.v, _CMP_UNORD_Q);
  rounded = _mm512_mask_or_epi32(rounded, nan, bits, _mm512_set1_epi32(0x400000));
  return _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded, 16));
#endif
}
inline void store16(bf16* p, Vec16 a) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), bf16_bits(a)); }

inline Vec16 load16(const fp16* p) { return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))}; }
inline void store16(fp16* p, Vec16 a) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtps_ph(a.v, _MM_FROUND_TO_NEAREST_INT));
}

inline Vec16 load16(const float* p, int count) {
  return {_mm512_maskz_loadu_ps(static_cast<__mmask16>((1u << count) - 1), p)};
}
inline void store16(float* p, Vec16 a, int count) {
  _mm512_mask_storeu_ps(p, static_cast<__mmask16>((1u << count) - 1), a.v);
}

inline float sum16(Vec16 a) { return _mm512_reduce_add_ps(a.v); }
inline float largest16(Vec16 a) { return _mm512_reduce_max_ps(a.v); }

#elif defined(__AVX2__)

struct Vec16 {
  __m256 lo, hi;
};
inline Vec16 zero16() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
inline Vec16 splat16(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
inline Vec16 load16(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
inline void store16(float* p, Vec16 a) {
  _mm256_storeu_ps(p, a.lo);
  _mm256_storeu_ps(p + 8, a.hi);
}
inline Vec16 operator+(Vec16 a, Vec16 b) { return {_mm256_add_ps(a.lo, b.lo), _mm256_add_ps(a.hi, b.hi)}; }
inline Vec16 operator-(Vec16 a, Vec16 b) { return {_mm256_sub_ps(a.lo, b.lo), _mm256_sub_ps(a.hi, b.hi)}; }
inline Vec16 operator*(Vec16 a, Vec16 b) { return {_mm256_mul_ps(a.lo, b.lo), _mm256_mul_ps(a.hi, b.hi)}; }
inline Vec16 operator/(Vec16 a, Vec16 b) { return {_mm256_div_ps(a.lo, b.lo), _mm256_div_ps(a.hi, b.hi)}; }
inline Vec16 max16(Vec16 a, Vec16 b) { return {_mm256_max_ps(a.lo, b.lo), _mm256_max_ps(a.hi, b.hi)}; }
inline Vec16 min16(Vec16 a, Vec16 b) { return {_mm256_min_ps(a.lo, b.lo), _mm256_min_ps(a.hi, b.hi)}; }
inline Vec16 fma16(Vec16 a, Vec16 b, Vec16 c) {
  return {_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi)};
}
inline Vec16 round_to_int16(Vec16 a) {
  constexpr int nearest = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
  return {_mm256_round_ps(a.lo, nearest), _mm256_round_ps(a.hi, nearest)};
}
inline __m256 scale_by_power8(__m256 a, __m256 n) {
  // Two half powers: 2^n itself leaves the range of normal numbers at the ends of exp.
  __m256i whole = _mm256_cvtps_epi32(n);
  __m256i half = _mm256_srai_epi32(whole, 1);
  __m256i rest = _mm256_sub_epi32(whole, half);
  __m256i bias = _mm256_set1_epi32(127);
  __m256 first = _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(half, bias), 23));
  __m256 second = _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(rest, bias), 23));
  return _mm256_mul_ps(_mm256_mul_ps(a, first), second);
}
inline Vec16 scale_by_power16(Vec16 a, Vec16 n) {
  return {scale_by_power8(a.lo, n.lo), scale_by_power8(a.hi, n.hi)};
}
inline uint32_t equal_mask16(Vec16 a, Vec16 b) {
  uint32_t lo = _mm256_movemask_ps(_mm256_cmp_ps(a.lo, b.lo, _CMP_EQ_OQ));
  uint32_t hi = _mm256_movemask_ps(_mm256_cmp_ps(a.hi, b.hi, _CMP_EQ_OQ));
  return lo | hi << 8;
}
inline Vec16 blend_by_sign16(Vec16 a, Vec16 b, Vec16 sign) {
  return {_mm256_blendv_ps(a.lo, b.lo, sign.lo), _mm256_blendv_ps(a.hi, b.hi, sign.hi)};
}

inline __m256 widen8(__m128i bits) { return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16)); }
inline Vec16 load16(const bf16* p) {
  const __m128i* q = reinterpret_cast<const __m128i*>(p);
  return {widen8(_mm_loadu_si128(q)), widen8(_mm_loadu_si128(q + 1))};
}

inline __m256i rounded_bits8(__m256 a) {
  __m256i bits = _mm256_castps_si256(a);
  __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  __m256i rounded = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
  __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
  __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(a, a, _CMP_UNORD_Q));
  return _mm256_srli_epi32(_mm256_blendv_epi8(rounded, quiet, nan), 16);
}
inline void store16(bf16* p, Vec16 a) {
  __m256i packed = _mm256_packus_epi32(rounded_bits8(a.lo), rounded_bits8(a.hi));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm256_permute4x64_epi64(packed, 0xd8));
}

inline Vec16 load16(const fp16* p) {
  const __m128i* q = reinterpret_cast<const __m128i*>(p);
  return {_mm256_cvtph_ps(_mm_loadu_si128(q)), _mm256_cvtph_ps(_mm_loadu_si128(q + 1))};
}
inline void store16(fp16* p, Vec16 a) {
  __m128i* q = reinterpret_cast<__m128i*>(p);
  _mm_storeu_si128(q, _mm256_cvtps_ph(a.lo, _MM_FROUND_TO_NEAREST_INT));
  _mm_storeu_si128(q + 1, _mm256_cvtps_ph(a.hi, _MM_FROUND_TO_NEAREST_INT));
}

inline Vec16 load16(const float* p, int count) {
  alignas(32) float lanes[kLanes] = {};
  std::memcpy(lanes, p, sizeof(float) * count);
  return load16(lanes);
}
inline void store16(float* p, Vec16 a, int count) {
  alignas(32) float lanes[kLanes];
  store16(lanes, a);
  std::memcpy(p, lanes, sizeof(float) * count);
}

// The pairing of the reductions is that of _mm512_reduce_*: halves, quarters, eighths.
inline float sum16(Vec16 a) {
  __m256 eight = _mm256_add_ps(a.lo, a.hi);
  __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps(two, two, 1)));
}
inline float largest16(Vec16 a) {
  __m256 eight = _mm256_max_ps(a.lo, a.hi);
  __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_max_ss(two, _mm_shuffle_ps(two, two, 1)));
}

#else

// Four vectors of four lanes in the compiler's own notation: SSE2 on any x86-64, NEON on ARM.
typedef float Quad __attribute__((vector_size(16)));
typedef int32_t QuadInt __attribute__((vector_size(16)));
struct Vec16 {
  Quad q[4];
};

template <class F>
inline Vec16 each_quad(F&& f) {
  return {{f(0), f(1), f(2), f(3)}};
}
inline Vec16 splat16(float x) {
  return each_quad([&](int) { return Quad{x, x, x, x}; });
}
inline Vec16 zero16() { return splat16(0.f); }
inline Vec16 load16(const float* p) {
  Vec16 a;
  std::memcpy(&a, p, sizeof a);
  return a;
}
inline void store16(float* p, Vec16 a) { std::memcpy(p, &a, sizeof a); }
inline Vec16 operator+(Vec16 a, Vec16 b) {
  return each_quad([&](int i) { return a.q[i] + b.q[i]; });
}
inline Vec16 operator-(Vec16 a, Vec16 b) {
  return each_quad([&](int i) { return a.q[i] - b.q[i]; });
}
inline Vec16 operator*(Vec16 a, Vec16 b) {
  return each_quad([&](int i) { return a.q[i] * b.q[i]; });
}
inline Vec16 operator/(Vec16 a, Vec16 b) {
  return each_quad([&](int i) { return a.q[i] / b.q[i]; });
}
inline Vec16 max16(Vec16 a, Vec16 b) {
  return each_quad([&](int i) { return a.q[i] > b.q[i] ? a.q[i] : b.q[i]; });
}
inline Vec16 min16(Vec16 a, Vec16 b) {
  return each_quad([&](int i) { return a.q[i] < b.q[i] ? a.q[i] : b.q[i]; });
}
inline Vec16 fma16(Vec16 a, Vec16 b, Vec16 c) { return a * b + c; }
inline Vec16 round_to_int16(Vec16 a) {
  // Adding 1.5 * 2^23 leaves no fraction bits; good for |a| < 2^22, and exp needs |a| < 200.
  Vec16 magic = splat16(12582912.f);
  return a + magic - magic;
}
inline Vec16 scale_by_power16(Vec16 a, Vec16 n) {
  return each_quad([&](int i) {
    QuadInt whole = __builtin_convertvector(n.q[i], QuadInt);
    QuadInt half = whole >> 1;
    QuadInt first = (half + 127) << 23, second = (whole - half + 127) << 23;
    return a.q[i] * (Quad)first * (Quad)second;
  });
}
inline uint32_t equal_mask16(Vec16 a, Vec16 b) {
  uint32_t mask = 0;
  for (int i = 0; i < kLanes; i++) mask |= uint32_t(a.q[i / 4][i % 4] == b.q[i / 4][i % 4]) << i;
  return mask;
}
inline Vec16 blend_by_sign16(Vec16 a, Vec16 b, Vec16 sign) {
  return each_quad([&](int i) { return (QuadInt)sign.q[i] < 0 ? b.q[i] : a.q[i]; });
}

inline Vec16 load16(const bf16* p) {
  uint32_t bits[kLanes];
  for (int i = 0; i < kLanes; i++) bits[i] = uint32_t(p[i].bits) << 16;
  Vec16 a;
  std::memcpy(&a, bits, sizeof a);
  return a;
}
inline void store16(bf16* p, Vec16 a) {
  uint32_t bits[kLanes];
  std::memcpy(bits, &a, sizeof a);
  for (int i = 0; i < kLanes; i++) {
    bool nan = (bits[i] & 0x7fffffffu) > 0x7f800000u;
    uint32_t rounded = nan ? bits[i] | 0x400000u : bits[i] + 0x7fffu + (bits[i] >> 16 & 1u);
    p[i].bits = static_cast<uint16_t>(rounded >> 16);
  }
}

inline float widened(fp16 half) {
  uint32_t sign = uint32_t(half.bits & 0x8000) << 16, magnitude = half.bits & 0x7fff;
  float value;
  if (magnitude < 0x400) {
    value = float(magnitude) * 0x1p-24f;  // subnormal
  } else {
    uint32_t exponent_bias = magnitude < 0x7c00 ? 112u << 23 : 224u << 23;  // finite; infinity and NaN
    uint32_t bits = (magnitude << 13) + exponent_bias;
    std::memcpy(&value, &bits, sizeof value);
  }
  return sign ? -value : value;
}
inline fp16 narrowed(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  uint16_t sign = bits >> 16 & 0x8000;
  bits &= 0x7fffffffu;
  if (bits > 0x7f800000u) return {uint16_t(sign | 0x7e00)};
  if (bits >= 0x477ff000u) return {uint16_t(sign | 0x7c00)};  // rounds to 2^16 or more
  if (bits < 0x38800000u) {  // subnormal: let the addition of 0.5 round to a multiple of 2^-24
    float magnitude;
    std::memcpy(&magnitude, &bits, sizeof magnitude);
    magnitude += 0.5f;
    std::memcpy(&bits, &magnitude, sizeof bits);
    return {uint16_t(sign | (bits - 0x3f000000u))};
  }
  bits += 0xfffu + (bits >> 13 & 1u);
  return {uint16_t(sign | ((bits >> 13) - (112u << 10)))};
}
inline Vec16 load16(const fp16* p) {
  float lanes[kLanes];
  for (int i = 0; i < kLanes; i++) lanes[i] = widened(p[i]);
  return load16(lanes);
}
inline void store16(fp16* p, Vec16 a) {
  float lanes[kLanes];
  store16(lanes, a);
  for (int i = 0; i < kLanes; i++) p[i] = narrowed(lanes[i]);
}

inline Vec16 load16(const float* p, int count) {
  float lanes[kLanes] = {};
  std::memcpy(lanes, p, sizeof(float) * count);
  return load16(lanes);
}
inline void store16(float* p, Vec16 a, int count) { std::memcpy(p, &a, sizeof(float) * count); }

inline float sum16(Vec16 a) {
  Quad four = (a.q[0] + a.q[2]) + (a.q[1] + a.q[3]);
  return (four[0] + four[2]) + (four[1] + four[3]);
}
inline float largest16(Vec16 a) {
  Vec16 folded = max16(a, Vec16{{a.q[2], a.q[3], a.q[0], a.q[1]}});
  folded = max16(folded, Vec16{{folded.q[1], folded.q[0], folded.q[1], folded.q[0]}});
  Quad four = folded.q[0];
  float even = four[0] > four[2] ? four[0] : four[2], odd = four[1] > four[3] ? four[1] : four[3];
  return even > odd ? even : odd;
}

#endif

// Parts of vectors of 16-bit numbers go through memory: masks for them would need AVX-512 BW.
template <class Half>
inline Vec16 load_half_part(const Half* p, int count) {
  Half lanes[kLanes] = {};
  std::memcpy(lanes, p, sizeof(Half) * count);
  return load16(lanes);
}
template <class Half>
inline void store_half_part(Half* p, Vec16 a, int count) {
  Half lanes[kLanes];
  store16(lanes, a);
  std::memcpy(p, lanes, sizeof(Half) * count);
}
inline Vec16 load16(const bf16* p, int count) { return load_half_part(p, count); }
inline Vec16 load16(const fp16* p, int count) { return load_half_part(p, count); }
inline void store16(bf16* p, Vec16 a, int count) { store_half_part(p, a, count); }
inline void store16(fp16* p, Vec16 a, int count) { store_half_part(p, a, count); }

// The value a tensor of element type T would hold: what the module's own forward rounds to between two operations.
template <class T>
inline Vec16 rounded16(Vec16 a) {
  T lanes[kLanes];
  store16(lanes, a);
  return load16(lanes);
}
template <>
inline Vec16 rounded16<float>(Vec16 a) {
  return a;
}
#if defined(__AVX512F__)
template <>
inline Vec16 rounded16<bf16>(Vec16 a) {
  return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bf16_bits(a)), 16))};
}
template <>
inline Vec16 rounded16<fp16>(Vec16 a) {
  return {_mm512_cvtph_ps(_mm512_cvtps_ph(a.v, _MM_FROUND_TO_NEAREST_INT))};
}
#endif

template <class T>
inline float rounded(float x) {
  float lanes[kLanes];
  store16(lanes, rounded16<T>(splat16(x)));
  return lanes[0];
}

// The count of a whole vector. As a type, so that code for whole vectors is compiled without a branch.
struct Whole {
  constexpr operator int() const { return kLanes; }
};

template <class T>
inline Vec16 load_upto16(const T* p, Whole) {
  return load16(p);
}
template <class T>
inline void store_upto16(T* p, Vec16 a, Whole) {
  store16(p, a);
}
template <class T>
inline Vec16 load_upto16(const T* p, int count) {
  return count == kLanes ? load16(p) : load16(p, count);
}
template <class T>
inline void store_upto16(T* p, Vec16 a, int count) {
  if (count == kLanes) store16(p, a);
  else store16(p, a, count);
}

// Calls body(offset, count) over [0, n) in pieces of 16 lanes; only the last may be shorter.
template <class Body>
inline void for_each16(int n, Body&& body) {
  int i = 0;
  for (; i + kLanes <= n; i += kLanes) body(i, Whole{});
  if (i < n) body(i, n - i);
}

}  // namespace HFP_ISA
}  // namespace hfp
