// The matrix product with packed 4-bit weights: which tiles it is cut into. What computes a tile is in strips_kernel.h,
// compiled once (strips_linear.isa.cpp) for all that multiply.
#pragma once
#include "gemm_kernel.h"
#include "strips.h"

namespace hfp {
namespace HFP_ISA {

// Most rows of a tile. Some sums then wait in memory, which costs less than decoding for fewer rows.
#if defined(__AVX512F__)
template <class T>
constexpr int kManyRows = 12;
template <>
constexpr int kManyRows<float> = 6;
#if defined(__AVX512BF16__)
template <>
constexpr int kManyRows<bf16> = 16;
#endif
#elif defined(__AVX2__)
template <class T>
constexpr int kManyRows = 4;
#else
template <class T>
constexpr int kManyRows = 2;
#endif

template <class T>
struct StripTileArgs {
  const Strip* strips;
  const Strip* ahead;  // as many strips, to be fetched meanwhile; null: none
  const T* input;      // first row of the tile
  int64_t input_stride;
  int groups, group_words;
  CodeKind codes;
};

// The sums of `rows` rows and one panel.
template <class T, ScaleKind kScales>
void strip_tile(int rows, StripTileArgs<T> args, Tile& tile);

template <class T>
inline Units strip_units_of(int rows, int panels) {
  int row_tiles = (rows + kManyRows<T> - 1) / kManyRows<T>;
  return {row_tiles, static_cast<int64_t>(panels) * row_tiles};
}

// Multiplies units [begin, end) and hands each tile of sums to epilogue(panel, first_row, rows, tile). With a panel the
// one behind it is fetched, with the last one the strips at `next` unless that is null.
template <class T, ScaleKind kScales, class Epilogue>
void multiply_strips_scaled(const InputRows<T>& in, const StripWeight& weight, int panels, int64_t begin, int64_t end,
                            const Strip* next, Epilogue& epilogue) {
  int row_tiles = strip_units_of<T>(in.count, panels).row_tiles;
  alignas(64) Tile tile;
  for (int64_t unit = begin; unit < end; unit++) {
    int panel = static_cast<int>(unit / row_tiles), row_tile = static_cast<int>(unit % row_tiles);
    int first = static_cast<int>(static_cast<int64_t>(in.count) * row_tile / row_tiles);
    int rows = static_cast<int>(static_cast<int64_t>(in.count) * (row_tile + 1) / row_tiles) - first;
    const Strip* strips = weight.strips + static_cast<int64_t>(panel) * kPanelVectors;
    bool is_last = static_cast<int64_t>(panel + 1) * row_tiles >= end;
    const Strip* following = panel + 1 < panels ? strips + kPanelVectors : nullptr;
    const Strip* ahead = row_tile > 0 ? nullptr : is_last && next ? next : following;
    const T* input = in.data + first * in.stride;
    strip_tile<T, kScales>(
        rows, {strips, ahead, input, in.stride, weight.groups, weight.group_words, weight.codes}, tile);
    epilogue(panel, first, rows, tile);
  }
}

template <class T, class Epilogue>
void multiply_strips(const InputRows<T>& in, const StripWeight& weight, int panels, int64_t begin, int64_t end,
                     const Strip* next, Epilogue& epilogue) {
  switch (weight.scales) {
    case ScaleKind::kE4m3:
      return multiply_strips_scaled<T, ScaleKind::kE4m3>(in, weight, panels, begin, end, next, epilogue);
    case ScaleKind::kE8m0:
      return multiply_strips_scaled<T, ScaleKind::kE8m0>(in, weight, panels, begin, end, next, epilogue);
    case ScaleKind::kFp32:
      return multiply_strips_scaled<T, ScaleKind::kFp32>(in, weight, panels, begin, end, next, epilogue);
  }
}

}  // namespace HFP_ISA
}  // namespace hfp
