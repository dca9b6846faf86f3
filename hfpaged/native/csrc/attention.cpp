// Attention entry points: the C interface, and the dispatch of items to the active instruction set.
#include "attention.h"

#include <exception>
#include <vector>
#if defined(_OPENMP)
#include <omp.h>
#endif

#include "attention_plan.h"
#include "isa.h"

HFP_DECLARE_VARIANTS(void attend_items(const HfpAttentionArgs& args, const PlannedItems& plan, ItemRange items))

namespace hfp {

void run_attention_items(const PlannedItems& plan, const HfpAttentionArgs& args, ItemRange items) {
  HFP_PICK_VARIANT(attend_items)(args, plan, items);
}

namespace {

Share place_in_team() {
#if defined(_OPENMP)
  return {omp_get_thread_num(), omp_get_num_threads()};
#else
  return {0, 1};
#endif
}

}  // namespace
}  // namespace hfp

int hfp_attention(const HfpAttentionArgs* args) {
  if (int status = hfp::check_attention(args)) return status;
  // One plan per calling thread, kept for its memory. The references are what the team below shares.
  static thread_local hfp::AttentionPlan own_plan;
  static thread_local std::vector<hfp::UnitRange> own_ranges;
  hfp::AttentionPlan& plan = own_plan;
  std::vector<hfp::UnitRange>& ranges = own_ranges;
  try {
    plan.build(*args, args->num_threads);
    ranges.resize(args->num_threads);
  } catch (const std::exception&) {
    return HFP_OUT_OF_MEMORY;
  }
  hfp::PlannedItems items = plan.items();
  int threads = plan.num_threads();
#pragma omp parallel num_threads(threads) if (threads > 1)
  {
    hfp::Share share = hfp::place_in_team();
    deal_units(ranges.data(), share, items.count);
#pragma omp barrier
    work_through_items(items, *args, ranges.data(), share);
  }
  return HFP_OK;
}
