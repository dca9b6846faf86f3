// Stock sorts all scores, sums their fp32 softmax from the least likely token on, and drops tokens up to 1 - top_p.
// Which tokens stay is the same whoever sums, except for those so near the edge that rounding decides. So the edge is
// closed in on by thresholds until few tokens are left around it, and only these are sorted.
#include "nucleus.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <memory>
#include <new>

#include "nucleus_passes.h"
#include "score_threads.h"

namespace hfp {
namespace {

// How far a sum of stock's fp32 probabilities may be from exact, relative to it. The largest error seen is 5e-6, on
// vocabularies of up to 152,000 tokens.
constexpr double kTolerance = 2e-5;
// The same for sums of fp32 masses here. The largest error seen is 2e-8.
constexpr double kTotalTolerance = 2e-7;
// A row with more tokens than this of which rounding decides is left to the full stages.
constexpr int64_t kMostDoubtful = 8;
// So many tokens are copied to be looked at by themselves, and so many of these are sorted.
constexpr int64_t kFew = 4096, kSorted = 64;
constexpr int kMostPasses = 16;

// Tokens of neighbouring rank, all that are left to look at.
struct Part {
  const float *scores, *masses;
  int64_t count;
  int64_t likelier;   // tokens that are likelier than all of them
  double mass_above;  // of those
};

// The edge of the nucleus is above `low` and not above `high`.
struct Bracket {
  float low, high;
  double mass_low, mass_high;  // of the tokens above, roughly
};

// Elements of an array for a row's scores, into which whole vectors are written.
int64_t row_room(int64_t count) { return count + 16; }

// Closes in on the edge of one row, in memory for kArrays arrays of its scores.
class NucleusSearch {
 public:
  static constexpr int kArrays = 6;

  NucleusSearch(HfpNucleusRow& row, float* memory) : row_(row), memory_(memory) {}

  void run() {
    if (row_.top_p < 0) return keep_all();
    row_.kept = row_.surplus = row_.doubtful = 0;
    row_.least = 0;
    highest_ = HFP_PICK_VARIANT(highest_score)(row_.scores, row_.count);
    if (!std::isfinite(highest_)) return;
    float* masses = array(0);
    double sum = HFP_PICK_VARIANT(write_masses)(row_.scores, row_.count, highest_, masses);
    double total = row_.total > 0 ? row_.total : sum, rest = (1 - row_.top_p) * total;
    target_ = total - rest;
    tolerance_ = kTolerance * rest + kTotalTolerance * total;
    bracket_ = {-INFINITY, highest_, total, 0};
    Part part = {row_.scores, masses, row_.count, 0, 0};
    // So many tokens that do not exceed this have too little together to be in the nucleus; see also candidates.py.
    double least = (rest / 4 - 1e-6 * total) / double(row_.count);
    if (part.count > kSorted && !(least > 0)) return give_up();
    if (part.count > kSorted) bracket_.low = float(highest_ + std::log(least));
    part = narrowed(part, kFew, array(1), array(2));
    part = narrowed(part, kSorted, array(3), array(4));
    find_edge(part, array(5));
  }

 private:
  float* array(int index) const { return memory_ + index * row_room(row_.count); }
  void give_up() { row_.kept = -1; }

  void keep_all() {
    row_.least = std::numeric_limits<float>::lowest();
    row_.surplus = row_.doubtful = 0;
    row_.kept = int32_t(std::count_if(row_.scores, row_.scores + row_.count, [](float x) { return x > -INFINITY; }));
  }

  // The tokens in the bracket after it was made so narrow that there are no more than `most`, if it can be.
  Part narrowed(const Part& part, int64_t most, float* scores, float* masses) {
    if (part.count <= most) return part;
    for (int pass = 0; pass < kMostPasses && most_inside() > double(most); pass++) narrow(part);
    Collected found =
        HFP_PICK_VARIANT(collect)(part.scores, part.masses, part.count, bracket_.low, bracket_.high, scores);
    HFP_PICK_VARIANT(write_masses)(scores, found.inside, highest_, masses);
    return {scores, masses, found.inside, part.likelier + found.above, part.mass_above + found.mass_above};
  }

  // No more tokens can be in the bracket, each with at least the mass of its lower end.
  double most_inside() const { return (bracket_.mass_low - bracket_.mass_high) / std::exp(bracket_.low - highest_); }

