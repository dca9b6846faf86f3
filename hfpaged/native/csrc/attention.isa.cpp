// One item of attention: some rows of a request that share a KV head, from query to output.
#include "attention.h"

#include "attention_dot.h"
#include "attention_softmax.h"
#include "attention_tiles.h"

namespace hfp {
namespace HFP_ISA {
namespace {

template <class T>
class ItemRun {
 public:
  ItemRun(const HfpAttentionArgs& args, const AttentionItem& item, const AttentionItem* next)
      : args_(args),
        cache_(*args.cache),
        item_(item),
        next_(next),
        rows_(item.num_tokens * item.num_heads),
        pairs_(cache_.key_dim / 2),
        value_stride_((cache_.value_dim + kLanes - 1) / kLanes * kLanes),
        context_(args.batch->context_len[item.request]) {
    const int32_t* start = args.batch->query_start + item.request;
    first_token_ = start[0] + item.first_token;
    first_position_ = context_ - (start[1] - start[0]) + item.first_token;
    int tile_bytes = kTileTokens * (cache_.key_dim + cache_.value_dim) * int(sizeof(T));
    prefetch_distance_ = larger(1, smaller(kTilesPerChunk, kPrefetchBytes / tile_bytes));
  }

  // Computes the item's splits. The output is written by whoever completes the last split of the rows.
  void run(SplitGroup* group) {
    load_query();
    if (!group) return write_output(all_splits());
    attend_split(item_.first_split, group_partial(*group, item_.first_split));
    if (__atomic_sub_fetch(&group->pending, 1, __ATOMIC_ACQ_REL)) return;
    __atomic_store_n(&group->pending, group->num_splits, __ATOMIC_RELAXED);
    Partial result = group_partial(*group, group->first_split);
    for (int i = 1; i < group->num_splits; i++) merge(result, group_partial(*group, group->first_split + i));
    write_output(result);
  }

 private:
  static constexpr int kPrefetchBytes = 128 << 10;  // fits into the L2 cache beside what is in use
  static constexpr int kMaxTiles = (kMaxItemRows + kTileRows - 1) / kTileRows;
  using Factor = typename Dot<T>::Factor;

  // Rows go by token, then head.
  int64_t token_of(int row) const { return first_token_ + row / item_.num_heads; }
  int64_t head_of(int row) const { return item_.first_head + row % item_.num_heads; }

  Span seen_by(int row) const {
    int position = first_position_ + row / item_.num_heads;
    return {args_.window ? larger(0, position - args_.window + 1) : 0, position + 1};
  }

  // The first row's token comes first, the last row's last.
  Span seen_by(int first_row, int rows) const {
    return {seen_by(first_row).first, seen_by(first_row + rows - 1).last};
  }

  Partial partial(float* memory) const { return {memory, rows_, cache_.value_dim}; }
  Partial group_partial(const SplitGroup& group, int split) const {
    return partial(group.partials + (split - group.first_split) * partial_floats(rows_, cache_.value_dim));
  }

  // Query rows as factors, [tile of rows][pair][kTileRows]; rows that do not exist are zero.
  void load_query() {
    memset(query_, 0, sizeof(Factor) * ((rows_ + kTileRows - 1) / kTileRows) * pairs_ * kTileRows);
    Factor row_factors[kMaxHeadDim / 2];
    for (int row = 0; row < rows_; row++) {
      int64_t offset = token_of(row) * args_.query_token_stride + head_of(row) * args_.query_head_stride;
      const T* query = static_cast<const T*>(args_.query) + offset;
      Dot<T>::factors(row_factors, query, pairs_);
      Factor* tile = query_ + row / kTileRows * pairs_ * kTileRows + row % kTileRows;
      for (int i = 0; i < pairs_; i++) tile[i * kTileRows] = row_factors[i];
    }
  }

  Partial all_splits() {
    Partial result = partial(result_), part = partial(part_);
    attend_split(item_.first_split, result);
    for (int i = 1; i < item_.num_splits; i++) {
      attend_split(item_.first_split + i, part);
      merge(result, part);
    }
    return result;
  }

