// The matrix product with packed 4-bit weights. As in gemm_kernel.h, every element is one chain of operations in
// ascending k whatever the tile: the products of a group are added up, the sum is scaled and added to the total.
#pragma once
#include "strips_decode.h"

namespace hfp {
namespace HFP_ISA {

// The sums of a group and the totals of all groups both stay in registers, so tiles are smaller than for dense weights.
// Few rows take whole panels, so that a decoded weight costs little and memory is read in four streams.
#if defined(__AVX512F__)
template <class T>
constexpr TileShape kStripTile = {4, 2};
#if defined(__AVX512BF16__)
template <>
constexpr TileShape kStripTile<bf16> = {6, 2};
#endif
constexpr int kFewRows = 2;
#else
template <class T>
constexpr TileShape kStripTile = {2, 1};
constexpr int kFewRows = 0;
#endif

template <class T>
struct StripTileArgs {
  const Strip* strips;
  const Strip* ahead;  // as many strips, to be fetched meanwhile; null: none
  const T* input;      // first row of the tile
  int64_t input_stride;
  int groups, group_words;
};

template <class T, int Rows, int Vectors, int J>
inline void accumulate_pair(typename PairStep<T>::Words (&words)[Vectors], const typename PairStep<T>::Table& table,
                            const T* input, int64_t stride, Vec16 (&sums)[Rows][Vectors]) {
  using Step = PairStep<T>;
  typename Step::Weights weights[Vectors];
#pragma GCC unroll 4
  for (int v = 0; v < Vectors; v++) weights[v] = Step::template decode<J>(words[v], table);
#pragma GCC unroll 12
  for (int r = 0; r < Rows; r++) {
    typename Step::Input x = Step::broadcast(input + r * stride + 2 * J);
#pragma GCC unroll 4
    for (int v = 0; v < Vectors; v++) sums[r][v] = Step::accumulate(sums[r][v], x, weights[v]);
  }
}

template <class T, ScaleKind kScales, int Rows, int Vectors>
inline void strip_kernel(const StripTileArgs<T>& args, const typename PairStep<T>::Table& table, Tile& tile,
                         int first_vector) {
  using Step = PairStep<T>;
  Vec16 totals[Rows][Vectors];
#pragma GCC unroll 12
  for (int r = 0; r < Rows; r++)
#pragma GCC unroll 4
    for (int v = 0; v < Vectors; v++) totals[r][v] = zero16();
  const T* input = args.input;
  int64_t word = 0;
  for (int group = 0; group < args.groups; group++) {
    Vec16 sums[Rows][Vectors];
#pragma GCC unroll 12
    for (int r = 0; r < Rows; r++)
#pragma GCC unroll 4
      for (int v = 0; v < Vectors; v++) sums[r][v] = zero16();
    for (int i = 0; i < args.group_words; i++, word++, input += kWordCodes) {
      typename Step::Words words[Vectors];
#pragma GCC unroll 4
      for (int v = 0; v < Vectors; v++) {
        words[v] = Step::load(args.strips[v].codes + word * kStripColumns);
        if (args.ahead) __builtin_prefetch(args.ahead[v].codes + word * kStripColumns, 0, 2);
      }
      accumulate_pair<T, Rows, Vectors, 0>(words, table, input, args.input_stride, sums);
      accumulate_pair<T, Rows, Vectors, 1>(words, table, input, args.input_stride, sums);
      accumulate_pair<T, Rows, Vectors, 2>(words, table, input, args.input_stride, sums);
      accumulate_pair<T, Rows, Vectors, 3>(words, table, input, args.input_stride, sums);
    }
    int64_t offset = static_cast<int64_t>(group) * kStripColumns * bytes_of(kScales);
#pragma GCC unroll 4
    for (int v = 0; v < Vectors; v++) {
      Vec16 scale = load_scales<kScales>(args.strips[v].scales + offset);
      if (args.ahead) __builtin_prefetch(args.ahead[v].scales + offset, 0, 2);
#pragma GCC unroll 12
      for (int r = 0; r < Rows; r++) totals[r][v] = fma16(sums[r][v], scale, totals[r][v]);
    }
  }
#pragma GCC unroll 12
  for (int r = 0; r < Rows; r++)
#pragma GCC unroll 4
    for (int v = 0; v < Vectors; v++)
      tile[r][first_vector + v] = totals[r][v] * splat16(args.strips[v].multiplier);
}

template <class T, ScaleKind kScales, int Rows, int Vectors>
inline void strip_kernel_for_rows(int rows, const StripTileArgs<T>& args, const typename PairStep<T>::Table& table,
                                  Tile& tile, int first_vector) {
  if constexpr (Rows > 1) {
    if (rows < Rows)
      return strip_kernel_for_rows<T, kScales, Rows - 1, Vectors>(rows, args, table, tile, first_vector);
  }
  strip_kernel<T, kScales, Rows, Vectors>(args, table, tile, first_vector);
}

template <class T>
inline Units strip_units_of(int rows, int panels) {
  int tile_rows = kStripTile<T>.rows;
  int row_tiles = (rows + tile_rows - 1) / tile_rows;
  return {row_tiles, static_cast<int64_t>(panels) * row_tiles};
}

// Multiplies units [begin, end) and hands each tile of sums to epilogue(panel, first_row, rows, tile).
template <class T, ScaleKind kScales, class Epilogue>
void multiply_strips_scaled(const InputRows<T>& in, const StripWeight& weight, int panels, int64_t begin, int64_t end,
                            Epilogue& epilogue) {
  constexpr TileShape shape = kStripTile<T>;
  typename PairStep<T>::Table table(weight.codes);
  int row_tiles = strip_units_of<T>(in.count, panels).row_tiles;
  alignas(64) Tile tile;
  for (int64_t unit = begin; unit < end; unit++) {
    int panel = static_cast<int>(unit / row_tiles), row_tile = static_cast<int>(unit % row_tiles);
    int first = static_cast<int>(static_cast<int64_t>(in.count) * row_tile / row_tiles);
    int rows = static_cast<int>(static_cast<int64_t>(in.count) * (row_tile + 1) / row_tiles) - first;
    const Strip* strips = weight.strips + static_cast<int64_t>(panel) * kPanelVectors;
    const Strip* ahead = row_tile == 0 && panel + 1 < panels ? strips + kPanelVectors : nullptr;
    StripTileArgs<T> args = {strips, ahead, in.data + first * in.stride, in.stride, weight.groups, weight.group_words};
    if (rows <= kFewRows) {
      strip_kernel_for_rows<T, kScales, kFewRows ? kFewRows : 1, kPanelVectors>(rows, args, table, tile, 0);
    } else {
      for (int v = 0; v < kPanelVectors; v += shape.vectors) {
        args.strips = strips + v;
        args.ahead = ahead ? ahead + v : nullptr;
        strip_kernel_for_rows<T, kScales, shape.rows, shape.vectors>(rows, args, table, tile, v);
      }
    }
    epilogue(panel, first, rows, tile);
  }
}

template <class T, class Epilogue>
void multiply_strips(const InputRows<T>& in, const StripWeight& weight, int panels, int64_t begin, int64_t end,
                     Epilogue& epilogue) {
  switch (weight.scales) {
    case ScaleKind::kE4m3:
      return multiply_strips_scaled<T, ScaleKind::kE4m3>(in, weight, panels, begin, end, epilogue);
    case ScaleKind::kE8m0:
      return multiply_strips_scaled<T, ScaleKind::kE8m0>(in, weight, panels, begin, end, epilogue);
    case ScaleKind::kFp32:
      return multiply_strips_scaled<T, ScaleKind::kFp32>(in, weight, panels, begin, end, epilogue);
  }
}

}  // namespace HFP_ISA
}  // namespace hfp
