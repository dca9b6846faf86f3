// Packed 4-bit weights as bf16 numbers, the operands of vdpbf16ps.
//
// An E2M1 value is zero, a power of two or one and a half times that; an E4M3 scale has four significant bits, an E8M0
// scale one. Their product has at most six, so it is a bf16 number, and its bits are a sum of integers:
//   sign + bits(scale / 2) + (e << 7) + (the value is 1.5 * 2^n ? bits(1.5 * scale) - bits(scale) : 0)
// with e from 0 (for 0.5) to 3 (for 4 and 6). A lookup of the code gives the sign, e and, in bits 2 to 6, where to add
// the last term. It is higher by kTop, all but the zero's, so that a saturating subtraction leaves zero as it is.
#pragma once
#include "strips_decode.h"

#if defined(__AVX512BF16__)
namespace hfp {
namespace HFP_ISA {

// A table for lookup32. Indices are the low five bits of a lane; most tables do not look at all of them.
struct alignas(64) Table32 {
  uint16_t values[32];
};

inline __m512i lookup32(__m512i table, __m512i index) { return _mm512_permutexvar_epi16(index, table); }
inline __m512i loaded(const Table32& table) { return _mm512_load_si512(table.values); }

struct DotStep {
  using Weights = __m512i;
  using Input = __m512i;
  using Words = __m512i;
  static Words load(const uint32_t* words) { return _mm512_loadu_si512(words); }
  static Input broadcast(const bf16* pair) {
    return _mm512_set1_epi32(static_cast<int>(*reinterpret_cast<const uint32_t*>(pair)));
  }
  static Vec16 accumulate(Vec16 sum, Input x, Weights w) {
    return {_mm512_dpbf16_ps(sum.v, (__m512bh)x, (__m512bh)w)};
  }
  // Must be called for J = 0, 1, 2, 3 in turn: it shifts what is left of the words.
  template <int J>
  static __m512i lookup(Words& words, __m512i table) {
    if constexpr (J > 0) words = _mm512_srli_epi16(words, 4);
    return lookup32(table, words);
  }
};

// An int4 code times an fp32 scale is no bf16 number.
template <>
struct PairStep<bf16, ScaleKind::kFp32> : DotStep {
  using Scale = Vec16;
  struct Table {
    __m512i values;
    explicit Table(CodeKind kind) {
      __m256i bits = bf16_bits(load16(CodeTable(kind).values));
      values = _mm512_inserti64x4(_mm512_castsi256_si512(bits), bits, 1);
    }
  };
  static constexpr bool kScalesSums = true;
  static Scale load_scale(const uint8_t* scales) { return load_scales<ScaleKind::kFp32>(scales); }
  template <int J, Load>
  static Weights decode(Words& words, const Scale&, const Table& table) {
    return lookup<J>(words, table.values);
  }
};

// The steps of weights that have their scales in them, and their lookups.
template <const Table32& kCodes>
struct ScaledStep : DotStep {
  struct Table {
    __m512i values = loaded(kCodes);
    explicit Table(CodeKind) {}
  };
  static constexpr bool kScalesSums = false;
};

constexpr int kTop = 252 << 7;  // the highest that leaves room for e and the last term below the sign

// `last_term`: the bits that it may have.
constexpr Table32 e2m1_table(int last_term) {
  constexpr int exponents[8] = {0, 0, 1, 1, 2, 2, 3, 3};
  Table32 table = {};
  for (int i = 0; i < 32; i++) {
    int magnitude = i & 7, sign = (i & 8) << 12;
    bool has_last_term = magnitude > 1 && magnitude % 2;
    int bits = sign + kTop + (exponents[magnitude] << 7) + (has_last_term ? last_term : 0);
    table.values[i] = static_cast<uint16_t>(magnitude ? bits : 0);
  }
  return table;
}

// a - b, but not below zero.
template <Load kLoad>
inline __m512i saturating_difference(__m512i a, __m512i b) {
  if constexpr (kLoad == Load::kDecoding) return _mm512_subs_epu16(a, b);
  // One instruction more, but none that Zen 4 runs where it runs dot products.
  return _mm512_sub_epi16(_mm512_max_epu16(a, b), b);
}

// For vpshufb: byte i goes to the low bytes of both halves of word i.
struct alignas(64) BytePlaces {
  uint32_t words[kLanes];
};
constexpr BytePlaces spread_places() {
  BytePlaces places = {};
  for (uint32_t i = 0; i < kLanes; i++) places.words[i] = 0x80008000u | i << 16 | i;
  return places;
}
constexpr BytePlaces kSpreadPlaces = spread_places();

inline __m512i spread_bytes(const uint8_t* bytes) {
  __m512i all = _mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(bytes)));
  return _mm512_shuffle_epi8(all, _mm512_load_si512(kSpreadPlaces.words));
}

