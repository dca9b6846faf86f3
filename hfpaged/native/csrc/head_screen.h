// A copy of a head's weight in 8 bits, from which follows what a logit is at least and at most.
//
// Where only the largest logit of a row is asked for, a head of one row or a few costs what reading its weight costs.
// Half of that, in this copy, rules out all columns but those of a few panels, which alone are multiplied exactly:
//   weight[n, k] = code[n, k] * scale[n] + rest[n, k],  and by Cauchy and Schwarz  |x * rest[n]| <= |x| * |rest[n]|
#pragma once
#include <cstdint>

#include "gemm.h"

namespace hfp {

// Rows beyond which the exact product is as fast: the codes have to be widened before they are multiplied.
constexpr int kScreenRows = 4;

struct HeadScreen {
  int8_t* codes;  // [panel_count][pairs][2][64], 64-byte aligned; null: there is no screen
  float* scales;  // [panel_count][64]
  float* errors;  // [panel_count][64]: of |rest[n]| and what fp32 rounds, relative to |x|; infinite where unknown
  int32_t pairs;  // of neighbouring k; past K the codes are zero

  HFP_ALWAYS_INLINE int64_t panel_bytes() const { return static_cast<int64_t>(pairs) * 2 * kPanelColumns; }
  HFP_ALWAYS_INLINE int8_t* panel(int64_t index) const { return codes + index * panel_bytes(); }
};

// What the threads of a step tell each other about the rows of a screened head.
struct ScreenBounds {
  float* most;   // [panel_count][kScreenRows]: no logit of the panel is larger
  float* least;  // [threads][kScreenRows]: the largest logit is no smaller
};

}  // namespace hfp
