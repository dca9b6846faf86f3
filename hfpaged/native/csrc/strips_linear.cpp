// Entry point of a linear layer with packed 4-bit weights: the parallel region and the choice of instruction set.
#if defined(_OPENMP)
#include <omp.h>
#endif

#include "isa.h"
#include "strips.h"

HFP_DECLARE_VARIANTS(void strips_linear(const HfpStripsArgs& args, int32_t index, int32_t count))

// Computes all rows. Returns an HfpStatus; on anything but OK nothing was written.
HFP_API int hfp_strips_linear(const HfpStripsArgs* args) {
  if (!args->weight.strips || !args->input || !args->output) return HFP_NULL_POINTER;
  if (args->dtype < HFP_FP32 || args->dtype > HFP_FP16) return HFP_BAD_DTYPE;
  if (args->rows < 0 || args->rows > INT32_MAX || args->columns < 1 || args->weight.groups < 1) return HFP_BAD_DIMENSION;
  if (args->threads < 1 || args->threads > 1024 || !has_known_groups(args->weight)) return HFP_BAD_OPTION;
  if (args->rows == 0) return HFP_OK;
  auto strips_linear = HFP_PICK_VARIANT(strips_linear);
#if defined(_OPENMP)
#pragma omp parallel num_threads(args->threads)
  strips_linear(*args, omp_get_thread_num(), omp_get_num_threads());
#else
  strips_linear(*args, 0, 1);
#endif
  return HFP_OK;
}
