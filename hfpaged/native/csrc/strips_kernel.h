// One tile of the matrix product with packed 4-bit weights. As in gemm_kernel.h, every element is one chain of operations
// in ascending k whatever the tile: the products of a group are added up, the sum is scaled and added to the total.
#pragma once
#include "strips_decode.h"
#include "strips_multiply.h"

namespace hfp {
namespace HFP_ISA {

// Few rows take whole panels, so that memory is read in four streams; many take one strip at a time, so that each decoded
// weight serves as many rows as it can. The sums of a group stay in registers, beside them the totals of all groups as
// far as they fit: in the largest tile a few do not, which costs less than decoding for fewer rows.
#if defined(__AVX512F__)
constexpr int kFewRows = 2, kSomeRows = 4;
#else
constexpr int kFewRows = 0, kSomeRows = 0;
#endif

template <class T, int Rows, int Vectors, int J>
inline void accumulate_pair(typename PairStep<T>::Words (&words)[Vectors], const typename PairStep<T>::Table& table,
                            const T* input, int64_t stride, Vec16 (&sums)[Rows][Vectors]) {
  using Step = PairStep<T>;
  typename Step::Weights weights[Vectors];
#pragma GCC unroll 4
  for (int v = 0; v < Vectors; v++) weights[v] = Step::template decode<J>(words[v], table);
#pragma GCC unroll 16
  for (int r = 0; r < Rows; r++) {
    typename Step::Input x = Step::broadcast(input + r * stride + 2 * J);
#pragma GCC unroll 4
    for (int v = 0; v < Vectors; v++) sums[r][v] = Step::accumulate(sums[r][v], x, weights[v]);
  }
}

// Words of a group: a constant where the format has one size of groups, so that the loop over them is unrolled.
template <ScaleKind kScales>
inline int group_words_of(int group_words) {
  if constexpr (kScales == ScaleKind::kE4m3) return 16 / kWordCodes;
  if constexpr (kScales == ScaleKind::kE8m0) return 32 / kWordCodes;
  return group_words;
}

template <class T, ScaleKind kScales, int Rows, int Vectors>
inline void strip_kernel(const StripTileArgs<T>& args, const typename PairStep<T>::Table& table, Tile& tile,
                         int first_vector) {
  using Step = PairStep<T>;
  Vec16 totals[Rows][Vectors];
#pragma GCC unroll 16
  for (int r = 0; r < Rows; r++)
#pragma GCC unroll 4
    for (int v = 0; v < Vectors; v++) totals[r][v] = zero16();
  const T* input = args.input;
  const int group_words = group_words_of<kScales>(args.group_words);
  int64_t word = 0;
  for (int group = 0; group < args.groups; group++) {
    Vec16 sums[Rows][Vectors];
#pragma GCC unroll 16
    for (int r = 0; r < Rows; r++)
#pragma GCC unroll 4
      for (int v = 0; v < Vectors; v++) sums[r][v] = zero16();
#pragma GCC unroll 2
    for (int i = 0; i < group_words; i++, word++, input += kWordCodes) {
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
#pragma GCC unroll 16
      for (int r = 0; r < Rows; r++) totals[r][v] = fma16(sums[r][v], scale, totals[r][v]);
    }
  }
#pragma GCC unroll 16
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

template <class T, ScaleKind kScales>
void strip_tile(int rows, StripTileArgs<T> args, Tile& tile) {
  typename PairStep<T>::Table table(args.codes);
  if constexpr (kFewRows > 0) {
    if (rows <= kFewRows) return strip_kernel_for_rows<T, kScales, kFewRows, 4>(rows, args, table, tile, 0);
    if (rows <= kSomeRows) {
      strip_kernel_for_rows<T, kScales, kSomeRows, 2>(rows, args, table, tile, 0);
      args.strips += 2;
      if (args.ahead) args.ahead += 2;
      return strip_kernel_for_rows<T, kScales, kSomeRows, 2>(rows, args, table, tile, 2);
    }
  }
  for (int v = 0; v < kPanelVectors; v++) {
    strip_kernel_for_rows<T, kScales, kManyRows<T>, 1>(rows, args, table, tile, v);
    args.strips++;
    if (args.ahead) args.ahead++;
  }
}

}  // namespace HFP_ISA
}  // namespace hfp
