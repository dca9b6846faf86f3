// What happens to a tile of sums before it leaves the registers and the first-level cache.
#pragma once
#include "strips_multiply.h"
#include "ops_math.h"
#include "program.h"

namespace hfp {
namespace HFP_ISA {

inline Vec16 activate16(Activation activation, Vec16 x) {
  switch (activation) {
    case Activation::kSilu: return silu16(x);
    case Activation::kGeluErf: return gelu_erf16(x);
    case Activation::kGeluTanh: return gelu_tanh16(x);
    case Activation::kRelu: return max16(x, zero16());
    default: return x;
  }
}

// round(sum + bias): the output of a linear module. `column` counts packed columns.
template <class T>
inline Vec16 linear_output(Vec16 sum, const PackedWeight& weight, int column) {
  return rounded16<T>(weight.bias ? sum + load16(weight.bias + column) : sum);
}

template <class T>
struct OutputRows {
  T* data;
  int64_t stride;
  int width;

  T* row(int index) const { return data + index * stride; }
  // Columns of the 16 starting at `column` that exist.
  int count_at(int column) const { return width - column < kLanes ? width - column : kLanes; }
};

template <class T>
struct StoreEpilogue {
  const PackedWeight& weight;
  OutputRows<T> out;
  Activation activation;

  void operator()(int panel, int first_row, int rows, Tile& tile) const {
    for (int r = 0; r < rows; r++) {
      T* row = out.row(first_row + r);
      for (int v = 0; v < kPanelVectors; v++) {
        int column = panel * kPanelColumns + v * kLanes, count = out.count_at(column);
        if (count <= 0) break;
        store_upto16(row + column, activate16(activation, linear_output<T>(tile[r][v], weight, column)), count);
      }
    }
  }
};

template <class T>
struct GatedEpilogue {
  const PackedWeight& weight;
  OutputRows<T> out;
  Activation activation;

  void operator()(int panel, int first_row, int rows, Tile& tile) const {
    constexpr int kGateVectors = kPanelVectors / 2;
    for (int r = 0; r < rows; r++) {
      T* row = out.row(first_row + r);
      for (int v = 0; v < kGateVectors; v++) {
        int packed = panel * kPanelColumns + v * kLanes;
        int column = panel * (kPanelColumns / 2) + v * kLanes, count = out.count_at(column);
        if (count <= 0) break;
        Vec16 gate = linear_output<T>(tile[r][v], weight, packed);
        Vec16 up = linear_output<T>(tile[r][v + kGateVectors], weight, packed + kPanelColumns / 2);
        store_upto16(row + column, rounded16<T>(activate16(activation, gate)) * up, count);
      }
    }
  }
};

// The result of an expert, weighted for the token of each row.
template <class T>
struct WeightedEpilogue {
  const PackedWeight& weight;
  OutputRows<T> out;
  const float* row_weights;

  void operator()(int panel, int first_row, int rows, Tile& tile) const {
    for (int r = 0; r < rows; r++) {
      T* row = out.row(first_row + r);
      Vec16 factor = splat16(row_weights[first_row + r]);
      for (int v = 0; v < kPanelVectors; v++) {
        int column = panel * kPanelColumns + v * kLanes, count = out.count_at(column);
        if (count <= 0) break;
        store_upto16(row + column, linear_output<T>(tile[r][v], weight, column) * factor, count);
      }
    }
  }
};

template <class T>
struct ResidualEpilogue {
  const PackedWeight& weight;
  OutputRows<T> out;
  float multiplier;
  OutputRows<const T> other;  // data null: none

  void operator()(int panel, int first_row, int rows, Tile& tile) const {
    for (int r = 0; r < rows; r++) {
      T* row = out.row(first_row + r);
      for (int v = 0; v < kPanelVectors; v++) {
        int column = panel * kPanelColumns + v * kLanes, count = out.count_at(column);
        if (count <= 0) break;
        Vec16 branch = linear_output<T>(tile[r][v], weight, column);
        if (multiplier != 1.f) branch = rounded16<T>(branch * splat16(multiplier));
        if (other.data) branch = rounded16<T>(branch + load_upto16(other.row(first_row + r) + column, count));
        store_upto16(row + column, load_upto16(row + column, count) + branch, count);
      }
    }
  }
};

// Logits as the model returns them, from the output of its last linear module.
template <class T>
inline Vec16 scaled_logits(Vec16 logit, const HeadOp& op) {
  if (op.multiplier != 1.f) logit = rounded16<T>(logit * splat16(op.multiplier));
  if (op.divisor != 1.f) logit = rounded16<T>(logit / splat16(op.divisor));
  if (op.softcap != 0.f) {
    Vec16 cap = splat16(op.softcap);
    logit = rounded16<T>(rounded16<T>(tanh16(rounded16<T>(logit / cap))) * cap);
  }
  return logit;
}

// The same of 16 columns from their sums.
template <class T>
inline Vec16 finished_logits(Vec16 sum, const HeadOp& op, int column) {
  return scaled_logits<T>(linear_output<T>(sum, op.weight, column), op);
}

// -inf in the lanes from `count` on.
inline Vec16 hidden_from(Vec16 values, int count) {
  alignas(64) float lanes[kLanes];
  store16(lanes, values);
  for (int lane = count; lane < kLanes; lane++) lanes[lane] = -__builtin_inff();
  return load16(lanes);
}

// Keeps the largest logit of each row and its first index, in whatever order the panels come.
template <class T>
struct HeadEpilogue {
  const HeadOp& op;
  float* best;         // [samples]
  int64_t* best_index;
  float* logits;       // [samples, vocab], or null

  // For the sampled rows from `row` on; only without logits.
  HeadEpilogue from_row(int row) const { return {op, best + row, best_index + row, nullptr}; }

  void operator()(int panel, int first_row, int rows, Tile& tile) const {
    int first_column = panel * kPanelColumns;
    for (int r = 0; r < rows; r++) {
      int64_t row = first_row + r;
      Vec16 values[kPanelVectors];
      for (int v = 0; v < kPanelVectors; v++) {
        int column = first_column + v * kLanes, count = op.vocab - column < kLanes ? op.vocab - column : kLanes;
        values[v] = count <= 0 ? splat16(-__builtin_inff()) : finished_logits<T>(tile[r][v], op, column);
        if (logits && count > 0) store_upto16(logits + row * op.vocab + column, values[v], count);
        if (count > 0 && count < kLanes) values[v] = hidden_from(values[v], count);
      }
      keep_best(row, first_column, values);
    }
  }

 private:
  void keep_best(int64_t row, int first_column, const Vec16 (&values)[kPanelVectors]) const {
    float largest = largest16(max16(max16(values[0], values[1]), max16(values[2], values[3])));
    bool is_later = largest == best[row] && first_column >= best_index[row];
    if (!(largest >= best[row]) || is_later) return;
    best[row] = largest;
    int v = 0;
    while (!equal_mask16(values[v], splat16(largest))) v++;
    best_index[row] = first_column + v * kLanes + __builtin_ctz(equal_mask16(values[v], splat16(largest)));
  }
};

}  // namespace HFP_ISA
}  // namespace hfp
