// Packs rows of a weight matrix into panels (layout in gemm.h), and the memory that holds them.
#include <algorithm>
#include <cstdlib>
#include <cstring>
#if defined(__linux__)
#include <sys/mman.h>
#endif

#include "abi.h"
#include "gemm.h"

namespace {

constexpr size_t kHugePage = size_t(2) << 20;
constexpr size_t kCacheLine = 64;

// Word `step` of a weight row of k elements.
uint32_t word_of(const void* row, int64_t step, int64_t k, HfpDtype type) {
  uint32_t word = 0;
  if (type == HFP_FP32) {
    std::memcpy(&word, static_cast<const float*>(row) + step, sizeof word);
  } else {
    const uint16_t* pair = static_cast<const uint16_t*>(row) + 2 * step;
    word = pair[0] | (2 * step + 1 < k ? uint32_t(pair[1]) << 16 : 0);
  }
  return word;
}

}  // namespace

// Zeroed memory, on huge pages where it is large and the system has them; null when there is none.
HFP_API void* hfp_panels_allocate(int64_t bytes) {
  bool large = size_t(bytes) >= kHugePage;
  void* memory = nullptr;
  if (posix_memalign(&memory, large ? kHugePage : kCacheLine, std::max<int64_t>(bytes, 1))) return nullptr;
#if defined(__linux__)
  if (large) madvise(memory, bytes, MADV_HUGEPAGE);
#endif
  std::memset(memory, 0, bytes);
  return memory;
}

HFP_API void hfp_panels_free(void* panels) { std::free(panels); }

// Writes row i of `weight` [rows, k] (rows `row_bytes` apart) as column `columns[i]` of the panels.
HFP_API void hfp_panels_pack(const void* weight, int32_t dtype, int64_t rows, int64_t k, int64_t row_bytes,
                             const int32_t* columns, void* panels, int32_t threads) {
  HfpDtype type = HfpDtype(dtype);
  int64_t depth = type == HFP_FP32 ? k : (k + 1) / 2;
  constexpr int64_t kRowsPerTask = hfp::kPanelColumns;
  int64_t tasks = (rows + kRowsPerTask - 1) / kRowsPerTask;
#pragma omp parallel for num_threads(threads)
  for (int64_t task = 0; task < tasks; task++) {
    int64_t first = task * kRowsPerTask, end = std::min(rows, first + kRowsPerTask);
    for (int64_t step = 0; step < depth; step++) {
      for (int64_t i = first; i < end; i++) {
        int64_t panel = columns[i] / hfp::kPanelColumns, lane = columns[i] % hfp::kPanelColumns;
        uint32_t* words = static_cast<uint32_t*>(panels) + (panel * depth + step) * hfp::kPanelColumns;
        words[lane] = word_of(static_cast<const char*>(weight) + i * row_bytes, step, k, type);
      }
    }
  }
}
