// The matrix product of bytes: whole numbers, so exact. Sums are 32-bit integers in the bits of a Vec16.
//
// A word is four neighbouring k. Those of the weight are codes without a sign, those of the input digits with one.
#pragma once
#include "gemm_kernel.h"

namespace hfp {
namespace HFP_ISA {

struct Digit {
  int8_t value;
};

#if defined(__AVX512VNNI__)

template <>
struct DepthStep<Digit> {
  using Weights = __m512i;
  using Input = __m512i;
  static Weights load(const uint32_t* words) { return _mm512_loadu_si512(words); }
  static Input broadcast(const uint32_t* word) { return _mm512_set1_epi32(static_cast<int>(*word)); }
  static Vec16 accumulate(Vec16 sum, Input x, Weights w) {
    return {_mm512_castsi512_ps(_mm512_dpbusd_epi32(_mm512_castps_si512(sum.v), w, x))};
  }
};

#else

// Without such a dot product bytes are widened to 16 bits, those of even k and those of odd k.
template <class Vector>
struct BytePairs {
  Vector even, odd;
};

#if defined(__AVX512F__)
template <>
constexpr TileShape kWideTile<Digit> = {4, 4};

template <>
struct DepthStep<Digit> {
  using Weights = BytePairs<__m512i>;
  using Input = BytePairs<__m512i>;
  static Weights load(const uint32_t* words) {
    __m512i w = _mm512_loadu_si512(words);
    return {_mm512_and_si512(w, _mm512_set1_epi16(0xff)), _mm512_srli_epi16(w, 8)};
  }
  static Input broadcast(const uint32_t* word) {
    __m512i x = _mm512_set1_epi32(static_cast<int>(*word));
    return {_mm512_srai_epi16(_mm512_slli_epi16(x, 8), 8), _mm512_srai_epi16(x, 8)};
  }
  static Vec16 accumulate(Vec16 sum, Input x, Weights w) {
    __m512i products = _mm512_add_epi32(_mm512_madd_epi16(w.even, x.even), _mm512_madd_epi16(w.odd, x.odd));
    return {_mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(sum.v), products))};
  }
};
#elif defined(__AVX2__)
template <>
constexpr TileShape kWideTile<Digit> = {4, 1};

template <>
struct DepthStep<Digit> {
  using Input = BytePairs<__m256i>;
  struct Weights {
    BytePairs<__m256i> lo, hi;
  };
  static Weights load(const uint32_t* words) { return {split(load_words8(words)), split(load_words8(words + 8))}; }
  static Input broadcast(const uint32_t* word) {
    __m256i x = _mm256_set1_epi32(static_cast<int>(*word));
    return {_mm256_srai_epi16(_mm256_slli_epi16(x, 8), 8), _mm256_srai_epi16(x, 8)};
  }
  static Vec16 accumulate(Vec16 sum, const Input& x, const Weights& w) {
    return {add_products(sum.lo, x, w.lo), add_products(sum.hi, x, w.hi)};
  }

 private:
  static BytePairs<__m256i> split(__m256i w) {
    return {_mm256_and_si256(w, _mm256_set1_epi16(0xff)), _mm256_srli_epi16(w, 8)};
  }
  static __m256 add_products(__m256 sum, const Input& x, const BytePairs<__m256i>& w) {
    __m256i products = _mm256_add_epi32(_mm256_madd_epi16(w.even, x.even), _mm256_madd_epi16(w.odd, x.odd));
    return _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(sum), products));
  }
};
#else
typedef int16_t ShortInts __attribute__((vector_size(16)));

template <>
struct DepthStep<Digit> {
  using Input = BytePairs<ShortInts>;
  struct Weights {
    BytePairs<ShortInts> quads[4];
  };
  static Weights load(const uint32_t* words) {
    Weights weights;
    for (int i = 0; i < 4; i++) {
      QuadInt w;
      std::memcpy(&w, words + 4 * i, sizeof w);
      weights.quads[i] = {(ShortInts)(w & 0x00ff00ff), (ShortInts)(w >> 8 & 0x00ff00ff)};
    }
    return weights;
  }
  static Input broadcast(const uint32_t* word) {
    int8_t x[4];
    std::memcpy(x, word, sizeof x);
    return {ShortInts{x[0], x[2], x[0], x[2], x[0], x[2], x[0], x[2]},
            ShortInts{x[1], x[3], x[1], x[3], x[1], x[3], x[1], x[3]}};
  }
  static Vec16 accumulate(Vec16 sum, const Input& x, const Weights& w) {
    return each_quad([&](int i) {
      return (Quad)((QuadInt)sum.q[i] + halves_sum(w.quads[i].even * x.even) + halves_sum(w.quads[i].odd * x.odd));
    });
  }

 private:
  // A product of a code and a digit has no more than 16 bits.
  static QuadInt halves_sum(ShortInts products) {
    QuadInt both = (QuadInt)products;
    return (both >> 16) + (both << 16 >> 16);
  }
};
#endif
#endif

// sums + 128 * more - offset, all of them whole numbers, as the nearest fp32 numbers.
inline Vec16 combined_sums16(Vec16 sums, Vec16 more, int32_t offset) {
#if defined(__AVX512F__)
  __m512i total = _mm512_add_epi32(_mm512_castps_si512(sums.v), _mm512_slli_epi32(_mm512_castps_si512(more.v), 7));
  return {_mm512_cvtepi32_ps(_mm512_sub_epi32(total, _mm512_set1_epi32(offset)))};
#elif defined(__AVX2__)
  auto combined = [offset](__m256 sum, __m256 extra) {
    __m256i total = _mm256_add_epi32(_mm256_castps_si256(sum), _mm256_slli_epi32(_mm256_castps_si256(extra), 7));
    return _mm256_cvtepi32_ps(_mm256_sub_epi32(total, _mm256_set1_epi32(offset)));
  };
  return {combined(sums.lo, more.lo), combined(sums.hi, more.hi)};
#else
  return each_quad([&](int i) {
    return __builtin_convertvector((QuadInt)sums.q[i] + ((QuadInt)more.q[i] << 7) - offset, Quad);
  });
#endif
}

}  // namespace HFP_ISA
}  // namespace hfp
