// Paged keys and values: the structs that describe them and their layout.
//
// Tokens are stored in tiles of 16, block_size / 16 tiles a block: [block][kv_head][tile], each tile its keys and then
// its values, which are read together and often fill a page. Two numbers that a dot product consumes together are
// neighbours, as AVX-512 BF16 wants them; the layout is the same for every instruction set:
//   fp32         keys [key_dim][16]         values [16][value_dim]
//   bf16, fp16   keys [key_dim/2][16][2]    values [8][value_dim][2]
#pragma once
#include <string.h>

#include "abi.h"

// The requests of one step, the same for all layers. Request r owns the packed tokens query_start[r] to
// query_start[r + 1], the last ones of its context_len[r] tokens.
struct HfpBatch {
  const int32_t* query_start;   // [num_requests + 1]
  const int32_t* context_len;   // [num_requests]
  const int32_t* table_rows;    // [num_requests], row of block_tables
  const int32_t* block_tables;  // [num_table_rows][table_stride], block ids
  const int64_t* slots;         // [tokens], block * block_size + offset of each packed token
  int64_t table_stride;
  int32_t num_requests;
  int32_t num_table_rows;
  int32_t block_size;  // a multiple of 16
};

// Keys and values of one layer.
struct HfpCache {
  void* key;    // keys of the first tile
  void* value;  // values of the first tile, right behind its keys
  int32_t dtype;  // HfpDtype
  int32_t num_blocks;
  int32_t num_kv_heads;
  int32_t key_dim;
  int32_t value_dim;
};

// Copies the new keys [tokens, num_kv_heads, key_dim] and values [tokens, num_kv_heads, value_dim] to their slots.
// Strides are in elements; the last dimension is contiguous.
struct HfpWriteKvArgs {
  const HfpBatch* batch;
  const HfpCache* cache;
  const void* key;
  const void* value;
  int64_t key_token_stride;
  int64_t key_head_stride;
  int64_t value_token_stride;
  int64_t value_head_stride;
  int32_t num_threads;
};
HFP_API int hfp_write_kv(const HfpWriteKvArgs* args);

namespace hfp {

constexpr int kTileTokens = 16;

static inline bool is_thread_count(int threads) { return threads >= 1 && threads <= 1024; }

// HFP_OK if the description of a layer is one the kernels can read.
int check_cache(const HfpCache* cache, int block_size);

// Index of the tile with tokens [16 * tile, 16 * tile + 16) of a block, among all tiles of the layer.
static inline int64_t tile_index(const HfpCache& cache, int block_size, int64_t block, int kv_head, int tile) {
  return (block * cache.num_kv_heads + kv_head) * (block_size / kTileTokens) + tile;
}

// Elements between a tile's keys and the next one's; the same between values.
static inline int64_t tile_stride(const HfpCache& cache) {
  return int64_t(kTileTokens) * (cache.key_dim + cache.value_dim);
}

// Writes one token's row into a tile. Bits is float or uint16_t, `token` is 0..15.
static inline void write_key(float* tile, int token, const float* key, int dim) {
  for (int d = 0; d < dim; d++) tile[d * kTileTokens + token] = key[d];
}
static inline void write_key(uint16_t* tile, int token, const uint16_t* key, int dim) {
  for (int d = 0; d < dim; d += 2) memcpy(tile + d * kTileTokens + token * 2, key + d, 2 * sizeof(uint16_t));
}
static inline void write_value(float* tile, int token, const float* value, int dim) {
  memcpy(tile + token * dim, value, dim * sizeof(float));
}
static inline void write_value(uint16_t* tile, int token, const uint16_t* value, int dim) {
  uint16_t* pairs = tile + token / 2 * 2 * dim + token % 2;
  for (int d = 0; d < dim; d++) pairs[2 * d] = value[d];
}

}  // namespace hfp
