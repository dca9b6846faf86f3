#include "nucleus_passes.h"

#include "ops_scores.h"

namespace hfp {
namespace HFP_ISA {

float highest_score(const float* scores, int64_t count) { return highest_of(scores, count); }

double write_masses(const float* scores, int64_t count, float highest, float* masses) {
  Vec16 top = splat16(highest);
  ExactSum sum;
  for_each16(static_cast<int>(count), [&](int i, auto lanes) {
    Vec16 mass = exp16(load_scores(scores + i, lanes) - top);
    store_upto16(masses + i, mass, lanes);
    sum.add(mass);
  });
  return sum.total();
}

void sum_above(const float* scores, const float* masses, int64_t count, Thresholds& thresholds) {
  constexpr int kBlock = 64 * kLanes;  // summed in fp32
  for (double& sum : thresholds.mass_above) sum = 0;
  for (int64_t first = 0; first < count; first += kBlock) {
    Vec16 sums[kThresholds] = {zero16(), zero16(), zero16(), zero16()};
    for_each16(static_cast<int>(count - first < kBlock ? count - first : kBlock), [&](int i, auto lanes) {
      Vec16 score = load_scores(scores + first + i, lanes), mass = load_upto16(masses + first + i, lanes);
      for (int k = 0; k < kThresholds; k++)
        sums[k] = sums[k] + where_above16(mass, score, splat16(thresholds.score[k]));
    });
    for (int k = 0; k < kThresholds; k++) thresholds.mass_above[k] += sum16(sums[k]);
  }
}

Collected collect(const float* scores, const float* masses, int64_t count, float low, float high, float* inside) {
  Collected found = {0, 0, 0};
  Vec16 bottom = splat16(low), top = splat16(high);
  ExactSum sum;
  for_each16(static_cast<int>(count), [&](int i, auto lanes) {
    Vec16 score = load_scores(scores + i, lanes);
    uint32_t above = above_mask16(score, top);
    found.above += __builtin_popcount(above);
    sum.add(where_above16(load_upto16(masses + i, lanes), score, top));
    found.inside += pack16(inside + found.inside, score, above_mask16(score, bottom) & ~above);
  });
  found.mass_above = sum.total();
  return found;
}

void take_nucleus(const HfpNucleusRow& row, int64_t width, int32_t* places, int64_t* ids, float* scores) {
  int64_t reaching = 0, taken = 0, surplus = row.surplus;
  Vec16 least = splat16(row.least);
  for_each16(row.kept > 0 ? static_cast<int>(row.count) : 0, [&](int i, auto lanes) {
    Vec16 score = load_scores(row.scores + i, lanes);
    reaching += pack16(places + reaching, i, above_mask16(score, least) | equal_mask16(score, least));
  });
  for (int64_t k = 0; k < reaching; k++) {
    int32_t place = places[k];
    float score = row.scores[place];
    if (surplus && score == row.least) {
      surplus--;
      continue;
    }
    ids[taken] = row.ids ? row.ids[place] : place;
    scores[taken++] = score;
  }
  for (; taken < width; taken++) {
    ids[taken] = 0;
    scores[taken] = -__builtin_inff();
  }
}

}  // namespace HFP_ISA
}  // namespace hfp
