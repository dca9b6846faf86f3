// How a step's attention is cut into items for threads. For baseline sources only.
#pragma once
#include <vector>

#include "attention.h"
#include "attention_groups.h"

namespace hfp {

// HFP_OK if every item of a plan for these arguments may be run. Reads all lengths and block tables.
int check_attention(const HfpAttentionArgs* args);

// Items of one attention call. They depend on the batch and on the layer's heads, dimensions and window, not on its
// tensors: one plan serves all layers that agree on those, one layer after the other.
class AttentionPlan {
 public:
  // Plans the call for at most `max_threads` threads, costly items first. Keeps its memory for the next call.
  void build(const HfpAttentionArgs& args, int max_threads);

  // Valid until the next build.
  PlannedItems items() { return {items_.data(), members_.data(), split_groups_.data(), int32_t(items_.size())}; }

  // How many threads the work is worth.
  int num_threads() const { return num_threads_; }

 private:
  void add_items(const HfpAttentionArgs& args, const PrefixGroup& group, int item_rows, int kv_heads);
  void add_item(const HfpAttentionArgs& args, const AttentionItem& item);
  void split_long_items(const HfpAttentionArgs& args, int max_threads);
  void order_by_cost();

  std::vector<int32_t> members_;
  std::vector<PrefixGroup> prefix_groups_;
  std::vector<AttentionItem> items_, scratch_items_;
  std::vector<int64_t> costs_;
  std::vector<SplitGroup> split_groups_;
  std::vector<float> partials_;
  int num_threads_ = 1;
};

}  // namespace hfp
