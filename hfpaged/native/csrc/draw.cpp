#include "draw.h"

#include <algorithm>

#include "isa.h"

HFP_DECLARE_VARIANTS(int64_t draw_index(const float* scores, int64_t count, double uniform))

namespace {

constexpr int64_t kScoresPerThread = 1 << 17;  // less is not worth waking a thread for

}  // namespace

void hfp_draw(const float* scores, int64_t row_stride, int64_t count, int32_t num_rows, const double* uniforms,
              int64_t* drawn, int num_threads) {
  auto draw_index = HFP_PICK_VARIANT(draw_index);
  [[maybe_unused]] int threads =
      int(std::clamp<int64_t>(count * num_rows / kScoresPerThread, 1, std::max(num_threads, 1)));
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads) if (threads > 1)
  for (int32_t i = 0; i < num_rows; i++) drawn[i] = draw_index(scores + i * row_stride, count, uniforms[i]);
}
