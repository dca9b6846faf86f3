// Entry points of the native leaves: how many threads a call is worth, scratch memory, and the parallel regions.
#include "leaf.h"

#include <algorithm>
#include <cstdlib>
#include <memory>
#include <new>
#include <vector>
#if defined(_OPENMP)
#include <omp.h>
#endif

#include "isa.h"

HFP_DECLARE_VARIANTS(
    void leaf_linears(const HfpLeafLinears& args, Share share);
    void leaf_mlp_inner(const HfpLeafMlp& args, const LeafInner& inner, Share share);
    void leaf_mlp_down(const HfpLeafMlp& args, const LeafInner& inner, Share share);
    void leaf_norm(const HfpLeafNorm& args, Share share);
    void leaf_head(const HfpLeafHead& args, float* best, int64_t* best_index, Share share);
    void leaf_rotate(const HfpLeafRotation& args, Share share))

namespace hfp {
namespace {

// A thread joins a call for this much work at least. Rough speeds of one thread tell how much there is.
constexpr double kThreadSeconds = 15e-6;
constexpr double kBytesPerSecond = 2e10;
constexpr double kWordsPerSecond = 3.5e10;  // of packed weights times rows
constexpr double kElementsPerSecond = 2e9;  // of norms and rotations

double product_seconds(const PackedWeight& weight, int64_t rows) {
  double bytes = double(weight.panel_count()) * weight.panel_bytes();
  return std::max(bytes / kBytesPerSecond, rows * (bytes / 4) / kWordsPerSecond);
}

// How many of the threads that a call may use get a share.
int threads_worth(double seconds, int most) {
  return int(std::max(1.0, std::min(double(most), seconds / kThreadSeconds)));
}

// Runs `work(share)` for `count` shares. The team always has `most` threads, some without a share perhaps: a smaller
// one would have GNU's runtime end threads, and start them again for the next call.
template <class Work>
void run_shares(int count, int most, Work&& work) {
#if defined(_OPENMP)
  if (count > 1) {
#pragma omp parallel num_threads(most)
    {
      int shares = std::min(count, omp_get_num_threads());
      if (omp_get_thread_num() < shares) work(Share{omp_get_thread_num(), shares});
    }
    return;
  }
#endif
  work(Share{0, 1});
}

int64_t element_bytes(HfpDtype dtype) { return dtype == HFP_FP32 ? 4 : 2; }

// Memory that a calling thread keeps from call to call.
class Scratch {
 public:
  // `bytes` of memory on a cache line, with nothing of interest in it; null when there is none.
  void* reserve(int64_t bytes) {
    if (!memory_ || bytes > capacity_) {
      memory_.reset(std::aligned_alloc(kAlignment, (bytes / kAlignment + 1) * kAlignment));
      capacity_ = memory_ ? bytes : 0;
    }
    return memory_.get();
  }

 private:
  static constexpr int64_t kAlignment = 64;
  struct Free {
    void operator()(void* memory) const { std::free(memory); }
  };
  std::unique_ptr<void, Free> memory_;
  int64_t capacity_ = 0;
};

// Stride for scratch rows of `width` elements: on cache lines, and not all in few sets of the first-level cache.
int64_t spread_stride(int64_t width, HfpDtype dtype) {
  constexpr int64_t kCacheLine = 64;
  int64_t bytes = (width * element_bytes(dtype) + kCacheLine - 1) / kCacheLine * kCacheLine;
  return (bytes % 1024 ? bytes : bytes + kCacheLine) / element_bytes(dtype);
}

thread_local Scratch own_inner_rows;  // between the two products of an MLP

}  // namespace
}  // namespace hfp

using namespace hfp;

// Lets parallel regions of the calling thread, those of PyTorch too, have `threads` threads from now on.
void hfp_leaf_use_threads(int32_t threads) {
#if defined(_OPENMP)
  omp_set_num_threads(threads);
#else
  (void)threads;
#endif
}

// Computes the outputs of all linear modules of `args`.
void hfp_leaf_linears(const HfpLeafLinears* args) {
  double seconds = 0;
  for (int i = 0; i < args->count; i++) seconds += product_seconds(args->linears[i].weight, args->in.rows);
  auto linears = HFP_PICK_VARIANT(leaf_linears);
  int most = args->in.threads;
  run_shares(threads_worth(seconds, most), most, [&](Share share) { linears(*args, share); });
}

// Computes an MLP. Returns HFP_OK, or HFP_OUT_OF_MEMORY.
int hfp_leaf_mlp(const HfpLeafMlp* args) {
  const HfpLeafInput& in = args->in;
  int64_t stride = spread_stride(args->inner_width, in.dtype);
  void* memory = own_inner_rows.reserve(in.rows * stride * element_bytes(in.dtype));
  if (!memory) return HFP_OUT_OF_MEMORY;
  LeafInner inner = {memory, stride};
  auto compute_inner = HFP_PICK_VARIANT(leaf_mlp_inner);
  auto compute_down = HFP_PICK_VARIANT(leaf_mlp_down);
  int count = threads_worth(product_seconds(args->inner, in.rows), in.threads);
  run_shares(count, in.threads, [&](Share share) { compute_inner(*args, inner, share); });
  count = threads_worth(product_seconds(args->down.weight, in.rows), in.threads);
  run_shares(count, in.threads, [&](Share share) { compute_down(*args, inner, share); });
  return HFP_OK;
}

// Normalizes rows.
void hfp_leaf_norm(const HfpLeafNorm* args) {
  double seconds = double(args->in.rows) * args->in.width / kElementsPerSecond;
  auto norm = HFP_PICK_VARIANT(leaf_norm);
  int most = args->in.threads;
  run_shares(threads_worth(seconds, most), most, [&](Share share) { norm(*args, share); });
}

// Computes the argmax of each row's logits. Returns HFP_OK, or HFP_OUT_OF_MEMORY.
int hfp_leaf_head(const HfpLeafHead* args) {
  int64_t count = args->in.rows;
  int threads = threads_worth(product_seconds(args->head.weight, count), args->in.threads);
  std::vector<float> best;
  std::vector<int64_t> best_index;
  try {
    best.resize(threads * count);
    best_index.resize(threads * count);
  } catch (const std::bad_alloc&) {
    return HFP_OUT_OF_MEMORY;
  }
  auto head = HFP_PICK_VARIANT(leaf_head);
  int granted = 1;
  run_shares(threads, args->in.threads, [&](Share share) {
    if (share.index == 0) granted = share.count;
    head(*args, &best[share.index * count], &best_index[share.index * count], share);
  });
  // The shares lie in ascending column order, so the first of equal logits is that of the first thread.
  for (int64_t i = 0; i < count; i++) {
    int64_t winner = i;
    for (int t = 1; t < granted; t++)
      if (best[t * count + i] > best[winner]) winner = t * count + i;
    args->argmax[i] = best_index[winner];
  }
  return HFP_OK;
}

// Rotates queries and keys.
void hfp_leaf_rotate(const HfpLeafRotation* args) {
  double seconds = double(args->tokens) * (args->heads + args->kv_heads) * args->rotary_dim / kElementsPerSecond;
  auto rotate = HFP_PICK_VARIANT(leaf_rotate);
  run_shares(threads_worth(seconds, args->threads), args->threads, [&](Share share) { rotate(*args, share); });
}
