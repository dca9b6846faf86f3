// Paged attention: new tokens of a step against the keys and values in the blocks of their requests.
//
// Arithmetic. Each row (a token and query head) is summed in an order that depends on token positions alone: splits of
// kSplitTokens positions from position 0, each with a softmax over chunks of kChunkTokens (online softmax: Milakov and
// Gimelshein 2018); then the splits are merged in ascending order (Flash-Decoding: Dao et al. 2023). How rows are
// grouped into items, which thread runs them and what else is in the batch never changes a bit of a row's output.
//
// Reading. Keys and values are read once for all rows of an item: the query heads that share a KV head, the tokens of a
// prompt's chunk, and the requests whose block tables start with the same blocks (Hydragen: Juravsky et al. 2024).
#pragma once
#include "abi.h"
#include "kv_cache.h"
#include "units.h"

// Token t of a request at position p attends to positions [max(0, p - window + 1), p] of that request.
// Strides are in elements; the last dimension is contiguous. Query and output have the dtype of the cache.
struct HfpAttentionArgs {
  const HfpBatch* batch;
  const HfpCache* cache;
  const void* query;   // [tokens, num_heads, key_dim]
  void* output;        // [tokens, num_heads, value_dim]
  const float* sinks;  // [num_heads], the logit of a column without a value; or null
  int64_t query_token_stride;
  int64_t query_head_stride;
  int64_t output_token_stride;
  int64_t output_head_stride;
  int32_t num_heads;  // a multiple of cache->num_kv_heads: grouped-query attention
  int32_t window;     // 0: all earlier tokens
  float scale;
  float softcap;  // 0: none; else scores become softcap * tanh(score / softcap)
  int32_t num_threads;
};
HFP_API int hfp_attention(const HfpAttentionArgs* args);

namespace hfp {

constexpr int kChunkTokens = 256;
constexpr int kSplitTokens = 512;
constexpr int kMaxItemRows = 48;
constexpr int kMaxHeadDim = 512;
// What an item with several KV heads reads in one chunk, at most: it fits into an L2 cache.
constexpr int kChunkBytes = 192 << 10;

// Splits of one item that are run as items of their own. The one that finishes last merges them all.
struct SplitGroup {
  float* partials;  // one partial result per split, partial_floats() each
  int32_t first_split;
  int32_t num_splits;
  int32_t pending;  // splits not yet done; num_splits again after the merge, so that the plan can be run again
};

// A unit of work: tokens of some requests and query heads of some KV heads, over a range of splits.
struct AttentionItem {
  int32_t first_member;   // in PlannedItems.members
  int32_t num_members;    // more than one: requests with one token each
  int32_t shared_tokens;  // whole chunks at the start of all members that are in the same blocks; 0 for one member
  int32_t first_token;    // in the query of each member
  int32_t num_tokens;
  int32_t kv_head;
  int32_t num_kv_heads;
  int32_t first_head;  // among the query heads of each KV head
  int32_t num_heads;
  int32_t first_split;
  int32_t num_splits;
  int32_t group;  // index of its SplitGroup, or -1 if the item covers all splits that its rows see

  // Rows of each KV head.
  HFP_ALWAYS_INLINE int rows() const { return num_members * num_tokens * num_heads; }
};

// The items of one attention call as the kernels see them.
struct PlannedItems {
  const AttentionItem* items;
  const int32_t* members;  // requests
  SplitGroup* groups;
  int32_t count;
};

// Decides on the items (attention_plan.h, which is for baseline sources only).
class AttentionPlan;

// Items [first, last), of which the same thread will probably run those up to own_end next.
struct ItemRange {
  int first, last, own_end;
};

// Runs some items, and fetches ahead what they and those up to own_end read: any order, any thread, each item once. No
// OpenMP inside. All items of a layer must be done before the next layer's begin. The arguments must have passed
// check_attention().
void run_attention_items(const PlannedItems& plan, const HfpAttentionArgs& args, ItemRange items);

// A thread's part of the items, of which each thread was dealt its range.
HFP_ALWAYS_INLINE inline void work_through_items(const PlannedItems& plan, const HfpAttentionArgs& args,
                                                 UnitRange* ranges, Share share) {
  int begin = int(share.begin(plan.count)), end = int(share.end(plan.count));
  work_through(ranges, share, [&](int first, int last) {
    bool is_own = begin <= first && last <= end;
    run_attention_items(plan, args, {first, last, is_own ? end : last});
  });
}

// Length of the running result of `rows` rows: their maxima, their sums, their weighted values.
static inline int64_t partial_floats(int rows, int value_dim) {
  return int64_t(rows) * (2 + (value_dim + 15) / 16 * 16);
}

}  // namespace hfp
