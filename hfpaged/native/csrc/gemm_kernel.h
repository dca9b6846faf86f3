// The matrix product. Every element of the result is one chain of multiply-adds in ascending k, whatever the number of
// rows, the tile that computes it and the thread that runs it: a row gives the same bits alone and in any batch.
#pragma once
#include "gemm.h"
#include "ops_simd.h"

namespace hfp {
namespace HFP_ISA {

// One depth step: a word of the input times 16 words of the weight, added to 16 sums.
template <class T>
struct DepthStep;

template <>
struct DepthStep<float> {
  using Weights = Vec16;
  using Input = Vec16;
  static Weights load(const uint32_t* words) { return load16(reinterpret_cast<const float*>(words)); }
  static Input broadcast(const uint32_t* word) { return splat16(*reinterpret_cast<const float*>(word)); }
  static Vec16 accumulate(Vec16 sum, Input x, Weights w) { return fma16(x, w, sum); }
};

// Sixteen words as two vectors: the numbers of even k and those of odd k.
struct WordPair {
  Vec16 even, odd;
};

#if defined(__AVX512F__)
inline WordPair split_words(const uint32_t* words, bf16) {
  __m512i w = _mm512_loadu_si512(words);
  return {{_mm512_castsi512_ps(_mm512_slli_epi32(w, 16))},
          {_mm512_castsi512_ps(_mm512_and_si512(w, _mm512_set1_epi32(~0xffff)))}};
}
inline WordPair split_words(const uint32_t* words, fp16) {
  __m512i w = _mm512_loadu_si512(words);
  return {{_mm512_cvtph_ps(_mm512_cvtepi32_epi16(w))},
          {_mm512_cvtph_ps(_mm512_cvtepi32_epi16(_mm512_srli_epi32(w, 16)))}};
}
#elif defined(__AVX2__)
inline __m256i load_words8(const uint32_t* words) {
  return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(words));
}
inline WordPair split_words(const uint32_t* words, bf16) {
  __m256i lo = load_words8(words), hi = load_words8(words + 8), mask = _mm256_set1_epi32(~0xffff);
  return {{_mm256_castsi256_ps(_mm256_slli_epi32(lo, 16)), _mm256_castsi256_ps(_mm256_slli_epi32(hi, 16))},
          {_mm256_castsi256_ps(_mm256_and_si256(lo, mask)), _mm256_castsi256_ps(_mm256_and_si256(hi, mask))}};
}
inline Vec16 widen_low_halves(__m256i lo, __m256i hi) {
  __m256i halves = _mm256_permute4x64_epi64(_mm256_packus_epi32(lo, hi), 0xd8);
  return {_mm256_cvtph_ps(_mm256_castsi256_si128(halves)), _mm256_cvtph_ps(_mm256_extracti128_si256(halves, 1))};
}
inline WordPair split_words(const uint32_t* words, fp16) {
  __m256i lo = load_words8(words), hi = load_words8(words + 8), mask = _mm256_set1_epi32(0xffff);
  return {widen_low_halves(_mm256_and_si256(lo, mask), _mm256_and_si256(hi, mask)),
          widen_low_halves(_mm256_srli_epi32(lo, 16), _mm256_srli_epi32(hi, 16))};
}
#else
template <class Half>
inline WordPair split_words(const uint32_t* words, Half) {
  Half even[kLanes], odd[kLanes];
  for (int i = 0; i < kLanes; i++) {
    even[i].bits = static_cast<uint16_t>(words[i]);
    odd[i].bits = static_cast<uint16_t>(words[i] >> 16);
  }
  return {load16(even), load16(odd)};
}
#endif

inline WordPair broadcast_word(const uint32_t* word, bf16) {
  uint32_t bits[2] = {*word << 16, *word & 0xffff0000u};
  float values[2];
  std::memcpy(values, bits, sizeof bits);
  return {splat16(values[0]), splat16(values[1])};
}
inline WordPair broadcast_word(const uint32_t* word, fp16) {
#if defined(__F16C__)
  __m128 values = _mm_cvtph_ps(_mm_cvtsi32_si128(static_cast<int>(*word)));
  return {splat16(_mm_cvtss_f32(values)), splat16(_mm_cvtss_f32(_mm_movehdup_ps(values)))};
#else
  fp16 halves[2];
  std::memcpy(halves, word, sizeof halves);
  return {splat16(widened(halves[0])), splat16(widened(halves[1]))};
#endif
}

// 16-bit numbers that have no dot product of their own: widened to fp32 on the way.
template <class Half>
struct WideningStep {
  using Weights = WordPair;
  using Input = WordPair;
  static Weights load(const uint32_t* words) { return split_words(words, Half{}); }
  static Input broadcast(const uint32_t* word) { return broadcast_word(word, Half{}); }
  static Vec16 accumulate(Vec16 sum, Input x, Weights w) { return fma16(x.odd, w.odd, fma16(x.even, w.even, sum)); }
};

template <>
struct DepthStep<fp16> : WideningStep<fp16> {};

#if defined(__AVX512BF16__)
template <>
struct DepthStep<bf16> {
  using Weights = __m512i;
  using Input = __m512i;
  static Weights load(const uint32_t* words) { return _mm512_loadu_si512(words); }
  static Input broadcast(const uint32_t* word) { return _mm512_set1_epi32(static_cast<int>(*word)); }
  static Vec16 accumulate(Vec16 sum, Input x, Weights w) {
    return {_mm512_dpbf16_ps(sum.v, (__m512bh)x, (__m512bh)w)};
  }
};
#else
template <>
struct DepthStep<bf16> : WideningStep<bf16> {};
#endif

// Rows and vectors (of 16 columns) of the tile whose sums stay in registers.
struct TileShape {
  int rows, vectors;
};
constexpr int kMaxTileRows = 16;
constexpr int kPanelVectors = kPanelColumns / kLanes;
using Tile = Vec16[kMaxTileRows][kPanelVectors];

#if defined(__AVX512F__)
// The tall tile reads half a panel at a time but each weight for twice the rows; it wins while the rows fit one.
constexpr int kTallFrom = 8, kTallTo = 12;
// The high tile leaves no register free. It wins where few rows fill one tile less than of wide ones.
constexpr int kHighTo = 20;
constexpr int kHighRows = 7;
template <class T>
constexpr TileShape kWideTile = {6, 4};
template <>
constexpr TileShape kWideTile<fp16> = {4, 4};  // widened weights take twice the registers
#if !defined(__AVX512BF16__)
template <>
constexpr TileShape kWideTile<bf16> = {4, 4};
#endif
constexpr TileShape kTallTile = {12, 2};
#elif defined(__AVX2__)
constexpr int kTallFrom = 1, kTallTo = 0;
constexpr int kHighTo = 0, kHighRows = 1;
template <class T>
constexpr TileShape kWideTile = {6, 1};
template <>
constexpr TileShape kWideTile<bf16> = {4, 1};
template <>
constexpr TileShape kWideTile<fp16> = {4, 1};
constexpr TileShape kTallTile = {1, 1};
#else
constexpr int kTallFrom = 1, kTallTo = 0;
constexpr int kHighTo = 0, kHighRows = 1;
template <class T>
constexpr TileShape kWideTile = {2, 1};
constexpr TileShape kTallTile = {1, 1};
#endif

struct KernelArgs {
  const uint32_t* input;    // first row of the tile, as words
  int64_t input_stride;     // in words
  const uint32_t* weights;  // first column of the strip in the panel
  int depth;
  const char* ahead;  // memory to fetch meanwhile, Lines cache lines per step
};

template <class T, int Rows, int Vectors, int Lines>
inline void kernel(const KernelArgs& args, Tile& tile, int first_vector) {
  using Step = DepthStep<T>;
  Vec16 sums[Rows][Vectors];
  // Unrolled, all of them: indices must be constants for the sums to live in registers.
#pragma GCC unroll 12
  for (int r = 0; r < Rows; r++)
#pragma GCC unroll 4
    for (int v = 0; v < Vectors; v++) sums[r][v] = zero16();
  const uint32_t* words = args.weights;
  const char* ahead = args.ahead;
  for (int step = 0; step < args.depth; step++, words += kPanelColumns) {
    typename Step::Weights weights[Vectors];
#pragma GCC unroll 4
    for (int v = 0; v < Vectors; v++) weights[v] = Step::load(words + v * kLanes);
#pragma GCC unroll 4
    for (int line = 0; line < Lines; line++, ahead += 64) __builtin_prefetch(ahead, 0, 2);
#pragma GCC unroll 12
    for (int r = 0; r < Rows; r++) {
      typename Step::Input x = Step::broadcast(args.input + r * args.input_stride + step);
#pragma GCC unroll 4
      for (int v = 0; v < Vectors; v++) sums[r][v] = Step::accumulate(sums[r][v], x, weights[v]);
    }
  }
#pragma GCC unroll 12
  for (int r = 0; r < Rows; r++)
#pragma GCC unroll 4
    for (int v = 0; v < Vectors; v++) tile[r][first_vector + v] = sums[r][v];
}

template <class T, int Rows, int Vectors, int Lines>
inline void kernel_for_rows(int rows, const KernelArgs& args, Tile& tile, int first_vector) {
  if constexpr (Rows > 1) {
    if (rows < Rows) return kernel_for_rows<T, Rows - 1, Vectors, Lines>(rows, args, tile, first_vector);
  }
  kernel<T, Rows, Vectors, Lines>(args, tile, first_vector);
}

template <class T, int Rows, int Vectors>
inline void kernel_with_prefetch(int rows, int lines, const KernelArgs& args, Tile& tile, int first_vector) {
  switch (lines) {
    case 4: return kernel_for_rows<T, Rows, Vectors, 4>(rows, args, tile, first_vector);
    case 2: return kernel_for_rows<T, Rows, Vectors, 2>(rows, args, tile, first_vector);
    case 1: return kernel_for_rows<T, Rows, Vectors, 1>(rows, args, tile, first_vector);
    default: return kernel_for_rows<T, Rows, Vectors, 0>(rows, args, tile, first_vector);
  }
}

template <class T>
struct InputRows {
  const T* data;
  int64_t stride;  // elements; a multiple of a word, and zero or finite up to the padded depth
  int count;
};

// One panel times `rows` rows. The next panel is fetched in `passes` equal parts, of which this is number `pass`.
template <class T, int Rows, int Vectors>
inline void multiply_tile(KernelArgs args, int rows, int first_pass, int passes, const char* next, Tile& tile) {
  const uint32_t* panel = args.weights;
  int strips = kPanelVectors / Vectors;
  int lines = passes >= 4 ? 1 : passes >= 2 ? 2 : 4;
  for (int strip = 0; strip < strips; strip++) {
    int pass = first_pass + strip;
    args.weights = panel + strip * Vectors * kLanes;
    args.ahead = next + static_cast<int64_t>(pass) * lines * 64 * args.depth;
    kernel_with_prefetch<T, Rows, Vectors>(rows, pass * lines < 4 ? lines : 0, args, tile, strip * Vectors);
  }
}

// A product is cut into units: one panel times one tile of rows, panel by panel.
struct Units {
  int row_tiles;
  int64_t count;
};

inline int tiles_of_rows(int rows, int tile_rows) { return (rows + tile_rows - 1) / tile_rows; }

inline bool prefers_tall_tile(int rows) { return rows >= kTallFrom && rows <= kTallTo; }

// Only for types whose wide tile is the highest but one.
template <class T>
constexpr bool kHasHighTile = kWideTile<T>.rows == kHighRows - 1;

template <class T>
inline bool prefers_high_tile(int rows) {
  if (!kHasHighTile<T> || rows > kHighTo) return false;
  return tiles_of_rows(rows, kHighRows) < tiles_of_rows(rows, kWideTile<T>.rows);
}

template <class T>
inline int row_tiles_of(int rows) {
  if (prefers_tall_tile(rows)) return tiles_of_rows(rows, kTallTile.rows);
  return tiles_of_rows(rows, prefers_high_tile<T>(rows) ? kHighRows : kWideTile<T>.rows);
}

// The same for weights in 4 bits (strips_kernel.h).
template <class T>
Units strip_units_of(int rows, const StripWeight& weight, int panels);
template <class T, class Epilogue>
void multiply_strips(const InputRows<T>& in, const StripWeight& weight, int panels, int64_t begin, int64_t end,
                     const Strip* next, Epilogue& epilogue);

template <class T>
inline Units units_of(int rows, const PackedWeight& weight) {
  if (weight.strips) return strip_units_of<T>(rows, *weight.strips, weight.panel_count());
  int row_tiles = row_tiles_of<T>(rows);
  return {row_tiles, static_cast<int64_t>(weight.panel_count()) * row_tiles};
}

template <class T, int Rows, int Vectors, class Epilogue>
void multiply_with_tile(const InputRows<T>& in, const PackedWeight& weight, int64_t begin, int64_t end,
                        const char* next_product, Epilogue& epilogue) {
  constexpr int kPerWord = 4 / sizeof(T);
  int row_tiles = units_of<T>(in.count, weight).row_tiles;
  int passes = row_tiles * (kPanelVectors / Vectors);
  alignas(64) Tile tile;
  for (int64_t unit = begin; unit < end; unit++) {
    int panel = static_cast<int>(unit / row_tiles), row_tile = static_cast<int>(unit % row_tiles);
    int first = static_cast<int>(static_cast<int64_t>(in.count) * row_tile / row_tiles);
    int rows = static_cast<int>(static_cast<int64_t>(in.count) * (row_tile + 1) / row_tiles) - first;
    KernelArgs args;
    args.input = reinterpret_cast<const uint32_t*>(in.data + first * in.stride);
    args.input_stride = in.stride / kPerWord;
    args.weights = reinterpret_cast<const uint32_t*>(weight.panel(panel));
    args.depth = weight.depth;
    const char* next = unit + 1 == end && next_product ? next_product : weight.panel(panel + 1);
    multiply_tile<T, Rows, Vectors>(args, rows, row_tile * (kPanelVectors / Vectors), passes, next, tile);
    epilogue(panel, first, rows, tile);
  }
}

// Multiplies units [begin, end) and hands each tile of sums to epilogue(panel, first_row, rows, tile).
// `next_product` is what this thread will read first in the next product, or null: part of a panel after a dense weight,
// the first Strip after one in 4 bits.
template <class T, class Epilogue>
void multiply(const InputRows<T>& in, const PackedWeight& weight, int64_t begin, int64_t end, const char* next_product,
              Epilogue&& epilogue) {
  constexpr TileShape wide = kWideTile<T>;
  if (weight.strips) {
    const Strip* next = reinterpret_cast<const Strip*>(next_product);
    return multiply_strips<T>(in, *weight.strips, weight.panel_count(), begin, end, next, epilogue);
  }
  if (prefers_tall_tile(in.count))
    return multiply_with_tile<T, kTallTile.rows, kTallTile.vectors>(in, weight, begin, end, next_product, epilogue);
  if constexpr (kHasHighTile<T>) {
    if (prefers_high_tile<T>(in.count))
      return multiply_with_tile<T, kHighRows, wide.vectors>(in, weight, begin, end, next_product, epilogue);
  }
  multiply_with_tile<T, wide.rows, wide.vectors>(in, weight, begin, end, next_product, epilogue);
}

// Multiplies one thread's share of all units.
template <class T, class Epilogue>
void multiply(const InputRows<T>& in, const PackedWeight& weight, Share share, const char* next_product,
              Epilogue&& epilogue) {
  int64_t units = units_of<T>(in.count, weight).count;
  multiply<T>(in, weight, share.begin(units), share.end(units), next_product, epilogue);
}

}  // namespace HFP_ISA
}  // namespace hfp
