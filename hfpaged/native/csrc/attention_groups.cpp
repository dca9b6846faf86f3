#include "attention_groups.h"

#include <algorithm>

namespace hfp {
namespace {

// The blocks of a request that are full.
struct Blocks {
  const int32_t* ids;
  int count;
};

Blocks full_blocks(const HfpBatch& batch, int request) {
  return {batch.block_tables + batch.table_rows[request] * batch.table_stride,
          batch.context_len[request] / batch.block_size};
}

bool comes_before(const Blocks& a, const Blocks& b) {
  return std::lexicographical_compare(a.ids, a.ids + a.count, b.ids, b.ids + b.count);
}

int shared_chunk_tokens(const HfpBatch& batch, const Blocks& a, const Blocks& b) {
  int shorter = std::min(a.count, b.count);
  int same = int(std::mismatch(a.ids, a.ids + shorter, b.ids).first - a.ids);
  return same * batch.block_size / kChunkTokens * kChunkTokens;
}

// Whether the request has a single row for each head, which sees its first tokens, and enough of them to share.
bool can_share(const HfpAttentionArgs& args, int request) {
  const HfpBatch& batch = *args.batch;
  int length = batch.query_start[request + 1] - batch.query_start[request], context = batch.context_len[request];
  return length == 1 && context > kChunkTokens && (args.window == 0 || context <= args.window);
}

}  // namespace

void group_by_prefix(const HfpAttentionArgs& args, std::vector<int32_t>& members, std::vector<PrefixGroup>& groups) {
  const HfpBatch& batch = *args.batch;
  members.clear();
  groups.clear();
  for (int request = 0; request < batch.num_requests; request++)
    if (batch.query_start[request + 1] > batch.query_start[request]) members.push_back(request);
  auto others = std::stable_partition(members.begin(), members.end(), [&](int r) { return can_share(args, r); });
  int num_candidates = int(others - members.begin());
  std::sort(members.begin(), others, [&](int a, int b) {
    Blocks first = full_blocks(batch, a), second = full_blocks(batch, b);
    return comes_before(first, second) || (!comes_before(second, first) && a < b);
  });
  for (int i = 0; i < int(members.size()); i++) {
    int shared = 0;
    if (i > 0 && i < num_candidates)
      shared = shared_chunk_tokens(batch, full_blocks(batch, members[i - 1]), full_blocks(batch, members[i]));
    // Neighbours in this order share the most. One that shares much less than the group does begins another.
    bool joins = shared > 0 && 2 * shared >= groups.back().shared_tokens;
    if (!joins) {
      groups.push_back({i, 1, 0});
      continue;
    }
    PrefixGroup& group = groups.back();
    group.shared_tokens = group.num_members == 1 ? shared : std::min(group.shared_tokens, shared);
    group.num_members++;
  }
}

}  // namespace hfp
