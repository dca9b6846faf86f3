#include "attention_plan.h"

#include <algorithm>
#include <cstddef>

namespace hfp {
namespace {

constexpr int kNarrowItemRows = 12;        // rows that share one read of a tile from the L1 cache
constexpr int kItemsPerThread = 4;         // enough for dynamic scheduling to even out
constexpr int kSplitsPerThread = 8;        // parts no longer than this share of the work wait for nobody long
constexpr int64_t kThreadWork = 1 << 19;   // multiply-adds worth waking a thread for, about 5 microseconds
constexpr int kReadCost = 4;               // reading a tile costs about as much as computing this many rows with it

int ceil_div(int a, int b) { return (a + b - 1) / b; }

int query_length(const HfpBatch& batch, int request) {
  return batch.query_start[request + 1] - batch.query_start[request];
}

int group_size(const HfpAttentionArgs& args) { return args.num_heads / args.cache->num_kv_heads; }

// Query heads, and tokens or members, of an item of about `rows` rows.
int heads_of_item(const HfpAttentionArgs& args) { return std::min(group_size(args), kMaxItemRows); }
int tokens_of_item(const HfpAttentionArgs& args, int rows) { return std::max(1, rows / heads_of_item(args)); }

// Tokens of all members together: rows are the query heads of each.
int tokens_of_group(const HfpAttentionArgs& args, const PrefixGroup& group, int first_request) {
  return group.num_members > 1 ? group.num_members : query_length(*args.batch, first_request);
}

int element_bytes(const HfpCache& cache) { return cache.dtype == HFP_FP32 ? 4 : 2; }

// KV heads that an item of `rows` rows each may have: more read longer runs of memory.
int most_kv_heads(const HfpAttentionArgs& args, int rows) {
  const HfpCache& cache = *args.cache;
  int head_bytes = kChunkTokens * (cache.key_dim + cache.value_dim) * element_bytes(cache);
  return std::max(1, std::min({cache.num_kv_heads, kChunkBytes / head_bytes, kMaxItemRows / rows}));
}

// Positions [first, last).
struct Positions {
  int64_t first, last;

