// What passes over the scores of a row have in common. There may be scores of -inf.
#pragma once
#include "ops_math.h"

namespace hfp {
namespace HFP_ISA {

// Scores of no token.
inline Vec16 nothing16() { return splat16(-__builtin_inff()); }

inline Vec16 load_scores(const float* p, Whole) { return load16(p); }
inline Vec16 load_scores(const float* p, int count) {
  float lanes[kLanes];
  store16(lanes, nothing16());
  std::memcpy(lanes, p, sizeof(float) * count);
  return load16(lanes);
}

// The highest score; NaN if one is NaN.
inline float highest_of(const float* scores, int64_t count) {
  Vec16 highest = nothing16();
  uint32_t ordered = 0xffff;
  for_each16(static_cast<int>(count), [&](int i, auto lanes) {
    Vec16 x = load_scores(scores + i, lanes);
    ordered &= equal_mask16(x, x);
    highest = max16(highest, x);
  });
  return ordered == 0xffff ? largest16(highest) : __builtin_nanf("");
}

// What the rounding of a + b takes away (Knuth's TwoSum). `sum` is a + b.
inline Vec16 sum_error16(Vec16 a, Vec16 b, Vec16 sum) {
  Vec16 added = sum - a;
  return (a - (sum - added)) + (b - added);
}

// A sum whose rounding errors are summed up beside it.
class ExactSum {
 public:
  void add(Vec16 x) {
    Vec16 sum = sum_ + x;
    error_ = error_ + sum_error16(sum_, x, sum);
    sum_ = sum;
  }

  double total() const {
    float sums[kLanes], errors[kLanes];
    store16(sums, sum_);
    store16(errors, error_);
    double total = 0;
    for (int i = 0; i < kLanes; i++) total += double(sums[i]) + double(errors[i]);
    return total;
  }

 private:
  Vec16 sum_ = zero16(), error_ = zero16();
};

}  // namespace HFP_ISA
}  // namespace hfp
