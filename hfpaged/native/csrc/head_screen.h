// A copy of a head's weight in 8 bits, from which follows what a logit is at least and at most.
//
// Where only the largest logit of a row is asked for, products of this copy and of the row in 8 bits rule out all columns
// but those of a few panels, which alone are multiplied exactly. With r and q for what the two roundings leave out,
//   x = digits * scale + r    weight[n] = code[n] * scale[n] + q[n]
//   x * weight[n] = scale * scale[n] * (digits * code[n]) + r * (code[n] * scale[n]) + x * q[n]
// and by Cauchy and Schwarz the last two are at most |r| * |code[n] * scale[n]| and |x| * |q[n]|.
#pragma once
#include <cstdint>

#include "gemm.h"

namespace hfp {

// What is added to a code, so that it is not negative: the dot product of bytes takes one factor without a sign.
constexpr int kCodeOffset = 128;

struct HeadScreen {
  uint32_t* codes;  // [panel_count][quads][64] words of four neighbouring k, 64-byte aligned; null: there is no screen
  float* scales;    // [panel_count][64]
  float* lengths;   // [panel_count][64]: |code[n] * scale[n]| at most
  float* errors;    // [panel_count][64]: of |q[n]| and what fp32 rounds, relative to |x|; infinite where unknown
  int32_t columns;  // 64 * panel_count
  int32_t quads;    // words of a column; past K the codes are zero

  HFP_ALWAYS_INLINE uint32_t* panel(int64_t index) const { return codes + index * quads * kPanelColumns; }
  HFP_ALWAYS_INLINE PackedWeight as_weight() const {
    return {reinterpret_cast<const char*>(codes), nullptr, nullptr, columns, quads};
  }
};

// Quads of a row with digits of more than 8 bits, at most.
constexpr int kMostOutliers = 64;

// A row of the head's input as three arrays of digits:  x = (coarse + 128 * outliers) * scale + fine * fine_scale + rest
struct ScreenRow {
  float length;                        // |x|; infinite where the row has no bounds
  float scale, fine_scale;
  float coarse_rest, fine_rest;        // |rest| without the fine digits, and with them
  int32_t coarse_offset, fine_offset;  // what kCodeOffset adds to the products
  int32_t outliers;                    // quads that have such digits
  int32_t quads[kMostOutliers];        // which ones
  int8_t digits[kMostOutliers][4];
};

// What the threads of a step share about a screened head.
struct ScreenWork {
  ScreenRow* rows;     // [samples]
  int8_t* coarse;      // [samples][stride]
  int8_t* fine;        // [samples][stride]
  int64_t stride;
  float* least;        // [samples]: the largest logit is no smaller
  float* most;         // [panel_count][samples]: no logit of the panel is larger; -inf if it is smaller than the largest
  int32_t next_panel;  // the first one that no thread took yet, when panels are multiplied exactly
};

}  // namespace hfp
