// Writing the keys and values of a step's tokens to their slots in the cache of one layer.
#pragma once
#include "ops_types.h"
#include "program.h"

namespace hfp {
namespace HFP_ISA {

// The bits of an element, as the cache stores them.
template <class T>
struct BitsOf {
  using type = uint16_t;
};
template <>
struct BitsOf<float> {
  using type = float;
};

template <class T>
class CacheSlots {
 public:
  CacheSlots(const Step& step, const AttentionShape& shape) : step_(step), shape_(shape) {
    cache_.num_kv_heads = shape.kv_heads;
    cache_.key_dim = shape.key_dim;
    cache_.value_dim = shape.value_dim;
  }

  // Copies the keys and values of all KV heads of a token.
  void store(int64_t token, const T* keys, const T* values) const {
    Place place = place_of(token);
    for (int head = 0; head < shape_.kv_heads; head++) {
      int64_t tile = place.tile + head * head_stride();
      const Bits *key = reinterpret_cast<const Bits*>(keys + head * shape_.key_dim);
      const Bits *value = reinterpret_cast<const Bits*>(values + head * shape_.value_dim);
      write_key(key_cache() + tile, place.row, key, shape_.key_dim);
      write_value(value_cache() + tile, place.row, value, shape_.value_dim);
    }
  }

 private:
  using Bits = typename BitsOf<T>::type;

  // The token's tile of the first KV head, in elements from the first one, and its place in there.
  struct Place {
    int64_t tile;
    int row;
  };

  Place place_of(int64_t token) const {
    int64_t slot = step_.batch.slots[token], block_size = step_.batch.block_size, block = slot / block_size;
    int within = static_cast<int>(slot - block * block_size);
    int64_t tile = tile_index(cache_, step_.batch.block_size, block, 0, within / kTileTokens);
    return {tile * tile_stride(cache_), within % kTileTokens};
  }

  int64_t head_stride() const { return step_.batch.block_size / kTileTokens * tile_stride(cache_); }
  Bits* key_cache() const { return static_cast<Bits*>(step_.key_cache[shape_.layer]); }
  Bits* value_cache() const { return static_cast<Bits*>(step_.value_cache[shape_.layer]); }

  const Step& step_;
  const AttentionShape& shape_;
  HfpCache cache_ = {};
};

}  // namespace HFP_ISA
}  // namespace hfp
