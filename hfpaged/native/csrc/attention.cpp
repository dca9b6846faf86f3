// Attention entry points: the C interface, and the dispatch of items to the active instruction set.
#include "attention.h"

#include <exception>

#include "attention_plan.h"
#include "isa.h"

HFP_DECLARE_VARIANTS(void attend_item(const HfpAttentionArgs& args, const PlannedItems& plan, int index))

namespace hfp {

void run_attention_item(const PlannedItems& plan, const HfpAttentionArgs& args, int index) {
  HFP_PICK_VARIANT(attend_item)(args, plan, index);
}

}  // namespace hfp

int hfp_attention(const HfpAttentionArgs* args) {
  if (int status = hfp::check_attention(args)) return status;
  // One plan per calling thread, kept for its memory. The reference is what the team below shares.
  static thread_local hfp::AttentionPlan own_plan;
  hfp::AttentionPlan& plan = own_plan;
  try {
    plan.build(*args, args->num_threads);
  } catch (const std::exception&) {
    return HFP_OUT_OF_MEMORY;
  }
  hfp::PlannedItems items = plan.items();
  [[maybe_unused]] int threads = plan.num_threads(), grain = plan.items_at_once();
#pragma omp parallel for schedule(dynamic, grain) num_threads(threads) if (threads > 1)
  for (int i = 0; i < items.count; i++) hfp::run_attention_item(items, *args, i);
  return HFP_OK;
}
