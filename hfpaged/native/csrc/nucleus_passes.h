// The passes over the scores of a row, written once and compiled for every instruction set.
#pragma once
#include "isa.h"
#include "nucleus.h"

namespace hfp {

// A pass sums the masses above so many thresholds.
constexpr int kThresholds = 4;

struct Thresholds {
  float score[kThresholds];
  double mass_above[kThresholds];
};

// What `collect` found: tokens inside, and those above, with their mass.
struct Collected {
  int64_t inside, above;
  double mass_above;
};

}  // namespace hfp

// The highest score; NaN if one is NaN.
HFP_DECLARE_VARIANTS(float highest_score(const float* scores, int64_t count))
// masses[i] = exp(scores[i] - highest). Returns their sum.
HFP_DECLARE_VARIANTS(double write_masses(const float* scores, int64_t count, float highest, float* masses))
// Fills in `mass_above`, roughly: relative errors of 1e-5 are possible.
HFP_DECLARE_VARIANTS(void sum_above(const float* scores, const float* masses, int64_t count, Thresholds& thresholds))
// Copies the scores above `low` up to `high` to `inside`, and may write up to 16 places more.
HFP_DECLARE_VARIANTS(Collected collect(const float* scores, const float* masses, int64_t count, float low, float high,
                                       float* inside))
// hfp_nucleus_take for one row. `places` has room for a number a score and 16 more.
HFP_DECLARE_VARIANTS(void take_nucleus(const HfpNucleusRow& row, int64_t width, int32_t* places, int64_t* ids,
                                       float* scores))
