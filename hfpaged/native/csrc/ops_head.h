// The head of one row or a few whose largest logit is wanted: all panels through the screen, what it leaves exactly.
#pragma once
#include "head_screen.h"
#include "ops_epilogue.h"
#include "ops_norm.h"

namespace hfp {
namespace HFP_ISA {

inline WordPair broadcast_pair(const float* pair) { return {splat16(pair[0]), splat16(pair[1])}; }
template <class Half>
inline WordPair broadcast_pair(const Half* pair) {
  return broadcast_word(reinterpret_cast<const uint32_t*>(pair), Half{});
}

// Products of the codes of one panel with `Rows` rows. The next panel is fetched meanwhile.
template <class T, int Rows>
inline void multiply_codes(const int8_t* codes, int pairs, const InputRows<T>& in,
                           Vec16 (&sums)[Rows][kPanelVectors]) {
#pragma GCC unroll 4
  for (int r = 0; r < Rows; r++)
#pragma GCC unroll 4
    for (int v = 0; v < kPanelVectors; v++) sums[r][v] = zero16();
  const int8_t* ahead = codes + static_cast<int64_t>(pairs) * 2 * kPanelColumns;
  for (int i = 0; i < pairs; i++, codes += 2 * kPanelColumns, ahead += 2 * kPanelColumns) {
    __builtin_prefetch(ahead, 0, 2);
    __builtin_prefetch(ahead + kPanelColumns, 0, 2);
    WordPair weights[kPanelVectors];
#pragma GCC unroll 4
    for (int v = 0; v < kPanelVectors; v++)
      weights[v] = {load16(codes + v * kLanes), load16(codes + kPanelColumns + v * kLanes)};
#pragma GCC unroll 4
    for (int r = 0; r < Rows; r++) {
      WordPair x = broadcast_pair(in.data + r * in.stride + 2 * i);
#pragma GCC unroll 4
      for (int v = 0; v < kPanelVectors; v++)
        sums[r][v] = fma16(x.odd, weights[v].odd, fma16(x.even, weights[v].even, sums[r][v]));
    }
  }
}

template <class T>
class ScreenedHead {
 public:
  ScreenedHead(const HeadOp& op, const InputRows<T>& in) : op_(op), in_(in) {
    auto square = [](Vec16 x) { return x * x; };
    for (int r = 0; r < in.count; r++)
      lengths_[r] = sqrtf(sum_over(in.data + r * in.stride, 2 * op.screen.pairs, square));
  }

  // Not for rows with numbers that are none, whose logits have to come out as such, nor for rows of zeros.
  bool can_bound() const {
    for (int r = 0; r < in_.count; r++)
      if (!(lengths_[r] > 0.f && lengths_[r] < __builtin_inff())) return false;
    return true;
  }

  // Bounds of panels [begin, end), and the least that their largest logits are.
  void bound(int64_t begin, int64_t end, float* most, float* least) const {
    bound_rows<kScreenRows>(begin, end, most, least);
  }

  // Multiplies the panels of [begin, end) that may hold a logit of at least `least`.
  void multiply_rest(int64_t begin, int64_t end, const float* most, const float* least,
                     HeadEpilogue<T>& epilogue) const {
    int row_tiles = units_of<T>(in_.count, op_.weight).row_tiles;
    for (int64_t panel = begin; panel < end; panel++) {
      if (!may_win(most + panel * kScreenRows, least)) continue;
      // Nothing is fetched ahead but what is there already: the next panel is rarely the next one wanted.
      multiply<T>(in_, op_.weight, panel * row_tiles, (panel + 1) * row_tiles, op_.weight.panel(panel), epilogue);
    }
  }

 private:
  // Of the same logit as the exact product rounds it: what comes behind the sums keeps their order.
  template <int Rows>
  void bound_rows(int64_t begin, int64_t end, float* most, float* least) const {
    if constexpr (Rows > 1) {
      if (in_.count < Rows) return bound_rows<Rows - 1>(begin, end, most, least);
    }
    Vec16 lowest[Rows];
    for (int r = 0; r < Rows; r++) lowest[r] = splat16(-__builtin_inff());
    for (int64_t panel = begin; panel < end; panel++) {
      Vec16 sums[Rows][kPanelVectors];
      multiply_codes<T, Rows>(op_.screen.panel(panel), op_.screen.pairs, in_, sums);
      for (int r = 0; r < Rows; r++) {
        Vec16 upper = bound_panel(panel, sums[r], lengths_[r], lowest[r]);
        most[panel * kScreenRows + r] = largest16(upper);
      }
    }
    for (int r = 0; r < Rows; r++) least[r] = largest16(lowest[r]);
  }

  // Raises `lowest` to the lower bounds of a panel's logits. Returns the largest of the upper ones, lane by lane.
  Vec16 bound_panel(int64_t panel, const Vec16 (&sums)[kPanelVectors], float length, Vec16& lowest) const {
    constexpr float kFlushed = 1e-30f;  // more than the products of numbers that are taken for zero add up to
    Vec16 highest = splat16(-__builtin_inff());
    for (int v = 0; v < kPanelVectors; v++) {
      int column = static_cast<int>(panel) * kPanelColumns + v * kLanes, count = op_.vocab - column;
      if (count <= 0) break;
      Vec16 sum = sums[v] * load16(op_.screen.scales + column);
      Vec16 margin = fma16(splat16(length), load16(op_.screen.errors + column), splat16(kFlushed));
      Vec16 lower = finished_logits<T>(sum - margin, op_, column), upper = finished_logits<T>(sum + margin, op_, column);
      lowest = max16(lowest, count < kLanes ? hidden_from(lower, count) : lower);
      highest = max16(highest, upper);
    }
    return highest;
  }

  bool may_win(const float* most, const float* least) const {
    for (int r = 0; r < in_.count; r++)
      if (!(most[r] < least[r])) return true;
    return false;
  }

  const HeadOp& op_;
  const InputRows<T>& in_;
  float lengths_[kScreenRows];
};

}  // namespace HFP_ISA
}  // namespace hfp
