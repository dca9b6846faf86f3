// One item of attention: some rows that share keys and values, from query to output.
#include "attention.h"

#include "attention_dot.h"
#include "attention_softmax.h"
#include "attention_tiles.h"
#include "attention_walk.h"

namespace hfp {
namespace HFP_ISA {
namespace {

template <class T>
class ItemRun {
 public:
  ItemRun(const HfpAttentionArgs& args, const PlannedItems& plan, int index, ReadAhead& ahead)
      : args_(args),
        cache_(*args.cache),
        item_(plan.items[index]),
        walk_(args, plan.members, item_),
        ahead_(ahead),
        rows_(item_.rows()),
        pairs_(cache_.key_dim / 2),
        value_stride_((cache_.value_dim + kLanes - 1) / kLanes * kLanes),
        scale_(args.softcap > 0 ? args.scale / args.softcap : args.scale * kLog2E),
        cap_(args.softcap * kLog2E) {
    find_rows(plan.members + item_.first_member);
  }

  // Computes the item's splits. The output is written by whoever completes the last split of the rows.
  void run(SplitGroup* group) {
    load_query();
    if (!group) return write_output(all_splits());
    attend_split(group_partial(*group, item_.first_split));
    if (__atomic_sub_fetch(&group->pending, 1, __ATOMIC_ACQ_REL)) return;
    __atomic_store_n(&group->pending, group->num_splits, __ATOMIC_RELAXED);
    Partial result = group_partial(*group, group->first_split);
    for (int i = 1; i < group->num_splits; i++) merge(result, group_partial(*group, group->first_split + i));
    write_output(result);
  }

 private:
  using Factor = typename Dot<T>::Factor;
  // Rows of a KV head go by member, token, head.
  void find_rows(const int32_t* members) {
    int row = 0;
    for (int i = 0; i < item_.num_members; i++) {
      int start = args_.batch->query_start[members[i]], length = args_.batch->query_start[members[i] + 1] - start;
      for (int token = item_.first_token; token < item_.first_token + item_.num_tokens; token++)
        for (int head = 0; head < item_.num_heads; head++, row++) {
          token_[row] = start + token;
          position_[row] = args_.batch->context_len[members[i]] - length + token;
        }
    }
  }

  // The query head of a row of the item's KV head number `kv`.
  int64_t head_of(int kv, int row) const {
    int heads_per_kv_head = args_.num_heads / cache_.num_kv_heads;
    return int64_t(item_.kv_head + kv) * heads_per_kv_head + item_.first_head + row % item_.num_heads;
  }

  Span seen_by(int row) const {
    return {args_.window ? larger(0, position_[row] - args_.window + 1) : 0, position_[row] + 1};
  }

  // Rows of one member, or of several in a chunk that all of them see whole.
  Span seen_by(int first_row, int rows) const {
    return {seen_by(first_row).first, seen_by(first_row + rows - 1).last};
  }

  Partial partial(float* memory) const { return {memory, rows_ * item_.num_kv_heads, cache_.value_dim}; }
  Partial group_partial(const SplitGroup& group, int split) const {
    int64_t floats = partial_floats(rows_ * item_.num_kv_heads, cache_.value_dim);
    return partial(group.partials + (split - group.first_split) * floats);
  }

  // The factors of a row of the item's KV head number `kv`.
  Factor* query_at(int kv, int row) { return query_ + (kv * rows_ + row) * kQueryStride; }

  void load_query() {
    for (int kv = 0; kv < item_.num_kv_heads; kv++)
      for (int row = 0; row < rows_; row++) {
        int64_t offset = token_[row] * args_.query_token_stride + head_of(kv, row) * args_.query_head_stride;
        Dot<T>::factors(query_at(kv, row), static_cast<const T*>(args_.query) + offset, pairs_);
      }
  }

