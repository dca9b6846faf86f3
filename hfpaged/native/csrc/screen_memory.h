// Memory for the rows of a screened head and their bounds. For baseline sources only.
#pragma once
#include <algorithm>
#include <vector>

#include "program.h"

namespace hfp {

class ScreenMemory {
 public:
  // Valid until the next reserve().
  ScreenWork* work() { return &work_; }

  // Makes room for a step; keeps it for the next ones.
  void reserve(const HeadOp& head, int64_t samples) {
    constexpr int64_t kCacheLine = 64;
    int64_t panels = head.weight.panel_count(), row_bytes = int64_t(head.screen.quads) * 4;
    int64_t stride = (row_bytes + kCacheLine - 1) / kCacheLine * kCacheLine;
    rows_.resize(std::max<size_t>(rows_.size(), samples));
    digits_.resize(std::max<size_t>(digits_.size(), 2 * samples * stride));
    bounds_.resize(std::max<size_t>(bounds_.size(), (panels + 1) * samples));
    work_.rows = rows_.data();
    work_.coarse = digits_.data();
    work_.fine = digits_.data() + samples * stride;
    work_.stride = stride;
    work_.least = bounds_.data();
    work_.most = bounds_.data() + samples;
  }

 private:
  std::vector<ScreenRow> rows_;
  std::vector<int8_t> digits_;
  std::vector<float> bounds_;
  ScreenWork work_ = {};
};

}  // namespace hfp
