// One tile of the matrix product with packed 4-bit weights. As in gemm_kernel.h, every element is one chain of operations
// in ascending k whatever the tile. Where decoded weights have their scales in them it is the chain of dense weights;
// elsewhere, see kScalesSums, the products of a group are added up, and the sum is scaled and added to the total.
#pragma once
#include "strips_decode_bf16.h"
#include "strips_multiply.h"

namespace hfp {
namespace HFP_ISA {

// Few rows take whole panels, so that memory is read in four streams; some take two strips at a time, many one, so that
// each decoded weight serves as many rows as it can while the sums stay in registers.
#if defined(__AVX512F__)
constexpr int kFewRows = 2;
template <class T, ScaleKind kScales>
constexpr int kSomeRows = 4;
#if defined(__AVX512BF16__)
template <>
constexpr int kSomeRows<bf16, ScaleKind::kE4m3> = 11;
template <>
constexpr int kSomeRows<bf16, ScaleKind::kE8m0> = 11;
#endif
#else
constexpr int kFewRows = 0;
template <class T, ScaleKind kScales>
constexpr int kSomeRows = 0;
#endif

template <int Rows, int Vectors>
inline void clear(Vec16 (&sums)[Rows][Vectors]) {
#pragma GCC unroll 16
  for (int r = 0; r < Rows; r++)
#pragma GCC unroll 4
    for (int v = 0; v < Vectors; v++) sums[r][v] = zero16();
}

// Where the rows of a tile are read. One pointer serves four rows, so that all of them fit into registers.
template <class T, int Rows>
struct RowReader {
  static constexpr int kQuads = (Rows + 3) / 4;
  const T* quads[kQuads];
  int64_t stride;