  Partial all_splits() {
    Partial result = partial(result_), part = partial(part_);
    attend_split(result);
    while (!walk_.at_end()) {
      attend_split(part);
      merge(result, part);
    }
    return result;
  }

  // Computes the split that the walk is in.
  void attend_split(const Partial& result) {
    result.clear();
    for (int split = walk_.split(); !walk_.at_end() && walk_.split() == split; walk_.advance()) {
      find_tiles();
      for (int kv = 0; kv < item_.num_kv_heads; kv++) attend_chunk(kv, result);
    }
  }

  void attend_chunk(int kv, const Partial& result) {
    point_to_tiles(kv);
    int rows_per_member = rows_ / item_.num_members;
    int first = walk_.is_shared() ? 0 : walk_.member() * rows_per_member;
    int last = walk_.is_shared() ? rows_ : first + rows_per_member;
    for (int row = first, rows; row < last; row += rows) {
      rows = smaller(last - row, kTileRows - row % kTileRows);
      Span seen = in_chunk(seen_by(row, rows));
      if (!seen.empty()) attend_rows(kv, row, rows, tiles_of(seen), result);
    }
  }

  Span in_chunk(Span positions) const {
    return intersect({positions.first - walk_.chunk(), positions.last - walk_.chunk()}, {0, kChunkTokens});
  }

  void attend_rows(int kv, int first_row, int rows, Span tiles, const Partial& result) {
    compute_scores<T>(rows, query_at(kv, first_row), pairs_, keys_, tiles.first, tiles.last, scale_, scores_);
    int first_result = kv * rows_ + first_row;
    for (int i = 0; i < rows; i++)
      soften<T>(scores_ + i * kChunkTokens, in_chunk(seen_by(first_row + i)), tiles, cap_,
                factors_ + i * (kChunkTokens / 2), result, first_result + i);
    weigh_values(rows, tiles, result.out + int64_t(first_result) * result.stride);
  }

  // Vectors of values that are not whole would end in the next token's, so those tiles go through a padded copy.
  void weigh_values(int rows, Span tiles, float* out) {
    int known = args_.batch->context_len[walk_.request()] - walk_.chunk();
    int first = tiles.first * kTileTokens, last = smaller(known, tiles.last * kTileTokens);
    if (value_stride_ == cache_.value_dim)
      return add_values<T>(rows, value_tiles(first, last, values_.now + tiles.first), out);
    for (; first < last; first += kTileTokens) {
      pad_value_tile(values_.now[first / kTileTokens]);
      const T* copy = padded_tile_;
      add_values<T>(rows, value_tiles(first, smaller(last, first + kTileTokens), &copy), out);
    }
  }

  // Tokens [first, last) of the chunk, from the first one of a tile, of which the first values are at *now.
  ValueTiles<T> value_tiles(int first, int last, const T* const* now) const {
    return {now, values_.next + first / kTileTokens, last - first, value_stride_, factors_ + first / 2};
  }

  void pad_value_tile(const T* tile) {
    constexpr int kPack = kTokensPerRow<T>;
    int row_elements = cache_.value_dim * kPack, padded = value_stride_ * kPack;
    memset(padded_tile_, 0, sizeof(T) * kTileTokens * value_stride_);
    for (int row = 0; row < kTileTokens / kPack; row++)
      memcpy(padded_tile_ + row * padded, tile + row * row_elements, sizeof(T) * row_elements);
  }

  // Looks up the chunk's tiles of the item's first KV head.
  void find_tiles() {
    Span tiles = walk_.tiles();
    int first_in_chunk = walk_.chunk() / kTileTokens;
    for (TileRun run = {0, tiles.first, 0}; run.last < tiles.last;) {
      run = run_of_tiles(args_, walk_.request(), item_.kv_head, run.last, tiles.last);
      for (int tile = run.first; tile < run.last; tile++)
        first_head_tile_[tile - first_in_chunk] = run.index + (tile - run.first);
    }
  }

