// The two products of attention over tiles of 16 tokens: scores = query * key^T and values = probabilities * value.
//
// Both keep a block of sums in registers, some rows by some vectors of lanes, and read each cache element once a block.
// A sum's own order of additions is the same in every block shape.
#pragma once
#include "attention.h"
#include "attention_dot.h"

namespace hfp {
namespace HFP_ISA {
namespace {

constexpr int kTileRows = 12;                       // rows that share one read of a tile
constexpr int kPairFloats = 2 * kTileTokens;   // cache elements in one Pairs of keys
constexpr int kTilesPerChunk = kChunkTokens / kTileTokens;
constexpr int kQueryStride = kMaxHeadDim / 2 + 16;  // factors from row to row; no power of two, so that L1 sets differ

// How many Vec16 the registers hold (with room for a factor where it needs one), and the most rows of a block.
#if defined(__AVX512F__)
constexpr int kRegisters = 32, kScoreRows = 12, kValueRows = 6;
#elif defined(__AVX2__)
constexpr int kRegisters = 7, kScoreRows = 4, kValueRows = 4;
#else
constexpr int kRegisters = 4, kScoreRows = 2, kValueRows = 2;
#endif

// The most vectors, a power of two, so that the sums of `rows` rows and one Pairs per vector stay in registers.
constexpr int vectors_beside(int rows, int most) {
  int vectors = most;
  while (vectors > 1 && (rows + 1) * vectors > kRegisters) vectors /= 2;
  return vectors;
}

constexpr bool prefetches(int rows) { return rows <= 8; }  // wider blocks are bound by arithmetic

// Few rows wait for memory: operands read from the L1 cache again let the rows run ahead of a load that is late.
constexpr bool reloads(int rows) { return rows <= 4; }

template <class T>
inline void prefetch(const T* p, int elements) {
  const char* line = reinterpret_cast<const char*>(p);
  for (int i = 0; i < int(elements * sizeof(T)); i += 64) __builtin_prefetch(line + i, 0, 2);
}

// Tiles of one chunk by their number in the chunk, and what to fetch meanwhile for the reads to come.
template <class T>
struct TilePointers {
  const T* now[kTilesPerChunk];
  const T* next[kTilesPerChunk];
};

// Scores of R rows against N tiles. query is [R][kQueryStride], scores [R][kChunkTokens].
template <class T, int R, int N>
inline void score_block(const typename Dot<T>::Factor* query, int pairs, const T* const* key, const T* const* next,
                        Vec16 scale, float* scores) {
  Vec16 sum[R][N];
#pragma GCC unroll 16
  for (int r = 0; r < R; r++)
#pragma GCC unroll 16
    for (int n = 0; n < N; n++) sum[r][n] = zero16();
  for (int d = 0; d < pairs; d++) {
    typename Dot<T>::Pairs tile[N];
#pragma GCC unroll 16
    for (int n = 0; n < N; n++) {
      tile[n] = Dot<T>::load(key[n] + d * kPairFloats, kTileTokens);
      if constexpr (!reloads(R)) Dot<T>::keep_in_register(tile[n]);
      if constexpr (prefetches(R)) prefetch(next[n] + d * kPairFloats, kPairFloats);
    }
#pragma GCC unroll 16
    for (int r = 0; r < R; r++)
#pragma GCC unroll 16
      for (int n = 0; n < N; n++) sum[r][n] = Dot<T>::multiply_add(sum[r][n], query[r * kQueryStride + d], tile[n]);
  }
#pragma GCC unroll 16
  for (int r = 0; r < R; r++)
#pragma GCC unroll 16
    for (int n = 0; n < N; n++) store16(scores + r * kChunkTokens + n * kLanes, sum[r][n] * scale);
}

template <class T, int R, int N>
inline void score_tiles(const typename Dot<T>::Factor* query, int pairs, const TilePointers<T>& keys, int first,
                        int last, Vec16 scale, float* scores) {
  for (; first + N <= last; first += N)
    score_block<T, R, N>(query, pairs, keys.now + first, keys.next + first, scale, scores + first * kLanes);
  if constexpr (N > 1) score_tiles<T, R, (N > 2 ? 2 : 1)>(query, pairs, keys, first, last, scale, scores);
}

// Block heights that exist; a tile with another number of rows computes the next larger one.
constexpr int smaller_height(int rows) { return rows == 12 ? 8 : rows == 8 ? 6 : rows == 6 ? 4 : rows - 1; }

template <class T, int R>
inline void score_rows(int rows, const typename Dot<T>::Factor* query, int pairs, const TilePointers<T>& keys,
                       int first, int last, Vec16 scale, float* scores) {
  if constexpr (R > 1) {
    if (rows <= smaller_height(R))
      return score_rows<T, smaller_height(R)>(rows, query, pairs, keys, first, last, scale, scores);
  }
  score_tiles<T, R, vectors_beside(R, 4)>(query, pairs, keys, first, last, scale, scores);
}

// scores[r][16 * tile + token] = scale * query row r * key, for `rows` rows and the tiles [first, last) of a chunk.
// Query rows up to kTileRows are readable; score rows beyond `rows` may be overwritten.
template <class T>
void compute_scores(int rows, const typename Dot<T>::Factor* query, int pairs, const TilePointers<T>& keys, int first,
                    int last, float scale, float* scores) {
  for (int r = 0; r < rows; r += kScoreRows) {
    int height = rows - r < kScoreRows ? rows - r : kScoreRows;
    score_rows<T, kScoreRows>(height, query + r * kQueryStride, pairs, keys, first, last, splat16(scale),
                              scores + r * kChunkTokens);
  }
}

// Where the values of a run of tokens, from the first one of a tile, and the factors for them are.
template <class T>
struct ValueTiles {
  const T* const* now;
  const T* const* next;
  int tokens;
  int stride;     // elements between two tokens' rows: the value dimension, padded to whole vectors
  const typename Dot<T>::Factor* factors;  // [rows][kChunkTokens / 2], from the first tile's first pair of tokens
};

// Sums of R rows by N vectors of weighted values.
template <class T, int R, int N>
struct ValueSums {
  Vec16 sum[R][N];

