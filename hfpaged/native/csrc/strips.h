// Packed 4-bit weights of the matrix product  out[M, N] = in[M, K] * weight[N, K]^T.
//
// A strip holds 16 rows of the weight (16 columns of the product). Its unit is a word of 32 bits for each column: the
// codes of eight neighbouring k, those of even k in the low half, of odd k in the high half, each half from the lowest
// four bits up. Shifting all halves by 4 * j then brings the pair (2j, 2j + 1) into place for a table lookup. Beside the
// codes, one scale for each column and group of k:
//   weight[n, k] = value[code] * scale[n, group of k] * multiplier
// hfpaged/quantization/strips.py writes this layout.
#pragma once
#include <cstdint>

#include "abi.h"
#include "gemm.h"

namespace hfp {

constexpr int kStripColumns = 16;
constexpr int kWordCodes = 8;

enum class CodeKind : int32_t { kE2m1 = 0, kInt4 = 1 };
enum class ScaleKind : int32_t { kE4m3 = 0, kE8m0 = 1, kFp32 = 2 };

HFP_ALWAYS_INLINE constexpr int bytes_of(ScaleKind kind) { return kind == ScaleKind::kFp32 ? 4 : 1; }

struct Strip {
  const uint32_t* codes;  // [K / 8][16], 64-byte aligned
  const uint8_t* scales;  // [groups][16] of the scale's type
  float multiplier;       // of all scales
};

// Strips in the order of packed columns: four of them are one panel (gemm.h). Missing ones of the last panel repeat
// others; nobody looks at those columns.
struct StripWeight {
  const Strip* strips;
  CodeKind codes;
  ScaleKind scales;
  int32_t group_words;  // words of a group: its size / 8
  int32_t groups;       // along K
};

// NVFP4 has groups of 16 and MXFP4 of 32, which the kernels take for granted; int4 has any multiple of a word.
inline bool has_known_groups(const StripWeight& weight) {
  switch (weight.scales) {
    case ScaleKind::kE4m3: return weight.group_words == 2;
    case ScaleKind::kE8m0: return weight.group_words == 4;
    default: return weight.group_words >= 1;
  }
}

}  // namespace hfp

// One linear layer by itself: out[m, n] = round(sum + bias[n]).
struct HfpStripsArgs {
  hfp::StripWeight weight;
  const float* bias;  // [N], or null
  const void* input;  // [M] rows, input_stride elements apart
  void* output;       // [M] rows, output_stride elements apart
  int64_t input_stride, output_stride;
  int64_t rows;
  int32_t columns;  // N
  int32_t dtype;    // of input and output, an HfpDtype
  int32_t threads;
};
