// How a step's attention is cut into items for threads. For baseline sources only.
#pragma once
#include <vector>

#include "attention.h"

namespace hfp {

// HFP_OK if every item of a plan for these arguments may be run. Reads all lengths and block tables.
int check_attention(const HfpAttentionArgs* args);

// Items of one attention call. They depend on the batch and on the layer's heads, dimensions and window, not on its
// tensors: one plan serves all layers that agree on those, one layer after the other.
class AttentionPlan {
 public:
  // Plans the call for at most `max_threads` threads, costly items first. Keeps its memory for the next call.
  void build(const HfpAttentionArgs& args, int max_threads);

  int size() const { return int(items_.size()); }

  // How many threads the work is worth.
  int num_threads() const { return num_threads_; }

 private:
  friend void run_attention_item(AttentionPlan& plan, const HfpAttentionArgs& args, int index);

  void add_request(const HfpAttentionArgs& args, int request, int item_rows);
  void add_item(const HfpAttentionArgs& args, const AttentionItem& item);
  void split_long_items(const HfpAttentionArgs& args, int max_threads);
  void order_by_cost();

  std::vector<AttentionItem> items_, scratch_items_;
  std::vector<int64_t> costs_;
  std::vector<SplitGroup> groups_;
  std::vector<float> partials_;
  int num_threads_ = 1;
};

}  // namespace hfp