  // Adds the values of two tokens, or of the first one alone if IsHalf.
  template <bool IsHalf>
  HFP_ALWAYS_INLINE void add(const T* row, const T* next, int stride, const typename Dot<T>::Factor* factors) {
    constexpr int kVector = kLanes * kTokensPerRow<T>;
    typename Dot<T>::Pairs values[N];
#pragma GCC unroll 16
    for (int n = 0; n < N; n++) {
      values[n] = Dot<T>::load(row + n * kVector, stride);
      if constexpr (IsHalf) values[n] = Dot<T>::first_of(values[n]);
      if constexpr (!reloads(R)) Dot<T>::keep_in_register(values[n]);
      if constexpr (prefetches(R)) prefetch(next + n * kVector, kVector);
    }
#pragma GCC unroll 16
    for (int r = 0; r < R; r++)
#pragma GCC unroll 16
      for (int n = 0; n < N; n++)
        sum[r][n] = Dot<T>::multiply_add(sum[r][n], factors[r * (kChunkTokens / 2)], values[n]);
  }
};

// Adds R rows by N vectors of weighted values to out, at column `column`. What is behind the last token, even in the
// pair that it begins, is undefined and might be NaN.
template <class T, int R, int N>
inline void value_block(const ValueTiles<T>& tiles, int column, float* out) {
  constexpr int kPairsPerTile = kTileTokens / 2;
  ValueSums<T, R, N> sums;
#pragma GCC unroll 16
  for (int r = 0; r < R; r++)
#pragma GCC unroll 16
    for (int n = 0; n < N; n++) sums.sum[r][n] = load16(out + r * tiles.stride + column + n * kLanes);
  int tile = 0, whole = tiles.tokens / kTileTokens, rest = tiles.tokens % kTileTokens;
  int first = column * kTokensPerRow<T>;
  const typename Dot<T>::Factor* factors = tiles.factors;
  for (; tile < whole; tile++)
    for (int pair = 0; pair < kPairsPerTile; pair++, factors++) {
      int64_t offset = int64_t(2) * pair * tiles.stride + first;
      sums.template add<false>(tiles.now[tile] + offset, tiles.next[tile] + offset, tiles.stride, factors);
    }
  for (int pair = 0; 2 * pair < rest; pair++, factors++) {
    int64_t offset = int64_t(2) * pair * tiles.stride + first;
    const T *row = tiles.now[tile] + offset, *next = tiles.next[tile] + offset;
    if (2 * pair + 1 < rest) sums.template add<false>(row, next, tiles.stride, factors);
    else sums.template add<true>(row, next, tiles.stride, factors);
  }
#pragma GCC unroll 16
  for (int r = 0; r < R; r++)
#pragma GCC unroll 16
    for (int n = 0; n < N; n++) store16(out + r * tiles.stride + column + n * kLanes, sums.sum[r][n]);
}

template <class T, int R, int N>
inline void value_columns(const ValueTiles<T>& tiles, int column, float* out) {
  for (; column + N * kLanes <= tiles.stride; column += N * kLanes) value_block<T, R, N>(tiles, column, out);
  if constexpr (N > 1) value_columns<T, R, N / 2>(tiles, column, out);
}

template <class T, int R>
inline void value_rows(int rows, const ValueTiles<T>& tiles, float* out) {
  if constexpr (R > 1) {
    if (rows < R) return value_rows<T, R - 1>(rows, tiles, out);
  }
  value_columns<T, R, vectors_beside(R, 4)>(tiles, 0, out);
}

// out[r] += sum over tokens of factor[r][token] * value[token]; out is [rows][tiles.stride].
template <class T>
void add_values(int rows, ValueTiles<T> tiles, float* out) {
  for (int r = 0; r < rows; r += kValueRows) {
    int height = rows - r < kValueRows ? rows - r : kValueRows;
    value_rows<T, kValueRows>(height, tiles, out + int64_t(r) * tiles.stride);
    tiles.factors += kValueRows * (kChunkTokens / 2);
  }
}

}  // namespace
}  // namespace HFP_ISA
}  // namespace hfp