// An E4M3 byte has four bits e and three bits m, for (1 + m / 8) * 2^(e - 7), or m * 2^-9 if e is 0. Half of that has the
// bits (byte << 4) + (119 << 7); for e = 0, with the byte that it would be if e could be negative.
constexpr int kE4m3Less = kTop - (119 << 7);
constexpr Table32 subnormal_table() {
  // The zero's makes `less` larger than any lookup.
  constexpr int bytes[8] = {(kE4m3Less - 0xfff0) / 16, -2 * 8, -1 * 8, -1 * 8 + 4, 0, 2, 4, 6};
  Table32 table = {};
  for (int i = 0; i < 32; i++) table.values[i] = static_cast<uint16_t>(bytes[i % 8]);
  return table;
}
// By m: bits(1.5 * scale) - bits(scale), with all the bits that are not the last term's.
constexpr Table32 last_term_table() {
  Table32 table = {};
  for (int i = 0; i < 32; i++) {
    int m = i % 8, difference = m <= 2 ? 64 + 8 * m : 96 - 4 * m;  // from m = 3 on, 1.5 * scale has a higher exponent
    table.values[i] = static_cast<uint16_t>(0xff83 | difference);
  }
  return table;
}
constexpr Table32 kE4m3Codes = e2m1_table(0x7c), kSubnormals = subnormal_table(), kLastTerms = last_term_table();

template <>
struct PairStep<bf16, ScaleKind::kE4m3> : ScaledStep<kE4m3Codes> {
  struct Scale {
    __m512i less;       // kTop - bits(scale / 2)
    __m512i last_term;  // a mask for lookups
  };
  static Scale load_scale(const uint8_t* scales) {
    __m512i bytes = spread_bytes(scales);
    __mmask32 is_subnormal = _mm512_testn_epi16_mask(bytes, _mm512_set1_epi16(0x78));
    bytes = _mm512_mask_permutexvar_epi16(bytes, is_subnormal, bytes, loaded(kSubnormals));
    // Nothing saturates, but a common subtraction would be joined with the one in decode, which takes more registers.
    __m512i less = _mm512_subs_epi16(_mm512_set1_epi16(kE4m3Less), _mm512_slli_epi16(bytes, 4));
    return {less, lookup32(loaded(kLastTerms), bytes)};
  }
  template <int J, Load kLoad>
  static Weights decode(Words& words, const Scale& scale, const Table& table) {
    __m512i bits = lookup<J>(words, table.values);
    return saturating_difference<kLoad>(_mm512_and_si512(bits, scale.last_term), scale.less);
  }
};

// An E8M0 byte is the exponent of an fp32 or bf16 number. 2^-127, which would be subnormal, counts as zero: the dot
// product takes subnormal numbers for zero as well. Weights of 2^127 and more are not finite.
constexpr Table32 kE8m0Codes = e2m1_table(64);

template <>
struct PairStep<bf16, ScaleKind::kE8m0> : ScaledStep<kE8m0Codes> {
  using Scale = __m512i;  // kTop - bits(scale / 2)
  static Scale load_scale(const uint8_t* scales) {
    __m512i bytes = spread_bytes(scales);
    __m512i less = _mm512_subs_epu16(_mm512_set1_epi16(kTop + (1 << 7)), _mm512_slli_epi16(bytes, 7));
    return _mm512_mask_mov_epi16(less, _mm512_testn_epi16_mask(bytes, bytes), _mm512_set1_epi16(-1));
  }
  template <int J, Load kLoad>
  static Weights decode(Words& words, const Scale& scale, const Table& table) {
    return saturating_difference<kLoad>(lookup<J>(words, table.values), scale);
  }
};

}  // namespace HFP_ISA
}  // namespace hfp
#endif
