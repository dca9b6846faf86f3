// The multiply-add of attention for each element type: sums of products of neighbouring pairs, in fp32.
//
// Dot<T> has
//   Pairs        sixteen pairs of cache elements, one pair a lane
//   Factor       the pair they are multiplied with, the same in all lanes
//   load         Pairs from a tile; `stride` is the distance of the two numbers of a pair, which only fp32 tiles have
//   first_of     Pairs with zeros in the place of the second numbers
//   keep_in_register   stops the compiler from loading pairs again for each row that uses them
//   multiply_add sum + factor.first * pairs.first + factor.second * pairs.second, per lane
//   factors      query elements, or sixteen probabilities, as Factors
#pragma once
#include <string.h>

#include "ops_simd.h"

namespace hfp {
namespace HFP_ISA {
namespace {

// Tokens that share a row of a value tile.
template <class T>
constexpr int kTokensPerRow = sizeof(T) == 2 ? 2 : 1;

struct FloatPairs {
  Vec16 first, second;
};
struct FloatFactor {
  float first, second;
};

// What the element types without an instruction of their own share: products in fp32.
template <class T>
struct FloatDot {
  using Pairs = FloatPairs;
  using Factor = FloatFactor;
  static inline Pairs first_of(Pairs pairs) { return {pairs.first, zero16()}; }
  static inline void keep_in_register(Pairs&) {}
  static inline Vec16 multiply_add(Vec16 sum, const Factor& factor, Pairs pairs) {
    sum = fma16(splat16(factor.first), pairs.first, sum);
    return fma16(splat16(factor.second), pairs.second, sum);
  }
  static inline void factors(Factor* out, const T* row, int count) {
    float* numbers = &out->first;
    for_each16(2 * count, [&](int i, auto lanes) { store_upto16(numbers + i, load_upto16(row + i, lanes), lanes); });
  }
  static inline void factors(Factor* out, Vec16 lanes) { store16(&out->first, lanes); }
};

template <class T>
struct Dot;

template <>
struct Dot<float> : FloatDot<float> {
  static inline FloatPairs load(const float* p, int stride) { return {load16(p), load16(p + stride)}; }
};

#if defined(__AVX512BF16__)

template <>
struct Dot<bf16> {
  using Pairs = __m512bh;
  using Factor = uint32_t;
  static inline Pairs load(const bf16* p, int) {
    return (__m512bh)_mm512_loadu_si512(p);
  }
  static inline Pairs first_of(Pairs pairs) {
    return (__m512bh)_mm512_and_si512((__m512i)pairs, _mm512_set1_epi32(0xffff));
  }
  static inline void keep_in_register(Pairs& pairs) { asm("" : "+v"(pairs)); }
  static inline Vec16 multiply_add(Vec16 sum, const Factor& factor, Pairs pairs) {
    return {_mm512_dpbf16_ps(sum.v, (__m512bh)_mm512_set1_epi32(int(factor)), pairs)};
  }
  static inline void factors(Factor* out, const bf16* row, int count) { memcpy(out, row, count * sizeof(Factor)); }
  static inline void factors(Factor* out, Vec16 lanes) { store16(reinterpret_cast<bf16*>(out), lanes); }
};

#else

template <>
struct Dot<bf16> : FloatDot<bf16> {
  static inline FloatPairs load(const bf16* p, int) {
#if defined(__AVX512F__)
    __m512i pairs = _mm512_loadu_si512(p);
    __m512i second = _mm512_and_si512(pairs, _mm512_set1_epi32(int(0xffff0000u)));
    return {{_mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16))}, {_mm512_castsi512_ps(second)}};
#elif defined(__AVX2__)
    const __m256i* q = reinterpret_cast<const __m256i*>(p);
    __m256i lo = _mm256_loadu_si256(q), hi = _mm256_loadu_si256(q + 1);
    __m256i upper = _mm256_set1_epi32(int(0xffff0000u));
    return {{_mm256_castsi256_ps(_mm256_slli_epi32(lo, 16)), _mm256_castsi256_ps(_mm256_slli_epi32(hi, 16))},
            {_mm256_castsi256_ps(_mm256_and_si256(lo, upper)), _mm256_castsi256_ps(_mm256_and_si256(hi, upper))}};
#else
    FloatPairs pairs;
    for (int i = 0; i < 4; i++) {
      QuadInt bits;
      memcpy(&bits, p + 8 * i, sizeof bits);
      pairs.first.q[i] = (Quad)(bits << 16);
      pairs.second.q[i] = (Quad)(bits & int32_t(0xffff0000u));
    }
    return pairs;
#endif
  }
};

#endif

template <>
struct Dot<fp16> : FloatDot<fp16> {
  static inline FloatPairs load(const fp16* p, int) {
#if defined(__AVX512F__)
    __m512i pairs = _mm512_loadu_si512(p);
    __m256i first = _mm512_cvtepi32_epi16(pairs), second = _mm512_cvtepi32_epi16(_mm512_srli_epi32(pairs, 16));
    return {{_mm512_cvtph_ps(first)}, {_mm512_cvtph_ps(second)}};
#elif defined(__AVX2__)
    FloatPairs pairs;
    load_half(p, pairs.first.lo, pairs.second.lo);
    load_half(p + kLanes, pairs.first.hi, pairs.second.hi);
    return pairs;
#else
    float both[2 * kLanes], first[kLanes], second[kLanes];
    store16(both, load16(p));
    store16(both + kLanes, load16(p + kLanes));
    for (int i = 0; i < kLanes; i++) first[i] = both[2 * i], second[i] = both[2 * i + 1];
    return {load16(first), load16(second)};
#endif
  }

#if defined(__AVX2__) && !defined(__AVX512F__)
  static inline void load_half(const fp16* p, __m256& first, __m256& second) {
    const __m256i unzip = _mm256_setr_epi8(0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15,  //
                                           0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15);
    __m256i pairs = _mm256_shuffle_epi8(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)), unzip);
    pairs = _mm256_permute4x64_epi64(pairs, 0xd8);
    first = _mm256_cvtph_ps(_mm256_castsi256_si128(pairs));
    second = _mm256_cvtph_ps(_mm256_extracti128_si256(pairs, 1));
  }
#endif
};

}  // namespace
}  // namespace HFP_ISA
}  // namespace hfp
