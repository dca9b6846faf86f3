// How many threads work on the scores of a batch is worth. For baseline sources only.
#pragma once
#include <algorithm>
#include <cstdint>

namespace hfp {

// At least one of `most`, and no more than have enough scores to be woken for.
inline int threads_for_scores(int64_t scores, int most) {
  constexpr int64_t kScoresPerThread = 1 << 17;
  return int(std::clamp<int64_t>(scores / kScoresPerThread, 1, std::max(most, 1)));
}

}  // namespace hfp