  // Where the chunk's tiles of a KV head are, and for each the tile to prefetch while it is read.
  void point_to_tiles(int kv) {
    Span tiles = walk_.tiles();
    int first_in_chunk = walk_.chunk() / kTileTokens, tiles_per_block = args_.batch->block_size / kTileTokens;
    for (int i = tiles.first - first_in_chunk; i < tiles.last - first_in_chunk; i++) {
      int64_t index = first_head_tile_[i] + kv * tiles_per_block;
      keys_.now[i] = key_tile(index);
      values_.now[i] = value_tile(index);
      if (!ahead_.at_end()) index = ahead_.next();
      keys_.next[i] = key_tile(index);
      values_.next[i] = value_tile(index);
    }
  }

  const T* key_tile(int64_t index) const {
    return static_cast<const T*>(cache_.key) + index * tile_stride(cache_);
  }
  const T* value_tile(int64_t index) const {
    return static_cast<const T*>(cache_.value) + index * tile_stride(cache_);
  }

  void write_output(const Partial& result) const {
    for (int kv = 0; kv < item_.num_kv_heads; kv++)
      for (int row = 0; row < rows_; row++) {
        int64_t head = head_of(kv, row);
        T* output = static_cast<T*>(args_.output) + token_[row] * args_.output_token_stride;
        write_row(result, kv * rows_ + row, head, output + head * args_.output_head_stride);
      }
  }

  void write_row(const Partial& result, int row, int64_t head, T* output) const {
    float sum = result.sum[row];
    if (args_.sinks) sum += power_of_two(args_.sinks[head] * kLog2E - result.max[row]);
    const float* values = result.out + int64_t(row) * result.stride;
    Vec16 inverse = splat16(1.f / sum);
    for_each16(cache_.value_dim, [&](int d, auto count) {
      store_upto16(output + d, load16(values + d) * inverse, count);
    });
  }

  const HfpAttentionArgs& args_;
  const HfpCache& cache_;
  const AttentionItem& item_;
  ItemWalk walk_;
  ReadAhead& ahead_;
  int rows_;  // of each KV head
  int pairs_, value_stride_;
  float scale_, cap_;  // of the scores, in units of ln 2
  int64_t token_[kMaxItemRows];  // of each row: its place in the packed step
  int position_[kMaxItemRows];   // of each row: the token's position in its request
  int64_t first_head_tile_[kTilesPerChunk];
  TilePointers<T> keys_, values_;
  // Blocks of rows may read rows that do not exist behind the last.
  alignas(64) Factor query_[(kMaxItemRows + kTileRows) * kQueryStride];
  alignas(64) float scores_[kTileRows * kChunkTokens];
  alignas(64) Factor factors_[kTileRows * kChunkTokens / 2];
  alignas(64) float result_[kMaxItemRows * (2 + kMaxHeadDim)];
  alignas(64) float part_[kMaxItemRows * (2 + kMaxHeadDim)];
  alignas(64) T padded_tile_[kTileTokens * kMaxHeadDim];
};

template <class T>
void attend(const HfpAttentionArgs& args, const PlannedItems& plan, ItemRange items) {
  int distance = larger(1, kAheadBytes / int(tile_stride(*args.cache) * sizeof(T)));
  ReadAhead ahead(args, plan, items, distance);
  for (int index = items.first; index < items.last; index++) {
    int32_t group = plan.items[index].group;
    ItemRun<T>(args, plan, index, ahead).run(group < 0 ? nullptr : plan.groups + group);
  }
}

}  // namespace

void attend_items(const HfpAttentionArgs& args, const PlannedItems& plan, ItemRange items) {
  switch (args.cache->dtype) {
    case HFP_FP32: return attend<float>(args, plan, items);
    case HFP_BF16: return attend<bf16>(args, plan, items);
    default: return attend<fp16>(args, plan, items);
  }
}

}  // namespace HFP_ISA
}  // namespace hfp