  RowReader(const T* input, int64_t stride) : stride(stride) {
#pragma GCC unroll 4
    for (int q = 0; q < kQuads; q++) quads[q] = input + 4 * q * stride;
  }
  const T* row(int r) const { return quads[r / 4] + r % 4 * stride; }
  void advance(int elements) {
#pragma GCC unroll 4
    for (int q = 0; q < kQuads; q++) quads[q] += elements;
  }
};

template <class Step, int J, class T, int Rows, int Vectors>
inline void accumulate_pair(typename Step::Words (&words)[Vectors], const typename Step::Scale (&scales)[Vectors],
                            const typename Step::Table& table, const RowReader<T, Rows>& reader,
                            Vec16 (&sums)[Rows][Vectors]) {
  constexpr Load kLoad = Rows <= 4 ? Load::kDecoding : Load::kMultiplying;
  typename Step::Weights weights[Vectors];
#pragma GCC unroll 4
  for (int v = 0; v < Vectors; v++) weights[v] = Step::template decode<J, kLoad>(words[v], scales[v], table);
#pragma GCC unroll 16
  for (int r = 0; r < Rows; r++) {
    typename Step::Input x = Step::broadcast(reader.row(r) + 2 * J);
#pragma GCC unroll 4
    for (int v = 0; v < Vectors; v++) sums[r][v] = Step::accumulate(sums[r][v], x, weights[v]);
  }
}

// totals += sums * scales, and sums = 0.
template <int Rows, int Vectors>
inline void add_scaled(Vec16 (&sums)[Rows][Vectors], const Vec16 (&scales)[Vectors], Vec16 (&totals)[Rows][Vectors]) {
#pragma GCC unroll 16
  for (int r = 0; r < Rows; r++)
#pragma GCC unroll 4
    for (int v = 0; v < Vectors; v++) totals[r][v] = fma16(sums[r][v], scales[v], totals[r][v]);
  clear(sums);
}

// Words of a group: a constant where the format has one size of groups, so that the loop over them is unrolled.
template <ScaleKind kScales>
inline int group_words_of(int group_words) {
  if constexpr (kScales == ScaleKind::kE4m3) return 16 / kWordCodes;
  if constexpr (kScales == ScaleKind::kE8m0) return 32 / kWordCodes;
  return group_words;
}

template <class T, ScaleKind kScales, int Vectors>
inline void load_scales_of_group(const StripTileArgs<T>& args, int group,
                                 typename PairStep<T, kScales>::Scale (&scales)[Vectors]) {
  int64_t offset = static_cast<int64_t>(group) * kStripColumns * bytes_of(kScales);
#pragma GCC unroll 4
  for (int v = 0; v < Vectors; v++) {
    scales[v] = PairStep<T, kScales>::load_scale(args.strips[v].scales + offset);
    if (args.ahead) __builtin_prefetch(args.ahead[v].scales + offset, 0, 2);
  }
}

template <class T, ScaleKind kScales, int Rows, int Vectors>
inline void strip_kernel(const StripTileArgs<T>& args, const typename PairStep<T, kScales>::Table& table, Tile& tile,
                         int first_vector) {
  using Step = PairStep<T, kScales>;
  Vec16 sums[Rows][Vectors], totals[Rows][Vectors];
  clear(sums);
  clear(totals);
  // Decoded one group early: that is a row of instructions that wait for each other, which would hold up the products.
  typename Step::Scale next[Vectors];
  load_scales_of_group<T, kScales>(args, 0, next);
  RowReader<T, Rows> reader(args.input, args.input_stride);
  const int group_words = group_words_of<kScales>(args.group_words);
  int64_t word = 0;
  for (int group = 0; group < args.groups; group++) {
    typename Step::Scale scales[Vectors];
#pragma GCC unroll 4
    for (int v = 0; v < Vectors; v++) scales[v] = next[v];
    load_scales_of_group<T, kScales>(args, group + 1 < args.groups ? group + 1 : group, next);
#pragma GCC unroll 2
    for (int i = 0; i < group_words; i++, word++, reader.advance(kWordCodes)) {
      typename Step::Words words[Vectors];
#pragma GCC unroll 4
      for (int v = 0; v < Vectors; v++) {
        words[v] = Step::load(args.strips[v].codes + word * kStripColumns);
        if (args.ahead) __builtin_prefetch(args.ahead[v].codes + word * kStripColumns, 0, 2);
      }
      accumulate_pair<Step, 0>(words, scales, table, reader, sums);
      accumulate_pair<Step, 1>(words, scales, table, reader, sums);
      accumulate_pair<Step, 2>(words, scales, table, reader, sums);
      accumulate_pair<Step, 3>(words, scales, table, reader, sums);
    }
    if constexpr (Step::kScalesSums) add_scaled(sums, scales, totals);
  }
#pragma GCC unroll 16
  for (int r = 0; r < Rows; r++)
#pragma GCC unroll 4
    for (int v = 0; v < Vectors; v++) {
      Vec16 result = Step::kScalesSums ? totals[r][v] : sums[r][v];
      tile[r][first_vector + v] = result * splat16(args.strips[v].multiplier);
    }
}

template <class T, ScaleKind kScales, int Rows, int Vectors>
inline void strip_kernel_for_rows(int rows, const StripTileArgs<T>& args,
                                  const typename PairStep<T, kScales>::Table& table, Tile& tile, int first_vector) {
  if constexpr (Rows > 1) {
    if (rows < Rows)
      return strip_kernel_for_rows<T, kScales, Rows - 1, Vectors>(rows, args, table, tile, first_vector);
  }
  strip_kernel<T, kScales, Rows, Vectors>(args, table, tile, first_vector);
}

#if defined(__AVX512BF16__)
template <class T, ScaleKind kScales>
void unpack_panel(const StripTileArgs<T>& args, uint32_t* words) {
  using Step = PairStep<T, kScales>;
  static_assert(kUnpacks<T, kScales> && !Step::kScalesSums);
  typename Step::Table table(args.codes);
  int64_t word = 0;
  for (int group = 0; group < args.groups; group++) {
    typename Step::Scale scales[kPanelVectors];
    load_scales_of_group<T, kScales>(args, group, scales);
    for (int i = 0; i < group_words_of<kScales>(args.group_words); i++, word++, words += 4 * kPanelColumns)
#pragma GCC unroll 4
      for (int v = 0; v < kPanelVectors; v++) {
        typename Step::Words codes = Step::load(args.strips[v].codes + word * kStripColumns);
        if (args.ahead) __builtin_prefetch(args.ahead[v].codes + word * kStripColumns, 0, 2);
        __m512i* pairs = reinterpret_cast<__m512i*>(words) + v;
        pairs[0 * kPanelVectors] = Step::template decode<0, Load::kDecoding>(codes, scales[v], table);
        pairs[1 * kPanelVectors] = Step::template decode<1, Load::kDecoding>(codes, scales[v], table);
        pairs[2 * kPanelVectors] = Step::template decode<2, Load::kDecoding>(codes, scales[v], table);
        pairs[3 * kPanelVectors] = Step::template decode<3, Load::kDecoding>(codes, scales[v], table);
      }
  }
}
#endif

template <class T, ScaleKind kScales>
void strip_tile(int rows, StripTileArgs<T> args, Tile& tile) {
  typename PairStep<T, kScales>::Table table(args.codes);
  if constexpr (kFewRows > 0) {
    if (rows <= kFewRows) return strip_kernel_for_rows<T, kScales, kFewRows, 4>(rows, args, table, tile, 0);
    if (rows <= kSomeRows<T, kScales>) {
      strip_kernel_for_rows<T, kScales, kSomeRows<T, kScales>, 2>(rows, args, table, tile, 0);
      args.strips += 2;
      if (args.ahead) args.ahead += 2;
      return strip_kernel_for_rows<T, kScales, kSomeRows<T, kScales>, 2>(rows, args, table, tile, 2);
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