  int64_t tiles() const {
    return first >= last ? 0 : (last + kTileTokens - 1) / kTileTokens - first / kTileTokens;
  }
  Positions within(const Positions& other) const { return {std::max(first, other.first), std::min(last, other.last)}; }
};

// What some row of the item sees of one member.
Positions visible_positions(const HfpAttentionArgs& args, const AttentionItem& item, int request) {
  const HfpBatch& batch = *args.batch;
  int64_t start = batch.context_len[request] - query_length(batch, request) + item.first_token;
  int64_t first = args.window ? std::max<int64_t>(0, start - args.window + 1) : 0;
  return {first, start + item.num_tokens};
}

// Multiply-adds of the item's splits, and what its reads cost beside them.
int64_t cost(const HfpAttentionArgs& args, const AttentionItem& item, const int32_t* members) {
  Positions splits = {int64_t(item.first_split) * kSplitTokens,
                      int64_t(item.first_split + item.num_splits) * kSplitTokens};
  int64_t row_tiles = splits.within({0, item.shared_tokens}).tiles() * (item.rows() + kReadCost);
  for (int i = 0; i < item.num_members; i++) {
    Positions own = visible_positions(args, item, members[item.first_member + i]).within(splits);
    own.first = std::max<int64_t>(own.first, item.shared_tokens);
    row_tiles += own.tiles() * (item.num_tokens * item.num_heads + kReadCost);
  }
  return row_tiles * item.num_kv_heads * kTileTokens * (args.cache->key_dim + args.cache->value_dim);
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
  split_groups_.clear();
  group_by_prefix(args, members_, prefix_groups_);
  int kv_heads = args.cache->num_kv_heads, wide_items = 0, decode_splits = 0;
  for (const PrefixGroup& group : prefix_groups_) {
    int request = members_[group.first_member], tokens = tokens_of_group(args, group, request);
    wide_items += ceil_div(tokens, tokens_of_item(args, kMaxItemRows)) * kv_heads;
    if (tokens == 1) decode_splits += ceil_div(args.batch->context_len[request], kSplitTokens);
  }
  int item_rows = wide_items >= kItemsPerThread * max_threads ? kMaxItemRows : kNarrowItemRows;
  int merged_heads = most_kv_heads(args, heads_of_item(args));
  while (merged_heads > 1 && decode_splits * ceil_div(kv_heads, merged_heads) < kItemsPerThread * max_threads)
    merged_heads = (merged_heads + 1) / 2;
  for (const PrefixGroup& group : prefix_groups_) {
    bool is_decode = tokens_of_group(args, group, members_[group.first_member]) == 1;
    add_items(args, group, item_rows, is_decode ? merged_heads : 1);
  }
  int64_t work = total(costs_);
  num_threads_ = int(std::max<int64_t>(1, std::min<int64_t>(max_threads, work / kThreadWork)));
  if (num_threads_ > 1) {
    split_long_items(args, num_threads_);
    order_by_cost();
  }
}

// Cuts the rows of a group into items: by its tokens or its members, by query heads, and by KV heads, of which an item
// has up to `kv_heads`.
void AttentionPlan::add_items(const HfpAttentionArgs& args, const PrefixGroup& group, int item_rows, int kv_heads) {
  int request = members_[group.first_member], tokens = tokens_of_group(args, group, request);
  int step = tokens_of_item(args, item_rows), head_step = heads_of_item(args), all_kv_heads = args.cache->num_kv_heads;
  for (int first = 0; first < tokens; first += step)
    for (int kv_head = 0; kv_head < all_kv_heads; kv_head += kv_heads)
      for (int head = 0; head < group_size(args); head += head_step) {
        int count = std::min(step, tokens - first);
        AttentionItem item = {};
        bool has_members = group.num_members > 1;
        item.first_member = group.first_member + (has_members ? first : 0);
        item.num_members = has_members ? count : 1;
        item.shared_tokens = has_members && count > 1 ? group.shared_tokens : 0;
        item.first_token = has_members ? 0 : first;
        item.num_tokens = has_members ? 1 : count;
        item.kv_head = kv_head;
        item.num_kv_heads = std::min(kv_heads, all_kv_heads - kv_head);
        item.first_head = head;
        item.num_heads = std::min(head_step, group_size(args) - head);
        item.group = -1;
        add_item(args, item);
      }
}

// Adds an item over all the splits that its rows see.
void AttentionPlan::add_item(const HfpAttentionArgs& args, const AttentionItem& item) {
  int64_t first = INT64_MAX, last = 0;
  for (int i = 0; i < item.num_members; i++) {
    Positions seen = visible_positions(args, item, members_[item.first_member + i]);
    first = std::min(first, seen.first);
    last = std::max(last, seen.last);
  }
  items_.push_back(item);
  items_.back().first_split = int32_t(first / kSplitTokens);
  items_.back().num_splits = int32_t((last + kSplitTokens - 1) / kSplitTokens) - items_.back().first_split;
  costs_.push_back(cost(args, items_.back(), members_.data()));
}

// Cuts items that would keep one thread busy after all others are done into one item per split.
void AttentionPlan::split_long_items(const HfpAttentionArgs& args, int max_threads) {
  int64_t limit = total(costs_) / (kSplitsPerThread * max_threads);
  size_t floats = 0;
  std::vector<size_t> offsets;
  for (size_t i = 0, count = items_.size(); i < count; i++) {
    AttentionItem item = items_[i];
    if (costs_[i] <= limit || item.num_splits == 1) continue;
    offsets.push_back(floats);
    floats += partial_floats(item.rows() * item.num_kv_heads, args.cache->value_dim) * item.num_splits;
    split_groups_.push_back({nullptr, item.first_split, item.num_splits, item.num_splits});
    AttentionItem part = item;
    part.group = int32_t(split_groups_.size()) - 1;
    part.num_splits = 1;
    items_[i] = part;
    costs_[i] = cost(args, part, members_.data());
    for (int split = 1; split < item.num_splits; split++) {
      part.first_split = item.first_split + split;
      items_.push_back(part);
      costs_.push_back(cost(args, part, members_.data()));
    }
  }
  partials_.resize(std::max(partials_.size(), floats));
  for (size_t i = 0; i < split_groups_.size(); i++) split_groups_[i].partials = partials_.data() + offsets[i];
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
