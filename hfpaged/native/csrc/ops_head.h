// The head of rows whose largest logit is wanted: all panels through the screen, what it leaves exactly.
#pragma once
#include "ops_epilogue.h"
#include "screen_rows.h"

namespace hfp {
namespace HFP_ISA {

// Rows beyond which the exact product is as fast.
#if defined(__AVX512VNNI__)
constexpr int64_t kScreenRows = INT32_MAX;
#else
constexpr int64_t kScreenRows = 4;
#endif

// Raises a number that several threads raise. Which of them reads which value when decides about work, not results.
inline void raise(float* value, float to) {
  float now;
  __atomic_load(value, &now, __ATOMIC_RELAXED);
  while (now < to && !__atomic_compare_exchange(value, &now, &to, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) continue;
}

inline float value_now(const float* value) {
  float now;
  __atomic_load(value, &now, __ATOMIC_RELAXED);
  return now;
}

// Bounds the logits of tiles of coarse products. Rows whose bound in a panel exceeds what their largest logit is known to
// be get the products of their fine digits as well.
template <class T>
class ScreenEpilogue {
 public:
  ScreenEpilogue(const HeadOp& op, const ScreenWork& work, int64_t samples) : op_(op), work_(work), samples_(samples) {}

  void operator()(int panel, int first_row, int rows, Tile& tile) const {
    for (int r = 0; r < rows; r++) work_.most[panel * samples_ + first_row + r] = most_of(panel, first_row + r, tile[r]);
  }

 private:
  float most_of(int panel, int64_t index, Vec16 (&sums)[kPanelVectors]) const {
    const ScreenRow& row = work_.rows[index];
    if (!(row.length < __builtin_inff())) return __builtin_inff();
    float* least = work_.least + index;
    add_outliers(panel, row, sums);
    if (most_within(panel, row, sums, row.coarse_rest) < value_now(least)) return -__builtin_inff();
    add_fine_digits(panel, index, sums);
    float most = most_within(panel, row, sums, row.fine_rest);
    // Beside a number that is none the exact product may miss a larger one.
    if (most < __builtin_inff()) raise(least, least_within(panel, row, sums, row.fine_rest));
    return most;
  }

  // Completes the coarse sums, as fp32 numbers in units of both scales.
  void add_outliers(int panel, const ScreenRow& row, Vec16 (&sums)[kPanelVectors]) const {
    Vec16 outliers[kPanelVectors] = {zero16(), zero16(), zero16(), zero16()};
    for (int i = 0; i < row.outliers; i++) {
      const uint32_t* words = op_.screen.panel(panel) + row.quads[i] * kPanelColumns;
      typename DepthStep<Digit>::Input x = DepthStep<Digit>::broadcast(reinterpret_cast<const uint32_t*>(row.digits[i]));
#pragma GCC unroll 4
      for (int v = 0; v < kPanelVectors; v++)
        outliers[v] = DepthStep<Digit>::accumulate(outliers[v], x, DepthStep<Digit>::load(words + v * kLanes));
    }
#pragma GCC unroll 4
    for (int v = 0; v < kPanelVectors; v++) sums[v] = combined_sums16(sums[v], outliers[v], row.coarse_offset);
  }

  void add_fine_digits(int panel, int64_t index, Vec16 (&sums)[kPanelVectors]) const {
    const ScreenRow& row = work_.rows[index];
    KernelArgs args = {};
    args.input = reinterpret_cast<const uint32_t*>(work_.fine + index * work_.stride);
    args.depth = op_.screen.quads;
    Tile tile;
    for (int v = 0; v < kPanelVectors; v += kWideTile<Digit>.vectors) {
      args.weights = op_.screen.panel(panel) + v * kLanes;
      kernel<Digit, 1, kWideTile<Digit>.vectors, 0>(args, tile, v);
    }
    Vec16 scale = splat16(1.f / kFineSteps);
    for (int v = 0; v < kPanelVectors; v++)
      sums[v] = fma16(combined_sums16(tile[0][v], zero16(), row.fine_offset), scale, sums[v]);
  }

  // What the sums of a row are worth, and by how much the products of its input may differ from that.
  struct Estimate {
    Vec16 sum, margin;
  };
  Estimate estimate(int column, const ScreenRow& row, Vec16 sum, float rest) const {
    constexpr float kFlushed = 1e-30f;  // more than the products of numbers that are taken for zero add up to
    Vec16 margin = fma16(splat16(rest), load16(op_.screen.lengths + column), splat16(kFlushed));
    return {sum * (load16(op_.screen.scales + column) * splat16(row.scale)),
            fma16(splat16(row.length), load16(op_.screen.errors + column), margin)};
  }

  // The largest logit that the row may have in the panel, rounded as by the exact product: what comes behind the sums
  // keeps their order. Columns that only fill the panel may be in it.
  float most_within(int panel, const ScreenRow& row, const Vec16 (&sums)[kPanelVectors], float rest) const {
    Vec16 most = splat16(-__builtin_inff());
#pragma GCC unroll 4
    for (int v = 0; v < kPanelVectors; v++) {
      int column = panel * kPanelColumns + v * kLanes;
      Estimate of = estimate(column, row, sums[v], rest);
      Vec16 sum = of.sum + of.margin;
      most = max16(most, op_.weight.bias ? sum + load16(op_.weight.bias + column) : sum);
    }
    return largest16(scaled_logits<T>(rounded16<T>(most), op_));
  }

  // What the largest one is at least.
  float least_within(int panel, const ScreenRow& row, const Vec16 (&sums)[kPanelVectors], float rest) const {
    Vec16 least = splat16(-__builtin_inff());
    for (int v = 0; v < kPanelVectors; v++) {
      int column = panel * kPanelColumns + v * kLanes, count = op_.vocab - column;
      if (count <= 0) break;
      Estimate of = estimate(column, row, sums[v], rest);
      Vec16 logits = finished_logits<T>(of.sum - of.margin, op_, column);
      least = max16(least, count < kLanes ? hidden_from(logits, count) : logits);
    }
    return largest16(least);
  }

  const HeadOp& op_;
  const ScreenWork& work_;
  int64_t samples_;
};

template <class T>
class ScreenedHead {
 public:
  ScreenedHead(const HeadOp& op, const InputRows<T>& in, ScreenWork& work) : op_(op), in_(in), work_(work) {}

  static Units units(const HeadOp& op, int64_t samples) {
    return units_of<Digit>(static_cast<int>(samples), op.screen.as_weight());
  }

  // First: the digits of each thread's share of the rows.
  void write_rows(Share share) {
    if (share.index == 0) work_.next_panel = 0;
    int size = op_.weight.depth * static_cast<int>(4 / sizeof(T));
    for (int64_t r = share.begin(in_.count); r < share.end(in_.count); r++) {
      work_.least[r] = -__builtin_inff();
      write_screen_row(in_.data + r * in_.stride, size, work_.rows[r], work_.coarse + r * work_.stride,
                       work_.fine + r * work_.stride);
    }
  }

  // Second: bounds of the units [begin, end) of all threads.
  void bound(int64_t begin, int64_t end) const {
    InputRows<Digit> digits = {reinterpret_cast<const Digit*>(work_.coarse), work_.stride, in_.count};
    ScreenEpilogue<T> epilogue(op_, work_, in_.count);
    multiply<Digit>(digits, op_.screen.as_weight(), begin, end, nullptr, epilogue);
  }

  // Third: multiplies the rows and panels that may hold the largest logit, until no panel is left to any thread.
  void multiply_rest(const HeadEpilogue<T>& epilogue) {
    constexpr int kPanelsAtOnce = 4;
    int panels = op_.weight.panel_count();
    for (;;) {
      int first = __atomic_fetch_add(&work_.next_panel, kPanelsAtOnce, __ATOMIC_RELAXED);
      if (first >= panels) return;
      for (int panel = first; panel < first + kPanelsAtOnce && panel < panels; panel++) multiply_panel(panel, epilogue);
    }
  }

 private:
  bool may_win(int panel, int row) const {
    return !(work_.most[int64_t(panel) * in_.count + row] < value_now(work_.least + row));
  }

  // Neighbouring rows together.
  void multiply_panel(int panel, const HeadEpilogue<T>& epilogue) const {
    for (int row = 0; row < in_.count; row++) {
      int first = row;
      while (row < in_.count && may_win(panel, row)) row++;
      if (row > first) multiply_rows(panel, first, row, epilogue);
    }
  }

  void multiply_rows(int panel, int first, int end, const HeadEpilogue<T>& epilogue) const {
    InputRows<T> rows = {in_.data + first * in_.stride, in_.stride, end - first};
    int row_tiles = units_of<T>(rows.count, op_.weight).row_tiles;
    // Nothing is fetched ahead but what is there already: the next panel is rarely the next one wanted.
    multiply<T>(rows, op_.weight, int64_t(panel) * row_tiles, int64_t(panel + 1) * row_tiles, op_.weight.panel(panel),
                epilogue.from_row(first));
    for (int row = first; row < end; row++) raise(work_.least + row, epilogue.best[row]);
  }

  const HeadOp& op_;
  const InputRows<T>& in_;
  ScreenWork& work_;
};

}  // namespace HFP_ISA
}  // namespace hfp
