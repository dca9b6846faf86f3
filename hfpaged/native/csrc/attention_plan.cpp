#include "attention_plan.h"

#include <algorithm>
#include <cstddef>

namespace hfp {
namespace {

constexpr int kNarrowItemRows = 12;        // rows that share one read of a tile from the L1 cache
constexpr int kItemsPerThread = 4;         // enough for dynamic scheduling to even out
constexpr int64_t kThreadWork = 1 << 19;   // multiply-adds worth waking a thread for, about 5 microseconds
constexpr int kReadCost = 4;               // reading a tile costs about as much as computing this many rows with it

int ceil_div(int a, int b) { return (a + b - 1) / b; }

int query_length(const HfpBatch& batch, int request) {
  return batch.query_start[request + 1] - batch.query_start[request];
}

int group_size(const HfpAttentionArgs& args) { return args.num_heads / args.cache->num_kv_heads; }

// Query heads and tokens of an item of about `rows` rows.
int heads_of_item(const HfpAttentionArgs& args) { return std::min(group_size(args), kMaxItemRows); }
int tokens_of_item(const HfpAttentionArgs& args, int rows) { return std::max(1, rows / heads_of_item(args)); }

// Positions [first, last) that some row of the item sees.
struct Positions {
  int first, last;
};
Positions visible_positions(const HfpAttentionArgs& args, const AttentionItem& item) {
  const HfpBatch& batch = *args.batch;
  int start = batch.context_len[item.request] - query_length(batch, item.request) + item.first_token;
  int first = args.window ? std::max(0, start - args.window + 1) : 0;
  return {first, start + item.num_tokens};
}

int64_t tile_cost(const HfpAttentionArgs& args, const AttentionItem& item) {
  int rows = item.num_tokens * item.num_heads;
  return int64_t(kTileTokens) * (rows + kReadCost) * (args.cache->key_dim + args.cache->value_dim);
}

int64_t cost(const HfpAttentionArgs& args, const AttentionItem& item) {
  Positions seen = visible_positions(args, item);
  int first = std::max(seen.first, item.first_split * kSplitTokens);
  int last = std::min(seen.last, (item.first_split + item.num_splits) * kSplitTokens);
  return (ceil_div(last, kTileTokens) - first / kTileTokens) * tile_cost(args, item);
}

int64_t total(const std::vector<int64_t>& costs) {
  int64_t sum = 0;
  for (int64_t cost : costs) sum += cost;
  return sum;
}

int check_request(const HfpAttentionArgs& args, int request) {
  const HfpBatch& batch = *args.batch;
  int length = query_length(batch, request), context = batch.context_len[request];
  if (length < 0 || context < length) return HFP_BAD_LENGTHS;
  if (length == 0) return HFP_OK;
  int64_t row = batch.table_rows[request];
  int64_t blocks = (int64_t(context) + batch.block_size - 1) / batch.block_size;
  if (row < 0 || row >= batch.num_table_rows || blocks > batch.table_stride) return HFP_BAD_TABLE;
  const int32_t* table = batch.block_tables + row * batch.table_stride;
  uint32_t largest = 0;  // unsigned, so that negative ids count as too large
  for (int64_t i = 0; i < blocks; i++) largest = std::max(largest, uint32_t(table[i]));
  return largest < uint32_t(args.cache->num_blocks) ? HFP_OK : HFP_BAD_TABLE;
}

}  // namespace

int check_attention(const HfpAttentionArgs* args) {
  if (!args || !args->batch || !args->cache) return HFP_NULL_POINTER;
  const HfpBatch& batch = *args->batch;
  if (int status = check_cache(args->cache, batch.block_size)) return status;
  if (args->num_heads < 1 || args->num_heads % args->cache->num_kv_heads) return HFP_BAD_HEADS;
  if (args->window < 0 || !(args->softcap >= 0) || !is_thread_count(args->num_threads)) return HFP_BAD_OPTION;
  if (batch.num_requests < 0) return HFP_BAD_LENGTHS;
  if (batch.num_requests == 0) return HFP_OK;
  if (!batch.query_start || !batch.context_len || !batch.table_rows || !batch.block_tables) return HFP_NULL_POINTER;
  if (!args->query || !args->output) return HFP_NULL_POINTER;
  if (batch.query_start[0] != 0) return HFP_BAD_LENGTHS;
  for (int request = 0; request < batch.num_requests; request++)
    if (int status = check_request(*args, request)) return status;
  return HFP_OK;
}

void AttentionPlan::build(const HfpAttentionArgs& args, int max_threads) {
  items_.clear();
  costs_.clear();
  groups_.clear();
  const HfpBatch& batch = *args.batch;
  int wide_items = 0;
  for (int request = 0; request < batch.num_requests; request++)
    wide_items += ceil_div(query_length(batch, request), tokens_of_item(args, kMaxItemRows)) * args.cache->num_kv_heads;
  int item_rows = wide_items >= kItemsPerThread * max_threads ? kMaxItemRows : kNarrowItemRows;
  for (int request = 0; request < batch.num_requests; request++) add_request(args, request, item_rows);
  int64_t work = total(costs_);
  num_threads_ = int(std::max<int64_t>(1, std::min<int64_t>(max_threads, work / kThreadWork)));
  if (num_threads_ > 1) {
    split_long_items(args, num_threads_);
    order_by_cost();
  }
}

void AttentionPlan::add_request(const HfpAttentionArgs& args, int request, int item_rows) {
  int length = query_length(*args.batch, request), step = tokens_of_item(args, item_rows);
  int group = group_size(args), head_step = heads_of_item(args);
  for (int token = 0; token < length; token += step)
    for (int kv_head = 0; kv_head < args.cache->num_kv_heads; kv_head++)
      for (int head = 0; head < group; head += head_step) {
        AttentionItem item{request, kv_head, token, std::min(step, length - token), kv_head * group + head,
                           std::min(head_step, group - head), 0, 0, -1};
        Positions seen = visible_positions(args, item);
        item.first_split = seen.first / kSplitTokens;
        item.num_splits = ceil_div(seen.last, kSplitTokens) - item.first_split;
        add_item(args, item);
      }
}

void AttentionPlan::add_item(const HfpAttentionArgs& args, const AttentionItem& item) {
  items_.push_back(item);
  costs_.push_back(cost(args, item));
}

// Cuts items that would keep one thread busy after all others are done into one item per split.
void AttentionPlan::split_long_items(const HfpAttentionArgs& args, int max_threads) {
  int64_t limit = total(costs_) / (kItemsPerThread * max_threads);
  size_t floats = 0;
  std::vector<size_t> offsets;
  for (size_t i = 0, count = items_.size(); i < count; i++) {
    AttentionItem item = items_[i];
    if (costs_[i] <= limit || item.num_splits == 1) continue;
    offsets.push_back(floats);
    floats += partial_floats(item.num_tokens * item.num_heads, args.cache->value_dim) * item.num_splits;
    groups_.push_back({nullptr, item.first_split, item.num_splits, item.num_splits});
    AttentionItem part = item;
    part.group = int(groups_.size()) - 1;
    part.num_splits = 1;
    items_[i] = part;
    costs_[i] = cost(args, part);
    for (int split = 1; split < item.num_splits; split++) {
      part.first_split = item.first_split + split;
      add_item(args, part);
    }
  }
  partials_.resize(std::max(partials_.size(), floats));
  for (size_t i = 0; i < groups_.size(); i++) groups_[i].partials = partials_.data() + offsets[i];
}

// Descending by the power of two below the cost, stable: close enough, and linear in the number of items.
void AttentionPlan::order_by_cost() {
  constexpr int kBuckets = 64;
  size_t starts[kBuckets + 1] = {};
  auto bucket = [](int64_t cost) { return __builtin_clzll(uint64_t(cost) | 1); };
  for (int64_t cost : costs_) starts[bucket(cost) + 1]++;
  for (int i = 0; i < kBuckets; i++) starts[i + 1] += starts[i];
  scratch_items_.resize(items_.size());
  for (size_t i = 0; i < items_.size(); i++) scratch_items_[starts[bucket(costs_[i])]++] = items_[i];
  items_.swap(scratch_items_);
}

}  // namespace hfp
