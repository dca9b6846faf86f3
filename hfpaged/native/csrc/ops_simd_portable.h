// Vec16 for everything else: SSE2 on any x86-64, NEON on ARM.
#pragma once
#include <cstring>

#include "ops_types.h"

namespace hfp {
namespace HFP_ISA {

constexpr int kLanes = 16;

// Four vectors of four lanes in the compiler's own notation.
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
inline uint32_t above_mask16(Vec16 a, Vec16 b) {
  uint32_t mask = 0;
  for (int i = 0; i < kLanes; i++) mask |= uint32_t(a.q[i / 4][i % 4] > b.q[i / 4][i % 4]) << i;
  return mask;
}
inline Vec16 where_above16(Vec16 a, Vec16 x, Vec16 y) {
  return each_quad([&](int i) { return x.q[i] > y.q[i] ? a.q[i] : Quad{}; });
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

inline Vec16 load16(const int8_t* p) {
  float lanes[kLanes];
  for (int i = 0; i < kLanes; i++) lanes[i] = p[i];
  return load16(lanes);
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

}  // namespace HFP_ISA
}  // namespace hfp
