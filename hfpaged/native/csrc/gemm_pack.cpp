// Packs rows of a weight matrix into panels (layout in gemm.h) and back, and the memory that holds them.
#include <algorithm>
#include <cstdlib>
#include <cstring>
#if defined(__linux__)
#include <sys/mman.h>
#endif

#include "abi.h"
#include "gemm.h"

namespace {

constexpr int64_t kHugePage = int64_t(2) << 20;
constexpr int64_t kCacheLine = 64;
constexpr int64_t kStepsAtOnce = 16;  // a cache line of a source row; their targets fit the first-level cache

// A multiple of every page size there is.
int64_t whole_pages(int64_t bytes) { return (bytes + (64 << 10) - 1) / (64 << 10) * (64 << 10); }

bool is_large(int64_t bytes) { return bytes >= kHugePage; }

// Memory straight from the system is zero, is first touched by the threads that pack, and may have huge pages.
void* map_zeroed(int64_t bytes) {
#if defined(__linux__)
  int64_t size = whole_pages(bytes), slack = kHugePage;
  void* mapped = mmap(nullptr, size + slack, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (mapped == MAP_FAILED) return nullptr;
  char* first = static_cast<char*>(mapped);
  int64_t before = (kHugePage - reinterpret_cast<uintptr_t>(first) % kHugePage) % kHugePage;
  char* aligned = first + before;
  if (before > 0) munmap(first, before);
  if (before < slack) munmap(aligned + size, slack - before);
  madvise(aligned, size, MADV_HUGEPAGE);
  return aligned;
#else
  (void)bytes;
  return nullptr;
#endif
}

void unmap(void* memory, int64_t bytes) {
#if defined(__linux__)
  munmap(memory, whole_pages(bytes));
#else
  (void)memory, (void)bytes;
#endif
}

constexpr bool can_map() {
#if defined(__linux__)
  return true;
#else
  return false;
#endif
}

struct PackJob {
  const char* weight;
  HfpDtype type;
  int64_t k, depth, row_bytes;
  const int32_t* columns;
  uint32_t* panels;

  // Steps [first, end) of source row i.
  void pack_row(int64_t i, int64_t first, int64_t end) const {
    const char* row = weight + i * row_bytes;
    int64_t panel = columns[i] / hfp::kPanelColumns, lane = columns[i] % hfp::kPanelColumns;
    uint32_t* words = panels + panel * depth * hfp::kPanelColumns + lane;
    int64_t whole = std::min(end, type == HFP_FP32 ? k : k / 2);
    for (int64_t step = first; step < whole; step++)
      std::memcpy(words + step * hfp::kPanelColumns, row + step * 4, 4);
    // The last of an odd number of 16-bit elements. Its partner stays zero.
    if (whole < end) std::memcpy(words + whole * hfp::kPanelColumns, row + whole * 4, 2);
  }
};

}  // namespace

// Zeroed memory for panels; null when there is none.
HFP_API void* hfp_panels_allocate(int64_t bytes) {
  if (can_map() && is_large(bytes)) return map_zeroed(bytes);
  void* memory = nullptr;
  if (posix_memalign(&memory, kCacheLine, std::max<int64_t>(bytes, 1))) return nullptr;
  std::memset(memory, 0, bytes);
  return memory;
}

// Frees what hfp_panels_allocate(bytes) returned.
HFP_API void hfp_panels_free(void* panels, int64_t bytes) {
  if (can_map() && is_large(bytes)) unmap(panels, bytes);
  else std::free(panels);
}

// Writes row i of `weight` [rows, k] (rows `row_bytes` apart) as column `columns[i]` of the panels.
HFP_API void hfp_panels_pack(const void* weight, int32_t dtype, int64_t rows, int64_t k, int64_t row_bytes,
                             const int32_t* columns, void* panels, int32_t threads) {
  HfpDtype type = HfpDtype(dtype);
  int64_t depth = type == HFP_FP32 ? k : (k + 1) / 2;
  PackJob job = {static_cast<const char*>(weight), type, k, depth, row_bytes, columns, static_cast<uint32_t*>(panels)};
  int64_t tasks = (rows + hfp::kPanelColumns - 1) / hfp::kPanelColumns;
#pragma omp parallel for schedule(dynamic) num_threads(threads)
  for (int64_t task = 0; task < tasks; task++) {
    int64_t first_row = task * hfp::kPanelColumns, end_row = std::min(rows, first_row + hfp::kPanelColumns);
    for (int64_t step = 0; step < depth; step += kStepsAtOnce)
      for (int64_t i = first_row; i < end_row; i++) job.pack_row(i, step, std::min(depth, step + kStepsAtOnce));
  }
}

// The inverse of hfp_panels_pack: writes column `columns[i]` of the panels as row i of `weight`, dense [rows, k].
HFP_API void hfp_panels_unpack(const void* panels, int32_t dtype, int64_t rows, int64_t k, const int32_t* columns,
                               void* weight, int32_t threads) {
  bool wide = HfpDtype(dtype) == HFP_FP32;
  int64_t depth = wide ? k : (k + 1) / 2, whole = wide ? k : k / 2, row_bytes = k * (wide ? 4 : 2);
#pragma omp parallel for num_threads(threads)
  for (int64_t i = 0; i < rows; i++) {
    int64_t panel = columns[i] / hfp::kPanelColumns, lane = columns[i] % hfp::kPanelColumns;
    const uint32_t* words = static_cast<const uint32_t*>(panels) + panel * depth * hfp::kPanelColumns + lane;
    char* row = static_cast<char*>(weight) + i * row_bytes;
    for (int64_t step = 0; step < whole; step++) std::memcpy(row + step * 4, words + step * hfp::kPanelColumns, 4);
    if (whole < depth) std::memcpy(row + whole * 4, words + whole * hfp::kPanelColumns, 2);
  }
}
