// Values of packed 4-bit codes and of their scales, for each instruction set.
#pragma once
#include "gemm_kernel.h"
#include "strips.h"

namespace hfp {
namespace HFP_ISA {

// The value of each code: rows by CodeKind.
alignas(64) constexpr float kCodeValues[2][16] = {
    {0.f, 0.5f, 1.f, 1.5f, 2.f, 3.f, 4.f, 6.f, -0.f, -0.5f, -1.f, -1.5f, -2.f, -3.f, -4.f, -6.f},
    {-8.f, -7.f, -6.f, -5.f, -4.f, -3.f, -2.f, -1.f, 0.f, 1.f, 2.f, 3.f, 4.f, 5.f, 6.f, 7.f},
};

// A table for decode16.
struct CodeTable {
  const float* values;

  explicit CodeTable(CodeKind kind) : values(kCodeValues[static_cast<int>(kind)]) {}
};

// Values of the codes at bit `shift` of sixteen words.
#if defined(__AVX512F__)
inline Vec16 decode16(const uint32_t* words, int shift, const CodeTable& table) {
  __m512i index = _mm512_srli_epi32(_mm512_loadu_si512(words), shift);
  return {_mm512_permutexvar_ps(index, _mm512_load_ps(table.values))};
}
#elif defined(__AVX2__)
inline __m256 decode8(const uint32_t* words, int shift, const CodeTable& table) {
  __m256i index = _mm256_srli_epi32(load_words8(words), shift);
  __m256 low = _mm256_permutevar8x32_ps(_mm256_load_ps(table.values), index);
  __m256 high = _mm256_permutevar8x32_ps(_mm256_load_ps(table.values + 8), index);
  return _mm256_blendv_ps(low, high, _mm256_castsi256_ps(_mm256_slli_epi32(index, 28)));  // bit 3 becomes the sign
}
inline Vec16 decode16(const uint32_t* words, int shift, const CodeTable& table) {
  return {decode8(words, shift, table), decode8(words + 8, shift, table)};
}
#else
inline Vec16 decode16(const uint32_t* words, int shift, const CodeTable& table) {
  float lanes[kLanes];
  for (int i = 0; i < kLanes; i++) lanes[i] = table.values[words[i] >> shift & 15];
  return load16(lanes);
}
#endif

// Scales of sixteen columns as fp32, none negative. The bits of an E4M3 number are those of an fp16 number 256 times
// smaller, shifted.
template <ScaleKind kKind>
inline Vec16 load_scales(const uint8_t* scales) {
  if constexpr (kKind == ScaleKind::kFp32) return load16(reinterpret_cast<const float*>(scales));
#if defined(__AVX512F__)
  __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(scales));
  if constexpr (kKind == ScaleKind::kE8m0)
    return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu8_epi32(bytes), 23))};
  return Vec16{_mm512_cvtph_ps(_mm256_slli_epi16(_mm256_cvtepu8_epi16(bytes), 7))} * splat16(256.f);
#else
  if constexpr (kKind == ScaleKind::kE8m0) {
    uint32_t bits[kLanes];
    for (int i = 0; i < kLanes; i++) bits[i] = uint32_t(scales[i]) << 23;
    float lanes[kLanes];
    std::memcpy(lanes, bits, sizeof lanes);
    return load16(lanes);
  } else {
    fp16 halves[kLanes];
    for (int i = 0; i < kLanes; i++) halves[i].bits = static_cast<uint16_t>(scales[i] << 7);
    return load16(halves) * splat16(256.f);
  }
#endif
}

// What takes the time: decoding with few rows, multiplying with many.
enum class Load { kDecoding, kMultiplying };

// Pair j (inputs 2j and 2j + 1) of sixteen words, multiplied with pairs of inputs in type T. kScalesSums says where the
// scale of a group goes: to the sum of its products, or into `decode`, which then gives the weights themselves.
template <class T, ScaleKind kScales>
struct PairStep {
  using Weights = WordPair;
  using Input = WordPair;
  using Words = const uint32_t*;
  using Scale = Vec16;
  using Table = CodeTable;
  static constexpr bool kScalesSums = true;
  static Words load(const uint32_t* words) { return words; }
  static Scale load_scale(const uint8_t* scales) { return load_scales<kScales>(scales); }
  template <int J, Load>
  static Weights decode(Words& words, const Scale&, const Table& table) {
    return {decode16(words, 4 * J, table), decode16(words, 16 + 4 * J, table)};
  }
  static Input broadcast(const float* pair) { return {splat16(pair[0]), splat16(pair[1])}; }
  template <class Half>
  static Input broadcast(const Half* pair) {
    return broadcast_word(reinterpret_cast<const uint32_t*>(pair), Half{});
  }
  static Vec16 accumulate(Vec16 sum, Input x, Weights w) { return fma16(x.odd, w.odd, fma16(x.even, w.even, sum)); }
};

}  // namespace HFP_ISA
}  // namespace hfp
