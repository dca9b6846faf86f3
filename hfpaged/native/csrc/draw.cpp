#include "draw.h"

#include "isa.h"
#include "score_threads.h"

HFP_DECLARE_VARIANTS(int64_t draw_index(const float* scores, int64_t count, double uniform))

void hfp_draw(const float* scores, int64_t row_stride, int64_t count, int32_t num_rows, const double* uniforms,
              int64_t* drawn, int num_threads) {
  auto draw_index = HFP_PICK_VARIANT(draw_index);
  [[maybe_unused]] int threads = hfp::threads_for_scores(count * num_rows, num_threads);
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads) if (threads > 1)
  for (int32_t i = 0; i < num_rows; i++) drawn[i] = draw_index(scores + i * row_stride, count, uniforms[i]);
}