  void attend_split(int split, const Partial& result) {
    result.clear();
    Span seen = intersect(seen_by(0, rows_), {split * kSplitTokens, (split + 1) * kSplitTokens});
    for (int chunk = seen.first / kChunkTokens * kChunkTokens; chunk < seen.last; chunk += kChunkTokens)
      attend_chunk(chunk, result);
  }

  void attend_chunk(int chunk, const Partial& result) {
    find_tiles(chunk);
    for (int row = 0; row < rows_; row += kTileRows) {
      int rows = smaller(kTileRows, rows_ - row);
      Span seen = in_chunk(seen_by(row, rows), chunk);
      if (!seen.empty()) attend_rows(row, rows, chunk, tiles_of(seen), result);
    }
  }

  static Span in_chunk(Span positions, int chunk) {
    return intersect({positions.first - chunk, positions.last - chunk}, {0, kChunkTokens});
  }

  void attend_rows(int first_row, int rows, int chunk, Span tiles, const Partial& result) {
    const Factor* query = query_ + first_row * pairs_;
    compute_scores<T>(rows, query, pairs_, keys_, tiles.first, tiles.last, args_.scale, scores_);
    for (int i = 0; i < rows; i++) {
      Span seen = in_chunk(seen_by(first_row + i), chunk);
      soften<T>(scores_ + i * kChunkTokens, seen, tiles, args_.softcap, factors_ + i * (kChunkTokens / 2), result,
                first_row + i);
    }
    weigh_values(rows, chunk, tiles, result.out + int64_t(first_row) * result.stride);
  }

  // Tiles whose values cannot be multiplied where they are go through a copy: those with slots beyond the context,
  // whose content is undefined (0 * NaN is NaN), and all of them if the dimension is not a multiple of the lanes.
  void weigh_values(int rows, int chunk, Span tiles, float* out) {
    Span usable = {tiles.first, smaller(tiles.last, (context_ - chunk) / kTileTokens)};
    if (value_stride_ != cache_.value_dim) usable.last = usable.first;
    if (!usable.empty()) add_values<T>(rows, tiles_in_place(usable), out);
    for (int tile = usable.last; tile < tiles.last; tile++) {
      copy_value_tile(values_.now[tile], smaller(kTileTokens, context_ - chunk - tile * kTileTokens));
      const T* copy = copied_tile_;
      add_values<T>(rows, {&copy, &copy, 1, value_stride_, factors_ + tile * (kTileTokens / 2)}, out);
    }
  }

  ValueTiles<T> tiles_in_place(Span tiles) const {
    return {values_.now + tiles.first, values_.next + tiles.first, tiles.last - tiles.first, value_stride_,
            factors_ + tiles.first * (kTileTokens / 2)};
  }

  // Copies a value tile with rows padded to whole vectors, and zeros for tokens from `tokens` on.
  void copy_value_tile(const T* tile, int tokens) {
    constexpr int kPack = kTokensPerRow<T>;
    memset(copied_tile_, 0, sizeof(T) * kTileTokens * value_stride_);
    for (int token = 0; token < tokens; token++) {
      int row = token / kPack * kPack;
      const T* from = tile + row * cache_.value_dim + token % kPack;
      T* to = copied_tile_ + row * value_stride_ + token % kPack;
      for (int d = 0; d < cache_.value_dim; d++) to[d * kPack] = from[d * kPack];
    }
  }

