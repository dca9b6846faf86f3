// Vec16 for AVX2 with FMA and F16C.
#pragma once
#include <immintrin.h>

#include <cstring>

#include "ops_types.h"

namespace hfp {
namespace HFP_ISA {

constexpr int kLanes = 16;

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
inline uint32_t above_mask16(Vec16 a, Vec16 b) {
  uint32_t lo = _mm256_movemask_ps(_mm256_cmp_ps(a.lo, b.lo, _CMP_GT_OQ));
  uint32_t hi = _mm256_movemask_ps(_mm256_cmp_ps(a.hi, b.hi, _CMP_GT_OQ));
  return lo | hi << 8;
}
inline Vec16 where_above16(Vec16 a, Vec16 x, Vec16 y) {
  return {_mm256_and_ps(a.lo, _mm256_cmp_ps(x.lo, y.lo, _CMP_GT_OQ)),
          _mm256_and_ps(a.hi, _mm256_cmp_ps(x.hi, y.hi, _CMP_GT_OQ))};
}
inline Vec16 blend_by_sign16(Vec16 a, Vec16 b, Vec16 sign) {
  return {_mm256_blendv_ps(a.lo, b.lo, sign.lo), _mm256_blendv_ps(a.hi, b.hi, sign.hi)};
}

inline __m256 load8(const int8_t* p) {
  return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
}
inline Vec16 load16(const int8_t* p) { return {load8(p), load8(p + 8)}; }

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

}  // namespace HFP_ISA
}  // namespace hfp