  void narrow(const Part& part) {
    Thresholds thresholds;
    for (int k = 0; k < kThresholds; k++)
      thresholds.score[k] = bracket_.low + (bracket_.high - bracket_.low) * float(k + 1) / (kThresholds + 1);
    HFP_PICK_VARIANT(sum_above)(part.scores, part.masses, part.count, thresholds);
    for (int k = 0; k < kThresholds; k++) {
      double mass = part.mass_above + thresholds.mass_above[k];
      if (mass >= target_ + tolerance_) {
        bracket_.low = thresholds.score[k];
        bracket_.mass_low = mass;
      } else if (mass < target_ - tolerance_) {
        bracket_.high = thresholds.score[k];
        bracket_.mass_high = mass;
        return;
      }
    }
  }

  // A token stays if the likelier ones have less than the mass `target_`; the likeliest always does.
  void find_edge(const Part& part, float* scores) {
    auto collect = HFP_PICK_VARIANT(collect);
    Collected found = collect(part.scores, part.masses, part.count, bracket_.low, bracket_.high, scores);
    std::sort(scores, scores + found.inside, std::greater<float>());
    float* masses = array(0);
    HFP_PICK_VARIANT(write_masses)(scores, found.inside, highest_, masses);
    int64_t likelier = part.likelier + found.above, sure = 0, possible = 0;
    double above = part.mass_above + found.mass_above;
    for (; possible < found.inside && above < target_ + tolerance_; possible++) {
      if (above < target_ - tolerance_) sure++;
      above += masses[possible];
    }
    // The bracket was found by rough sums.
    bool is_above = sure == 0 && likelier > 0, is_below = bracket_.low > -INFINITY && above < target_ + tolerance_;
    if (is_above || is_below) return give_up();
    keep(scores, found.inside, likelier, std::max<int64_t>(likelier + possible, 1),
         std::max<int64_t>(likelier + sure, 1));
  }

  // Keeps the `kept` likeliest tokens, of which `sure` stay in any case. `scores` are those in the bracket, descending.
  void keep(const float* scores, int64_t count, int64_t likelier, int64_t kept, int64_t sure) {
    if (kept - sure > kMostDoubtful) return give_up();
    row_.kept = int32_t(kept);
    row_.doubtful = int32_t(kept - sure);
    row_.least = scores[kept - likelier - 1];
    const float* end = std::upper_bound(scores, scores + count, row_.least, std::greater<float>());
    row_.surplus = int32_t(end - scores - (kept - likelier));
  }

  HfpNucleusRow& row_;
  float* memory_;
  float highest_ = 0;
  double target_ = 0, tolerance_ = 0;
  Bracket bracket_ = {};
};

// Calls work(row index, memory) for all rows. The memory of a thread has room for `arrays` times the longest row.
template <class Element, class Work>
int for_each_row(const HfpNucleusRow* rows, int32_t num_rows, int arrays, int most_threads, Work&& work) {
  int64_t longest = 0, scores = 0;
  for (int32_t i = 0; i < num_rows; i++) {
    longest = std::max(longest, rows[i].count);
    scores += rows[i].count;
  }
  [[maybe_unused]] int threads = threads_for_scores(scores, most_threads);
  bool has_memory = true;
#pragma omp parallel num_threads(threads) if (threads > 1) reduction(&& : has_memory)
  {
    std::unique_ptr<Element[]> memory(new (std::nothrow) Element[arrays * row_room(longest)]);
    has_memory = memory != nullptr;
#pragma omp for schedule(dynamic, 1)
    for (int32_t i = 0; i < num_rows; i++)
      if (memory) work(i, memory.get());
  }
  return has_memory ? HFP_OK : HFP_OUT_OF_MEMORY;
}

}  // namespace
}  // namespace hfp

int hfp_nucleus(HfpNucleusRow* rows, int32_t num_rows, int num_threads) {
  return hfp::for_each_row<float>(rows, num_rows, hfp::NucleusSearch::kArrays, num_threads,
                                  [&](int32_t i, float* memory) { hfp::NucleusSearch(rows[i], memory).run(); });
}

int hfp_nucleus_take(const HfpNucleusRow* rows, int32_t num_rows, int64_t width, int64_t* ids, float* scores,
                     int num_threads) {
  auto take = HFP_PICK_VARIANT(take_nucleus);
  return hfp::for_each_row<int32_t>(rows, num_rows, 1, num_threads, [&](int32_t i, int32_t* memory) {
    take(rows[i], width, memory, ids + i * width, scores + i * width);
  });
}
