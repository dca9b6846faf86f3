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
  ItemRun(const HfpAttentionArgs& args, const PlannedItems& plan, int index)
      : args_(args),
        cache_(*args.cache),
        item_(plan.items[index]),
        walk_(args, plan.members, item_),
        ahead_(args, plan, index, tiles_ahead(*args.cache)),
        rows_(item_.rows()),
        pairs_(cache_.key_dim / 2),
        value_stride_((cache_.value_dim + kLanes - 1) / kLanes * kLanes) {
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
  // Rows of each KV head fill whole tiles of rows, the last one perhaps in part. Several KV heads read no more than
  // kChunkBytes a chunk, which limits their dimensions; one more tile of rows may be read past the end.
  static constexpr int kQueryFactors = kMaxItemRows * kMaxHeadDim / 2 +
                                       kTileRows * (kChunkBytes / kChunkTokens / int(2 * sizeof(T))) + kTileRows;

  static int tiles_ahead(const HfpCache& cache) {
    return larger(1, kChunkBytes / int(tile_stride(cache) * sizeof(T)));
  }

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

  Factor* query_at(int kv, int row) {
    int row_tiles = (rows_ + kTileRows - 1) / kTileRows;
    return query_ + int64_t(kv * row_tiles + row / kTileRows) * pairs_ * kTileRows + row % kTileRows;
  }

  // Query rows as factors, [KV head][tile of rows][pair][kTileRows]; rows that do not exist are zero.
  void load_query() {
    memset(query_, 0, sizeof(Factor) * (query_at(item_.num_kv_heads, 0) - query_ + kTileRows));
    Factor row_factors[kMaxHeadDim / 2];
    for (int kv = 0; kv < item_.num_kv_heads; kv++)
      for (int row = 0; row < rows_; row++) {
        int64_t offset = token_[row] * args_.query_token_stride + head_of(kv, row) * args_.query_head_stride;
        Dot<T>::factors(row_factors, static_cast<const T*>(args_.query) + offset, pairs_);
        Factor* query = query_at(kv, row);
        for (int i = 0; i < pairs_; i++) query[i * kTileRows] = row_factors[i];
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
    for (int split = walk_.split(); !walk_.at_end() && walk_.split() == split; walk_.advance())
      for (int kv = 0; kv < item_.num_kv_heads; kv++) attend_chunk(kv, result);
  }

  void attend_chunk(int kv, const Partial& result) {
    find_tiles(kv);
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
    compute_scores<T>(rows, query_at(kv, first_row), pairs_, keys_, tiles.first, tiles.last, args_.scale, scores_);
    int first_result = kv * rows_ + first_row;
    for (int i = 0; i < rows; i++)
      soften<T>(scores_ + i * kChunkTokens, in_chunk(seen_by(first_row + i)), tiles, args_.softcap,
                factors_ + i * (kChunkTokens / 2), result, first_result + i);
    weigh_values(rows, tiles, result.out + int64_t(first_result) * result.stride);
  }

  // Tiles whose values cannot be multiplied where they are go through a copy: those with slots beyond the context,
  // whose content is undefined (0 * NaN is NaN), and all of them if the dimension is not a multiple of the lanes.
  void weigh_values(int rows, Span tiles, float* out) {
    int known = args_.batch->context_len[walk_.request()] - walk_.chunk();
    Span usable = {tiles.first, smaller(tiles.last, known / kTileTokens)};
    if (value_stride_ != cache_.value_dim) usable.last = usable.first;
    if (!usable.empty()) add_values<T>(rows, value_tiles(usable, values_.now + usable.first), out);
    for (int tile = usable.last; tile < tiles.last; tile++) {
      copy_value_tile(values_.now[tile], smaller(kTileTokens, known - tile * kTileTokens));
      const T* copy = copied_tile_;
      add_values<T>(rows, value_tiles({tile, tile + 1}, &copy), out);
    }
  }

  ValueTiles<T> value_tiles(Span tiles, const T* const* now) const {
    return {now, values_.next + tiles.first, tiles.last - tiles.first, value_stride_,
            factors_ + tiles.first * (kTileTokens / 2)};
  }

  // Copies a value tile with rows padded to whole vectors, and zeros for tokens from `tokens` on.
  void copy_value_tile(const T* tile, int tokens) {
    constexpr int kPack = kTokensPerRow<T>;
    int row_elements = cache_.value_dim * kPack, padded = value_stride_ * kPack;
    int whole_rows = tokens / kPack;
    memset(copied_tile_, 0, sizeof(T) * kTileTokens * value_stride_);
    for (int row = 0; row < whole_rows; row++)
      memcpy(copied_tile_ + row * padded, tile + row * row_elements, sizeof(T) * row_elements);
    if (tokens % kPack == 0) return;
    const T* from = tile + whole_rows * row_elements;
    T* to = copied_tile_ + whole_rows * padded;
    for (int d = 0; d < row_elements; d += kPack) to[d] = from[d];
  }

  // Looks up the chunk's tiles, and for each the tile to prefetch while it is read.
  void find_tiles(int kv) {
    Span tiles = walk_.tiles();
    int first_in_chunk = walk_.chunk() / kTileTokens;
    for (int tile = tiles.first; tile < tiles.last; tile++) {
      int i = tile - first_in_chunk;
      int64_t index = tile_in_cache(args_, walk_.request(), item_.kv_head + kv, tile);
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
    if (args_.sinks) sum += exp1(args_.sinks[head] - result.max[row]);
    const float* values = result.out + int64_t(row) * result.stride;
    int d = 0;
    for (; d + kLanes <= cache_.value_dim; d += kLanes) store16(output + d, load16(values + d) / splat16(sum));
    if (d == cache_.value_dim) return;
    T lanes[kLanes];
    store16(lanes, load16(values + d) / splat16(sum));
    memcpy(output + d, lanes, sizeof(T) * (cache_.value_dim - d));
  }

  const HfpAttentionArgs& args_;
  const HfpCache& cache_;
  const AttentionItem& item_;
  ItemWalk walk_;
  ReadAhead ahead_;
  int rows_;  // of each KV head
  int pairs_, value_stride_;
  int64_t token_[kMaxItemRows];  // of each row: its place in the packed step
  int position_[kMaxItemRows];   // of each row: the token's position in its request
  TilePointers<T> keys_, values_;
  alignas(64) Factor query_[kQueryFactors];
  alignas(64) float scores_[kTileRows * kChunkTokens];
  alignas(64) Factor factors_[kTileRows * kChunkTokens / 2];
  alignas(64) float result_[kMaxItemRows * (2 + kMaxHeadDim)];
  alignas(64) float part_[kMaxItemRows * (2 + kMaxHeadDim)];
  alignas(64) T copied_tile_[kTileTokens * kMaxHeadDim];
};

}  // namespace

void attend_item(const HfpAttentionArgs& args, const PlannedItems& plan, int index) {
  int32_t number = plan.items[index].group;
  SplitGroup* group = number < 0 ? nullptr : plan.groups + number;
  switch (args.cache->dtype) {
    case HFP_FP32: return ItemRun<float>(args, plan, index).run(group);
    case HFP_BF16: return ItemRun<bf16>(args, plan, index).run(group);
    default: return ItemRun<fp16>(args, plan, index).run(group);
  }
}

}  // namespace HFP_ISA
}  // namespace hfp
