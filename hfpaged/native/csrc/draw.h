// Drawing from scores with given uniform numbers.
#pragma once
#include "abi.h"

// What hfp_draw stores instead of an index.
enum HfpNotDrawn : int64_t {
  HFP_CANNOT_DRAW = -1,  // a score is NaN or +inf, or all are -inf
  HFP_UNDECIDED = -2,    // fp32 is too coarse to tell: the number is too near the bound of an index
};

// For each row the first index up to which the scores have more than the fraction uniforms[i] of all mass. A score's
// mass is its exponential. scores: [num_rows, count], `row_stride` elements from row to row. uniforms: [num_rows] in
// [0, 1). drawn: [num_rows].
HFP_API void hfp_draw(const float* scores, int64_t row_stride, int64_t count, int32_t num_rows, const double* uniforms,
                      int64_t* drawn, int num_threads);
