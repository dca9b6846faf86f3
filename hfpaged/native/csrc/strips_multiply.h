// The matrix product with packed 4-bit weights: which tiles it is cut into. What computes a tile is in strips_kernel.h,
// compiled once (strips_linear.isa.cpp) for all that multiply.
#pragma once
#include "gemm_kernel.h"
#include "panel_memory.h"
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

// Whether decoded weights have their scales in them, and so are those of a dense panel.
template <class T, ScaleKind kScales>
constexpr bool kUnpacks = false;
#if defined(__AVX512BF16__)
template <>
constexpr bool kUnpacks<bf16, ScaleKind::kE4m3> = true;
template <>
constexpr bool kUnpacks<bf16, ScaleKind::kE8m0> = true;
#endif
// Then, from so many rows on, a panel is unpacked once for all its tiles, which are those of dense weights. With fewer,
// unpacking costs more than decoding for every tile anew.
constexpr int kUnpackFrom = 128;

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

// Writes a panel of four strips in the layout of dense weights (gemm.h), but for the multipliers.
template <class T, ScaleKind kScales>
void unpack_panel(const StripTileArgs<T>& args, uint32_t* words);

template <class T>
inline bool unpacks(int rows, ScaleKind scales) {
  if (rows < kUnpackFrom) return false;
  return scales == ScaleKind::kE4m3   ? kUnpacks<T, ScaleKind::kE4m3>
         : scales == ScaleKind::kE8m0 ? kUnpacks<T, ScaleKind::kE8m0>
                                      : kUnpacks<T, ScaleKind::kFp32>;
}

template <class T>
inline Units strip_units_of(int rows, const StripWeight& weight, int panels) {
  int row_tiles = tiles_of_rows(rows, unpacks<T>(rows, weight.scales) ? kWideTile<T>.rows : kManyRows<T>);
  return {row_tiles, static_cast<int64_t>(panels) * row_tiles};
}

// Computes the tiles of a product, those of a panel one after the other.
template <class T, ScaleKind kScales>
class StripTiles {
 public:
  StripTiles(int rows, const StripWeight& weight)
      : depth_(weight.groups * weight.group_words * kWordCodes / kPerWord),
        words_(unpacks<T>(rows, kScales) ? panel_memory(static_cast<int64_t>(depth_) * kPanelColumns) : nullptr) {}

  // The sums of `rows` rows and one panel.
  void compute(int rows, const StripTileArgs<T>& args, Tile& tile) {
    if constexpr (kUnpacks<T, kScales>) {
      if (words_) return compute_unpacked(rows, args, tile);
    }
    strip_tile<T, kScales>(rows, args, tile);
  }

 private:
  static constexpr int kPerWord = 4 / sizeof(T);

  void compute_unpacked(int rows, const StripTileArgs<T>& args, Tile& tile) {
    if (args.strips != unpacked_) unpack_panel<T, kScales>(args, words_);
    unpacked_ = args.strips;
    KernelArgs dense = {reinterpret_cast<const uint32_t*>(args.input), args.input_stride / kPerWord, words_, depth_,
                        nullptr};
    kernel_with_prefetch<T, kWideTile<T>.rows, kPanelVectors>(rows, 0, dense, tile, 0);
    for (int r = 0; r < rows; r++)
      for (int v = 0; v < kPanelVectors; v++) tile[r][v] = tile[r][v] * splat16(args.strips[v].multiplier);
  }

  int depth_;        // of a panel, in words
  uint32_t* words_;  // of the panel at `unpacked_`; null: panels are not unpacked
  const Strip* unpacked_ = nullptr;
};

// Multiplies units [begin, end) and hands each tile of sums to epilogue(panel, first_row, rows, tile). With a panel the
// one behind it is fetched, with the last one the strips at `next` unless that is null.
template <class T, ScaleKind kScales, class Epilogue>
void multiply_strips_scaled(const InputRows<T>& in, const StripWeight& weight, int panels, int64_t begin, int64_t end,
                            const Strip* next, Epilogue& epilogue) {
  int row_tiles = strip_units_of<T>(in.count, weight, panels).row_tiles;
  StripTiles<T, kScales> tiles(in.count, weight);
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
    tiles.compute(rows, {strips, ahead, input, in.stride, weight.groups, weight.group_words, weight.codes}, tile);
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
