// Packed weights of the matrix product  out[M, N] = in[M, K] * weight[N, K]^T.
//
// A panel holds 64 rows of the weight (64 columns of the product). Its unit is the depth step: 64 words of 32 bits,
// one per column, so 256 bytes. A word is one fp32 number, or two bf16 or fp16 numbers of neighbouring k (the operand
// of vdpbf16ps). Columns past N and the odd k past K are zero.
#pragma once
#include <cstdint>

#include "abi.h"

namespace hfp {

constexpr int kPanelColumns = 64;
constexpr int kStepBytes = kPanelColumns * 4;

struct Strip;  // both in strips.h
struct StripWeight;

struct PackedWeight {
  const char* panels;         // [panel_count][depth][64] words, 64-byte aligned; null with strips
  const StripWeight* strips;  // the weight in 4 bits instead; null: dense
  const float* bias;          // [panel_count * 64], in the order of the packed columns; null without bias
  int columns;                // N
  int depth;                  // steps per panel: K for fp32, (K + 1) / 2 for 16-bit types

  HFP_ALWAYS_INLINE int panel_count() const { return (columns + kPanelColumns - 1) / kPanelColumns; }
  HFP_ALWAYS_INLINE int64_t panel_bytes() const { return static_cast<int64_t>(depth) * kStepBytes; }
  HFP_ALWAYS_INLINE const char* panel(int64_t index) const { return panels + index * panel_bytes(); }
};

// The part of a piece of work that one of `count` threads does.
struct Share {
  int index, count;

  HFP_ALWAYS_INLINE int64_t begin(int64_t total) const { return total * index / count; }
  HFP_ALWAYS_INLINE int64_t end(int64_t total) const { return total * (index + 1) / count; }
};

}  // namespace hfp
