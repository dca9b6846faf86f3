// Vec16 for AVX-512, with and without BF16.
#pragma once
#include <immintrin.h>

#include "ops_types.h"

namespace hfp {
namespace HFP_ISA {

constexpr int kLanes = 16;

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
// Lanes in which a > b.
inline uint32_t above_mask16(Vec16 a, Vec16 b) { return _mm512_cmp_ps_mask(a.v, b.v, _CMP_GT_OQ); }
// a where x > y, else 0.
inline Vec16 where_above16(Vec16 a, Vec16 x, Vec16 y) {
  return {_mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x.v, y.v, _CMP_GT_OQ), a.v)};
}
// Stores the lanes in `mask` side by side; all 16 places at p may be written. Returns their number.
inline int pack16(float* p, Vec16 a, uint32_t mask) {
  _mm512_storeu_ps(p, _mm512_maskz_compress_ps(static_cast<__mmask16>(mask), a.v));
  return __builtin_popcount(mask);
}
// The same for first, first + 1, ...
inline int pack16(int32_t* p, int32_t first, uint32_t mask) {
  __m512i lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  __m512i numbers = _mm512_add_epi32(_mm512_set1_epi32(first), lanes);
  _mm512_storeu_si512(p, _mm512_maskz_compress_epi32(static_cast<__mmask16>(mask), numbers));
  return __builtin_popcount(mask);
}
// b where the sign bit of `sign` is set, else a.
inline Vec16 blend_by_sign16(Vec16 a, Vec16 b, Vec16 sign) {
  return {_mm512_mask_blend_ps(_mm512_movepi32_mask(_mm512_castps_si512(sign.v)), a.v, b.v)};
}

inline Vec16 load16(const int8_t* p) {
  return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))))};
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

inline Vec16 load16(const fp16* p) {
  return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
}
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

}  // namespace HFP_ISA
}  // namespace hfp
