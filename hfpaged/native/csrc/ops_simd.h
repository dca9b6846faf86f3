// Vec16: sixteen fp32 numbers, the unit every kernel of the step program is written in.
// The lane count does not depend on the instruction set, so neither does any order of summation.
#pragma once
#ifndef HFP_ISA
#error "compile through native/build.py: HFP_ISA names the instruction set"
#endif
#include <cstring>

#if defined(__AVX512F__)
#include "ops_simd_avx512.h"
#elif defined(__AVX2__)
#include "ops_simd_avx2.h"
#else
#include "ops_simd_portable.h"
#endif

namespace hfp {
namespace HFP_ISA {

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

#if !defined(__AVX512F__)
inline int pack16(float* p, Vec16 a, uint32_t mask) {
  float lanes[kLanes];
  store16(lanes, a);
  int count = 0;
  for (uint32_t left = mask; left; left &= left - 1) p[count++] = lanes[__builtin_ctz(left)];
  return count;
}
inline int pack16(int32_t* p, int32_t first, uint32_t mask) {
  int count = 0;
  for (uint32_t left = mask; left; left &= left - 1) p[count++] = first + __builtin_ctz(left);
  return count;
}
#endif

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