  // Looks up the chunk's tiles, and for each the tile to prefetch while it is read: a fixed distance ahead in the order
  // of reading, which goes on with the next item.
  void find_tiles(int chunk) {
    int first_in_chunk = chunk / kTileTokens;
    Span tiles = tiles_of(in_chunk(seen_by(0, rows_), chunk));
    int item_end = tiles_of(seen_by(0, rows_)).last;
    int next_first = next_ ? first_tile(*next_) : 0;
    int next_end = next_ ? tiles_of({0, args_.batch->context_len[next_->request]}).last : 0;
    for (int i = tiles.first; i < tiles.last; i++) {
      int tile = first_in_chunk + i, ahead = tile + prefetch_distance_;
      int64_t index = tile_in_cache(item_, tile);
      keys_.now[i] = key_tile(index);
      values_.now[i] = value_tile(index);
      int ahead_in_next = next_first + ahead - item_end;
      if (ahead < item_end) index = tile_in_cache(item_, ahead);
      else if (ahead_in_next < next_end) index = tile_in_cache(*next_, ahead_in_next);
      keys_.next[i] = key_tile(index);
      values_.next[i] = value_tile(index);
    }
  }

  int first_tile(const AttentionItem& item) const {
    const int32_t* start = args_.batch->query_start + item.request;
    int position = args_.batch->context_len[item.request] - (start[1] - start[0]) + item.first_token;
    int first = args_.window ? larger(0, position - args_.window + 1) : 0;
    return larger(first, item.first_split * kSplitTokens) / kTileTokens;
  }

  int64_t tile_in_cache(const AttentionItem& item, int tile) const {
    const HfpBatch& batch = *args_.batch;
    int tiles_per_block = batch.block_size / kTileTokens;
    const int32_t* table = batch.block_tables + batch.table_rows[item.request] * batch.table_stride;
    return tile_index(cache_, batch.block_size, table[tile / tiles_per_block], item.kv_head, tile % tiles_per_block);
  }

  const T* key_tile(int64_t index) const {
    return static_cast<const T*>(cache_.key) + index * kTileTokens * cache_.key_dim;
  }
  const T* value_tile(int64_t index) const {
    return static_cast<const T*>(cache_.value) + index * kTileTokens * cache_.value_dim;
  }

  void write_output(const Partial& result) const {
    for (int row = 0; row < rows_; row++) {
      int64_t offset = token_of(row) * args_.output_token_stride + head_of(row) * args_.output_head_stride;
      T* output = static_cast<T*>(args_.output) + offset;
      float sum = result.sum[row];
      if (args_.sinks) sum += exp1(args_.sinks[head_of(row)] - result.max[row]);
      const float* values = result.out + int64_t(row) * result.stride;
      int d = 0;
      for (; d + kLanes <= cache_.value_dim; d += kLanes) store16(output + d, load16(values + d) / splat16(sum));
      if (d == cache_.value_dim) continue;
      T lanes[kLanes];
      store16(lanes, load16(values + d) / splat16(sum));
      memcpy(output + d, lanes, sizeof(T) * (cache_.value_dim - d));
    }
  }

  const HfpAttentionArgs& args_;
  const HfpCache& cache_;
  const AttentionItem& item_;
  const AttentionItem* next_;
  int rows_, pairs_, value_stride_, context_, prefetch_distance_;
  int64_t first_token_;
  int first_position_;
  TilePointers<T> keys_, values_;
  alignas(64) Factor query_[kMaxTiles * kTileRows * kMaxHeadDim / 2];
  alignas(64) float scores_[kTileRows * kChunkTokens];
  alignas(64) Factor factors_[kTileRows * kChunkTokens / 2];
  alignas(64) float result_[kMaxItemRows * (2 + kMaxHeadDim)];
  alignas(64) float part_[kMaxItemRows * (2 + kMaxHeadDim)];
  alignas(64) T copied_tile_[kTileTokens * kMaxHeadDim];
};

}  // namespace

// Runs `item`; `next` is the item that this thread may well run after it, or null. `group` is the item's, or null.
void attend_item(const HfpAttentionArgs& args, const AttentionItem& item, const AttentionItem* next,
                 SplitGroup* group) {
  switch (args.cache->dtype) {
    case HFP_FP32: return ItemRun<float>(args, item, next).run(group);
    case HFP_BF16: return ItemRun<bf16>(args, item, next).run(group);
    default: return ItemRun<fp16>(args, item, next).run(group);
  }
}

}  // namespace HFP_ISA
}  // namespace hfp
