// Library-wide entry points: ABI version, status messages, choice of the instruction set.
#include <cstdlib>
#if defined(__GLIBC__)
#include <malloc.h>
#endif

#include "abi.h"
#include "isa.h"

namespace {

int best_isa() {
#if defined(HFP_X86)
  __builtin_cpu_init();
  bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  bool dots = __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vnni");
  if (avx512) return int(dots ? hfp::Isa::avx512bf16 : hfp::Isa::avx512);
  if (avx2) return int(hfp::Isa::avx2);
#endif
  return int(hfp::Isa::plain);
}

hfp::Isa g_isa = hfp::Isa(best_isa());

}  // namespace

hfp::Isa hfp::active_isa() { return g_isa; }

HFP_API int hfp_abi_version() { return HFP_ABI_VERSION; }

// Uses variant `isa`, or the best one this CPU has if that is lower. Returns the variant now in use.
// Call it before any kernel runs: results are reproducible within one variant only.
HFP_API int hfp_use_isa(int isa) {
  int best = best_isa();
  g_isa = hfp::Isa(isa < 0 ? 0 : isa < best ? isa : best);
  return int(g_isa);
}

HFP_API const char* hfp_status_message(int status) {
  static const char* const messages[HFP_STATUS_COUNT] = {
      "ok",
      "a required pointer is null",
      "the dtype must be fp32, bf16 or fp16",
      "the number of query heads must be a positive multiple of the number of key/value heads",
      "head dimensions must be even, from 2 to 512",
      "the block size must be a positive multiple of 16",
      "query_start must ascend from 0, and no context may be shorter than its query",
      "a block table row is out of range, too short for its context, or names a block that does not exist",
      "a slot is beyond the last block",
      "window and softcap must not be negative, num_threads must be 1 to 1024",
      "out of memory",
  };
  return status >= 0 && status < HFP_STATUS_COUNT ? messages[status] : "unknown status";
}

// Gives the system memory that was freed and that the C library keeps for later.
HFP_API void hfp_return_free_memory() {
#if defined(__GLIBC__)
  malloc_trim(0);
#endif
}
