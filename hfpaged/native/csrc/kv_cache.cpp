#include "kv_cache.h"

namespace {

constexpr int kTokensPerThread = 8;  // fewer are not worth waking a thread for

template <class Bits>
void write_token(const HfpWriteKvArgs& args, int64_t token) {
  const HfpCache& cache = *args.cache;
  int block_size = args.batch->block_size;
  int64_t slot = args.batch->slots[token];
  int offset = int(slot % block_size);
  for (int head = 0; head < cache.num_kv_heads; head++) {
    int64_t tile = hfp::tile_index(cache, block_size, slot / block_size, head, offset / hfp::kTileTokens);
    Bits* key = static_cast<Bits*>(cache.key) + tile * hfp::tile_stride(cache);
    Bits* value = static_cast<Bits*>(cache.value) + tile * hfp::tile_stride(cache);
    int row = offset % hfp::kTileTokens;
    const Bits* new_key =
        static_cast<const Bits*>(args.key) + token * args.key_token_stride + head * args.key_head_stride;
    const Bits* new_value =
        static_cast<const Bits*>(args.value) + token * args.value_token_stride + head * args.value_head_stride;
    hfp::write_key(key, row, new_key, cache.key_dim);
    hfp::write_value(value, row, new_value, cache.value_dim);
  }
}

template <class Bits>
void write_tokens(const HfpWriteKvArgs& args, int64_t tokens) {
  int64_t worth = tokens / kTokensPerThread;
  [[maybe_unused]] int threads = worth < args.num_threads ? int(worth) : args.num_threads;
#pragma omp parallel for num_threads(threads) if (threads > 1)
  for (int64_t token = 0; token < tokens; token++) write_token<Bits>(args, token);
}

bool is_head_dim(int dim) { return dim >= 2 && dim <= 512 && dim % 2 == 0; }

int check(const HfpWriteKvArgs* args) {
  if (!args || !args->batch || !args->cache) return HFP_NULL_POINTER;
  const HfpBatch& batch = *args->batch;
  if (int status = hfp::check_cache(args->cache, batch.block_size)) return status;
  if (batch.num_requests < 0) return HFP_BAD_LENGTHS;
  if (!hfp::is_thread_count(args->num_threads)) return HFP_BAD_OPTION;
  if (batch.num_requests == 0) return HFP_OK;
  if (!batch.query_start || !batch.slots || !args->key || !args->value) return HFP_NULL_POINTER;
  int64_t end = int64_t(args->cache->num_blocks) * batch.block_size;
  for (int token = 0; token < batch.query_start[batch.num_requests]; token++)
    if (batch.slots[token] < 0 || batch.slots[token] >= end) return HFP_BAD_SLOT;
  return HFP_OK;
}

}  // namespace

int hfp::check_cache(const HfpCache* cache, int block_size) {
  if (!cache->key || !cache->value) return HFP_NULL_POINTER;
  if (cache->dtype < HFP_FP32 || cache->dtype > HFP_FP16) return HFP_BAD_DTYPE;
  if (cache->num_kv_heads < 1) return HFP_BAD_HEADS;
  if (!is_head_dim(cache->key_dim) || !is_head_dim(cache->value_dim)) return HFP_BAD_DIMENSION;
  return block_size > 0 && block_size % kTileTokens == 0 ? HFP_OK : HFP_BAD_BLOCK_SIZE;
}

int hfp_write_kv(const HfpWriteKvArgs* args) {
  int status = check(args);
  if (status || args->batch->num_requests == 0) return status;
  int64_t tokens = args->batch->query_start[args->batch->num_requests];
  if (args->cache->dtype == HFP_FP32) write_tokens<float>(*args, tokens);
  else write_tokens<uint16_t>(*args, tokens);
  return HFP_OK;
}
