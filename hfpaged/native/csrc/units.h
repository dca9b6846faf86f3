// Which thread does which units of an operation. Each has a range of its own, which it works through from the front;
// when that is done it takes from the back of the others' ranges. So a thread that has lost its core for a while, or has
// a slower one, holds up the others by no more than the units that it has begun.
#pragma once
#include <cstdint>

#include "gemm.h"

namespace hfp {

// What is left of the units of an operation that one thread begins with.
struct UnitRange {
  uint64_t bounds;  // the first unit left in the lower half, the end in the upper one
};

// Units [begin, end).
struct UnitSpan {
  uint32_t begin, end;
};

HFP_ALWAYS_INLINE inline uint64_t packed(UnitSpan units) { return uint64_t(units.end) << 32 | units.begin; }
HFP_ALWAYS_INLINE inline UnitSpan unpacked(uint64_t bounds) { return {uint32_t(bounds), uint32_t(bounds >> 32)}; }

enum class Side { kFront, kBack };

// Takes some of the units that are left: `most`, or half of them if `most` is 0. Returns none when none are left.
HFP_ALWAYS_INLINE inline UnitSpan take_units(UnitRange* range, uint32_t most, Side side) {
  uint64_t bounds = __atomic_load_n(&range->bounds, __ATOMIC_RELAXED);
  for (;;) {
    UnitSpan left = unpacked(bounds), taken = left, rest = left;
    uint32_t size = left.end - left.begin, count = most ? most : (size + 1) / 2;
    if (size == 0) return {0, 0};
    if (count > size) count = size;
    if (side == Side::kFront) taken.end = rest.begin = left.begin + count;
    else taken.begin = rest.end = left.end - count;
    if (__atomic_compare_exchange_n(&range->bounds, &bounds, packed(rest), true, __ATOMIC_RELAXED, __ATOMIC_RELAXED))
      return taken;
  }
}

// Gives the thread its range of `total` units. All threads must have theirs before one begins to work.
HFP_ALWAYS_INLINE inline void deal_units(UnitRange* ranges, Share share, int64_t total) {
  ranges[share.index].bounds = packed({uint32_t(share.begin(total)), uint32_t(share.end(total))});
}

// Calls body(begin, end) until nobody has any units left. `ranges` are those of all threads.
template <class Body>
HFP_ALWAYS_INLINE inline void work_through(UnitRange* ranges, Share share, Body&& body) {
  constexpr uint32_t kParts = 16;  // of the thread's own range, so that others find something to take
  UnitSpan own = unpacked(__atomic_load_n(&ranges[share.index].bounds, __ATOMIC_RELAXED));
  uint32_t at_once = (own.end - own.begin + kParts - 1) / kParts;
  for (int turn = 0; turn < share.count; turn++) {
    UnitRange* range = &ranges[(share.index + turn) % share.count];
    for (;;) {
      UnitSpan units = turn == 0 ? take_units(range, at_once, Side::kFront) : take_units(range, 0, Side::kBack);
      if (units.begin == units.end) break;
      body(units.begin, units.end);
    }
  }
}

}  // namespace hfp
