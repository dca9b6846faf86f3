// Rounds one panel of a head's weight to 8 bits and measures what that leaves out.
#include <math.h>

#include "screen_rows.h"

namespace hfp {
namespace HFP_ISA {
namespace {

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
    float inverse = kLargestDigit / scales.scale[lane];
    // Not so of columns of zeros, and of numbers that are none or beyond what an inverse can be taken of.
    bool is_usable = inverse > 0.f && inverse < __builtin_inff() && scales.square[lane] < __builtin_inff();
    scales.inverse[lane] = is_usable ? inverse : 0.f;
    scales.scale[lane] = is_usable ? scales.scale[lane] / kLargestDigit : 0.f;
  }
  return scales;
}

inline void store_codes(uint32_t* words, const Vec16 (&codes)[4]) {
  alignas(64) float lanes[4][kLanes];
  for (int i = 0; i < 4; i++) store16(lanes[i], codes[i] + splat16(float(kCodeOffset)));
  for (int lane = 0; lane < kLanes; lane++) {
    uint32_t word = 0;
    for (int i = 0; i < 4; i++) word |= static_cast<uint32_t>(static_cast<int32_t>(lanes[i][lane])) << 8 * i;
    words[lane] = word;
  }
}

// Squares of the lengths of sixteen columns: of their codes, and of what these leave out.
struct CodeSquares {
  Vec16 codes, rest;
};

template <class Columns>
CodeSquares write_codes(const Columns& columns, const ColumnScales& scales, int quads, uint32_t* words) {
  Vec16 scale = load16(scales.scale), inverse = load16(scales.inverse);
  CodeSquares squares = {zero16(), zero16()};
  for (int quad = 0; quad < quads; quad++, words += kPanelColumns) {
    Vec16 codes[4] = {zero16(), zero16(), zero16(), zero16()};
    for (int half = 0; half < 2 && 2 * quad + half < columns.pairs(); half++) {
      WordPair pair = columns.pair(2 * quad + half);
      Vec16 weights[2] = {pair.even, pair.odd};
      for (int i = 0; i < 2; i++) {
        Vec16 code = rounded_digit16(weights[i] * inverse), rest = weights[i] - code * scale;
        squares.codes = fma16(code, code, squares.codes);
        squares.rest = fma16(rest, rest, squares.rest);
        codes[2 * half + i] = code;
      }
    }
    store_codes(words, codes);
  }
  return squares;
}

template <class T>
void fill_panel(const HeadScreen& screen, const PackedWeight& weight, int64_t panel) {
  // Rounding errors of both products: each addition of K loses at most 2^-24 of |x| * |weight[n]|, the exact kernel's
  // of 16-bit numbers twice that, and the few operations behind the sums of codes no more. And some more for those of
  // this function itself, and for squares that vanish.
  const float rounding = static_cast<float>(4 * screen.quads + 16) * 0x1p-22f, more = 1.001f, vanished = 1e-15f;
  for (int v = 0; v < kPanelVectors; v++) {
    const uint32_t* words = reinterpret_cast<const uint32_t*>(weight.panel(panel)) + v * kLanes;
    ColumnsOf<T> columns = {words, weight.depth};
    ColumnScales scales = scales_of(columns);
    CodeSquares squares = write_codes(columns, scales, screen.quads, screen.panel(panel) + v * kLanes);
    alignas(64) float codes[kLanes], rest[kLanes];
    store16(codes, squares.codes);
    store16(rest, squares.rest);
    int64_t first = panel * kPanelColumns + v * kLanes;
    for (int lane = 0; lane < kLanes; lane++) {
      float error = (sqrtf(rest[lane]) + rounding * sqrtf(scales.square[lane])) * more + vanished;
      screen.scales[first + lane] = scales.scale[lane];
      screen.lengths[first + lane] = sqrtf(codes[lane]) * scales.scale[lane] * more;
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
