// Draws by inverting the cumulative distribution: sums over blocks first, then the scores of one block.
#include "draw.h"

#include "ops_scores.h"

namespace hfp {
namespace HFP_ISA {
namespace {

constexpr int kBlocks = 256;
// How far apart a cumulative sum and the target may be from their exact distance, relative to the sum of all: a mass
// is off by 1.7e-7 of itself at most.
constexpr double kTolerance = 5e-7;

// exp(scores - top), with what the subtraction loses.
Vec16 masses_of(Vec16 scores, Vec16 top) {
  Vec16 minus_top = negate16(top), distance = scores + minus_top, mass = exp16(distance);
  // What is further below has no mass, and the rounding error of -inf would be no number.
  Vec16 error = where_above16(sum_error16(scores, minus_top, distance), distance, splat16(-110.f));
  return fma16(mass, error, mass);
}

double block_mass(const float* scores, int64_t count, Vec16 top) {
  ExactSum sum;
  for_each16(static_cast<int>(count),
             [&](int i, auto lanes) { sum.add(masses_of(load_scores(scores + i, lanes), top)); });
  return sum.total();
}

// The index in a block at which the mass `below` it has grown beyond `target`, if it is sure by `margin`.
int64_t index_in_block(const float* scores, int64_t count, Vec16 top, double below, double target, double margin) {
  for (int64_t first = 0; first < count; first += kLanes) {
    int lanes = static_cast<int>(count - first < kLanes ? count - first : kLanes);
    float masses[kLanes];
    store16(masses, masses_of(load_upto16(scores + first, lanes), top));
    for (int i = 0; i < lanes; i++) {
      double next = below + masses[i];
      if (next - target > margin) return target - below > margin ? first + i : HFP_UNDECIDED;
      below = next;
    }
  }
  return HFP_UNDECIDED;
}

}  // namespace

int64_t draw_index(const float* scores, int64_t count, double uniform) {
  float highest = highest_of(scores, count);
  if (!(__builtin_fabsf(highest) < __builtin_inff())) return HFP_CANNOT_DRAW;
  Vec16 top = splat16(highest);
  int64_t vectors = (count + kLanes - 1) / kLanes, block = (vectors + kBlocks - 1) / kBlocks * kLanes;
  double sums[kBlocks], total = 0;
  int blocks = 0;
  for (int64_t first = 0; first < count; first += block, blocks++) {
    sums[blocks] = block_mass(scores + first, count - first < block ? count - first : block, top);
    total += sums[blocks];
  }
  double target = uniform * total, below = 0;
  for (int i = 0; i < blocks; below += sums[i++]) {
    if (below + sums[i] <= target) continue;
    int64_t first = i * block, size = count - first < block ? count - first : block;
    int64_t index = index_in_block(scores + first, size, top, below, target, kTolerance * total);
    return index < 0 ? index : first + index;
  }
  return HFP_UNDECIDED;
}

}  // namespace HFP_ISA
}  // namespace hfp
