// Rounds one panel of a head's weight to 8 bits and measures what that leaves out.
#include <math.h>

#include "gemm_kernel.h"
#include "head_screen.h"

namespace hfp {
namespace HFP_ISA {
namespace {

constexpr float kLargestCode = 127.f;

// Sixteen columns of a panel, as pairs of neighbouring k.
template <class T>
struct ColumnsOf {
  const uint32_t* words;
  int depth;

  int pairs() const { return depth; }
  WordPair pair(int index) const { return split_words(words + index * kPanelColumns, T{}); }
};
template <>
struct ColumnsOf<float> {
  const uint32_t* words;
  int depth;

  int pairs() const { return (depth + 1) / 2; }
  WordPair pair(int index) const { return {step(2 * index), step(2 * index + 1)}; }

 private:
  Vec16 step(int k) const {
    return k < depth ? load16(reinterpret_cast<const float*>(words + k * kPanelColumns)) : zero16();
  }
};

inline Vec16 absolute16(Vec16 x) { return max16(x, zero16() - x); }

inline Vec16 rounded_code16(Vec16 x, Vec16 inverse) {
  Vec16 code = round_to_int16(x * inverse);
  return max16(min16(code, splat16(kLargestCode)), splat16(-kLargestCode));
}

inline void store_codes(int8_t* codes, Vec16 values) {
  alignas(64) float lanes[kLanes];
  store16(lanes, values);
  for (int lane = 0; lane < kLanes; lane++) codes[lane] = static_cast<int8_t>(lanes[lane]);
}

// Scales of sixteen columns, their inverses, and the squares of the columns' lengths.
struct ColumnScales {
  alignas(64) float scale[kLanes], inverse[kLanes], square[kLanes];
};

template <class Columns>
ColumnScales scales_of(const Columns& columns) {
  Vec16 largest = zero16(), square = zero16();
  for (int i = 0; i < columns.pairs(); i++) {
    WordPair w = columns.pair(i);
    largest = max16(largest, max16(absolute16(w.even), absolute16(w.odd)));
    square = fma16(w.odd, w.odd, fma16(w.even, w.even, square));
  }
  ColumnScales scales;
  store16(scales.scale, largest);
  store16(scales.square, square);
  for (int lane = 0; lane < kLanes; lane++) {
    float inverse = kLargestCode / scales.scale[lane];
    // Not so of columns of zeros, and of numbers that are none or beyond what an inverse can be taken of.
    bool is_usable = inverse > 0.f && inverse < __builtin_inff() && scales.square[lane] < __builtin_inff();
    scales.inverse[lane] = is_usable ? inverse : 0.f;
    scales.scale[lane] = is_usable ? scales.scale[lane] / kLargestCode : 0.f;
  }
  return scales;
}

// Writes the codes of sixteen columns. Returns the squares of what they leave out.
template <class Columns>
Vec16 write_codes(const Columns& columns, const ColumnScales& scales, int8_t* codes) {
  Vec16 scale = load16(scales.scale), inverse = load16(scales.inverse), square = zero16();
  for (int i = 0; i < columns.pairs(); i++, codes += 2 * kPanelColumns) {
    WordPair w = columns.pair(i), code = {rounded_code16(w.even, inverse), rounded_code16(w.odd, inverse)};
    store_codes(codes, code.even);
    store_codes(codes + kPanelColumns, code.odd);
    Vec16 even = w.even - code.even * scale, odd = w.odd - code.odd * scale;
    square = fma16(odd, odd, fma16(even, even, square));
  }
  return square;
}

template <class T>
void fill_panel(const HeadScreen& screen, const PackedWeight& weight, int64_t panel) {
  // Rounding errors of both products: each addition of K loses at most 2^-24 of |x| * |weight[n]|, the exact kernel's
  // of 16-bit numbers twice that. And some more for those of this function itself.
  const float rounding = static_cast<float>(2 * screen.pairs) * 0x1p-22f, more = 1.001f;
  for (int v = 0; v < kPanelVectors; v++) {
    const uint32_t* words = reinterpret_cast<const uint32_t*>(weight.panel(panel)) + v * kLanes;
    ColumnsOf<T> columns = {words, weight.depth};
    ColumnScales scales = scales_of(columns);
    alignas(64) float rest[kLanes];
    store16(rest, write_codes(columns, scales, screen.panel(panel) + v * kLanes));
    int64_t first = panel * kPanelColumns + v * kLanes;
    for (int lane = 0; lane < kLanes; lane++) {
      float error = (sqrtf(rest[lane]) + rounding * sqrtf(scales.square[lane])) * more;
      screen.scales[first + lane] = scales.scale[lane];
      screen.errors[first + lane] = error < __builtin_inff() ? error : __builtin_inff();
    }
  }
}

}  // namespace

void fill_screen(const HeadScreen& screen, const PackedWeight& weight, HfpDtype type, int64_t panel) {
  if (type == HFP_FP32) fill_panel<float>(screen, weight, panel);
  else if (type == HFP_BF16) fill_panel<bf16>(screen, weight, panel);
  else fill_panel<fp16>(screen, weight, panel);
}

}  // namespace HFP_ISA
}  // namespace hfp
