// The order in which an item reads the cache, and fetching ahead in the order of memory.
#pragma once
#include "attention.h"
#include "attention_softmax.h"

namespace hfp {
namespace HFP_ISA {
namespace {

// Goes through the chunks of an item: split by split, in each first what all members share, then each member's own.
class ItemWalk {
 public:
  ItemWalk(const HfpAttentionArgs& args, const int32_t* members, const AttentionItem& item)
      : args_(&args), members_(members + item.first_member), item_(&item), split_(item.first_split) {
    enter_part();
  }

  bool at_end() const { return split_ == item_->first_split + item_->num_splits; }
  int split() const { return split_; }
  // First position of the present chunk, a multiple of kChunkTokens.
  int chunk() const { return chunk_; }
  // Whether the chunk is read for the rows of all members, or for those of member() alone.
  bool is_shared() const { return part_ == 0; }
  int member() const { return is_shared() ? 0 : part_ - 1; }
  int request() const { return members_[member()]; }

  // The tiles of the present chunk that some row sees, counted from position 0.
  Span tiles() const { return tiles_of(intersect(reads_, {chunk_, chunk_ + kChunkTokens})); }

  void advance() {
    chunk_ += kChunkTokens;
    if (chunk_ < reads_.last) return;
    part_++;
    enter_part();
  }

 private:
  // Goes to the first chunk of the present part, or of the next one that has any.
  void enter_part() {
    for (; !at_end(); split_++, part_ = 0)
      for (; part_ <= item_->num_members; part_++) {
        reads_ = intersect(part_positions(), {split_ * kSplitTokens, (split_ + 1) * kSplitTokens});
        if (reads_.empty()) continue;
        chunk_ = reads_.first / kChunkTokens * kChunkTokens;
        return;
      }
  }

  Span part_positions() const {
    if (is_shared()) return {0, item_->shared_tokens};
    const int32_t* start = args_->batch->query_start + request();
    int position = args_->batch->context_len[request()] - (start[1] - start[0]) + item_->first_token;
    int first = args_->window ? larger(0, position - args_->window + 1) : 0;
    return {larger(first, item_->shared_tokens), position + item_->num_tokens};
  }

  const HfpAttentionArgs* args_;
  const int32_t* members_;
  const AttentionItem* item_;
  Span reads_ = {0, 0};
  int split_, part_ = 0, chunk_ = 0;
};

// Tiles [first, last) of a request that are in one block, and so one behind the other in the cache.
struct TileRun {
  int first, last;
  int64_t index;  // of the first one among all tiles of the layer
};

// The run of tiles from `tile` on, not beyond `end`.
inline TileRun run_of_tiles(const HfpAttentionArgs& args, int request, int kv_head, int tile, int end) {
  const HfpBatch& batch = *args.batch;
  int tiles_per_block = batch.block_size / kTileTokens, entry = tile / tiles_per_block;
  int64_t block = batch.block_tables[batch.table_rows[request] * batch.table_stride + entry];
  int begin = entry * tiles_per_block;
  return {tile, smaller(end, begin + tiles_per_block),
          tile_index(*args.cache, batch.block_size, block, kv_head, tile - begin)};
}

// How far ahead to fetch, in bytes: it fits into an L2 cache beside what is being read.
constexpr int kAheadBytes = 96 << 10;

// Names the tiles that a thread's items will read, a fixed number of tiles ahead. Those of a chunk come in the order of
// memory: all KV heads of a block, then the next block.
class ReadAhead {
 public:
  ReadAhead(const HfpAttentionArgs& args, const PlannedItems& plan, ItemRange items, int distance)
      : args_(args),
        plan_(plan),
        number_(items.first),
        end_(items.own_end),
        tiles_per_block_(args.batch->block_size / kTileTokens),
        walk_(args, plan.members, plan.items[items.first]) {
    begin_chunk();
    skip(distance);
  }

  bool at_end() const { return number_ == end_; }

  // Index of the next tile among all tiles of the layer. Only before the end.
  int64_t next() {
    int64_t index = run_.index + head_ * tiles_per_block_ + (tile_ - run_.first);
    if (++tile_ < run_.last) return index;
    tile_ = run_.first;
    if (++head_ == item().num_kv_heads) begin_run(run_.last);
    return index;
  }

 private:
  const AttentionItem& item() const { return plan_.items[number_]; }

  void skip(int tiles) {
    int in_chunk;
    while (!at_end() && tiles >= (in_chunk = (chunk_.last - chunk_.first) * item().num_kv_heads)) {
      tiles -= in_chunk;
      begin_run(chunk_.last);
    }
    for (; !at_end() && tiles > 0; tiles--) next();
  }

  void begin_chunk() {
    chunk_ = walk_.tiles();
    begin_run(chunk_.first);
  }

  void begin_run(int tile) {
    if (tile == chunk_.last) return end_chunk();
    run_ = run_of_tiles(args_, walk_.request(), item().kv_head, tile, chunk_.last);
    tile_ = tile;
    head_ = 0;
  }

  void end_chunk() {
    walk_.advance();
    if (walk_.at_end()) {
      if (++number_ == end_) return;
      walk_ = ItemWalk(args_, plan_.members, item());
    }
    begin_chunk();
  }

  const HfpAttentionArgs& args_;
  const PlannedItems& plan_;
  int number_, end_;  // of items
  int tiles_per_block_;
  ItemWalk walk_;
  Span chunk_ = {0, 0};
  TileRun run_ = {0, 0, 0};
  int tile_ = 0, head_ = 0;
};

}  // namespace
}  // namespace HFP_ISA
}  // namespace hfp
