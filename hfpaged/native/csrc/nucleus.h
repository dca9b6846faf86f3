// Top-p: the likeliest tokens of a row that have top_p together.
#pragma once
#include "abi.h"

// One row of scores, and what is found out about it.
typedef struct HfpNucleusRow {
  const float* scores;  // [count], in the order of their ids
  const int64_t* ids;   // [count], or null: 0, 1, ...
  int64_t count;
  double total;  // sum of exp(score - highest score) over all tokens of which these are the likeliest; 0: these are all
  double top_p;  // negative: all that are above -inf stay
  // Out. Tokens stay that exceed `least`, and those that equal it but for the first `surplus`.
  float least;
  int32_t surplus;
  int32_t kept;      // how many stay; 0: a score is NaN or +inf, or all are -inf; -1: rounding decides about too many
  int32_t doubtful;  // of the kept ones, of the least likely, rounding decides whether they stay
} HfpNucleusRow;

// Fills in what is found out. Returns HFP_OK or HFP_OUT_OF_MEMORY.
HFP_API int hfp_nucleus(HfpNucleusRow* rows, int32_t num_rows, int num_threads);

// The tokens of each row that stay, in the order of their ids, then id 0 with score -inf up to `width`, which is at
// least every `kept`. ids, scores: [num_rows, width]. Returns HFP_OK or HFP_OUT_OF_MEMORY.
HFP_API int hfp_nucleus_take(const HfpNucleusRow* rows, int32_t num_rows, int64_t width, int64_t* ids, float* scores,
                             int num_threads);
