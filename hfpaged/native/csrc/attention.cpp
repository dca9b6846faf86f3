// Attention entry points: the C interface, and the dispatch of items to the active instruction set.
#include "attention.h"

#include <algorithm>
#include <exception>

#include "attention_plan.h"
#include "isa.h"

HFP_DECLARE_VARIANTS(void attend_item(const HfpAttentionArgs& args, const AttentionItem& item,
                                      const AttentionItem* next, SplitGroup* group))

namespace hfp {

void run_attention_item(AttentionPlan& plan, const HfpAttentionArgs& args, int index) {
  const AttentionItem& item = plan.items_[index];
  const AttentionItem* next = index + 1 < plan.size() ? &item + 1 : nullptr;
  SplitGroup* group = item.group < 0 ? nullptr : &plan.groups_[item.group];
  HFP_PICK_VARIANT(attend_item)(args, item, next, group);
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
  [[maybe_unused]] int threads = std::min(plan.num_threads(), plan.size());
#pragma omp parallel for schedule(dynamic) num_threads(threads) if (threads > 1)
  for (int i = 0; i < plan.size(); i++) hfp::run_attention_item(plan, *args, i);
  return HFP_OK;
}
