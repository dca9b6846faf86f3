// The step program: the decoder layers of a model as a flat list of operations over preallocated buffers.
//
// This header is the C ABI that hfpaged/program/abi.py mirrors field by field, plus the state the operations share.
// Everything is plain data: it is read by translation units compiled for different instruction sets.
#pragma once
#include <cstdint>

#include "attention.h"
#include "gemm.h"
#include "head_screen.h"
#include "units.h"

enum HfpProgramStatus : int32_t {
  HFP_PROGRAM_OK = 0,
  HFP_PROGRAM_BAD_STEP = 1,
  HFP_PROGRAM_BAD_TOKEN = 2,
  HFP_PROGRAM_BAD_POSITION = 3,
  HFP_PROGRAM_BAD_SAMPLE_ROW = 4,
  HFP_PROGRAM_OUT_OF_MEMORY = 5,
  HFP_PROGRAM_BAD_BATCH = 6,  // attention refused the batch or the cache
};

namespace hfp {

// What the rows of a buffer are: the tokens of the step, the sampled ones, or pairs of one of these and a chosen expert.
enum class RowSet : int32_t { kTokens = 0, kSamples = 1, kExpertPairs = 2 };

struct Buffer {
  int32_t width;  // elements used in a row
  RowSet rows;
  int64_t stride;     // elements from row to row; rows start on a cache line
  int64_t capacity;   // rows allocated
  char* data;         // elements past `width` are zero: products read whole words
  bool is_bound;      // the memory is the caller's
};

enum class OpKind : int32_t {
  kEmbed = 0,
  kNorm = 1,
  kProduct = 2,
  kRotateAndStore = 3,
  kAttention = 4,
  kHead = 5,
  kRoute = 6,
  kOrderPairs = 7,
  kGatherPairs = 8,
  kExperts = 9,
  kCombine = 10,
  kGatherSamples = 11,
};

// out[t] = round(table[token_ids[t]] * scale)
struct EmbedOp {
  const void* table;  // [vocab, width] in the program's element type
  int64_t vocab;
  int32_t width;
  int32_t out;
  float scale;
};

enum class NormKind : int32_t {
  kRmsRoundedThenScaled = 0,  // round(round(x * r) * gamma), as Llama
  kRmsScaledThenRounded = 1,  // round(x * r * gamma) with gamma in fp32, as Gemma (gamma = 1 + weight) and OLMo 2
  kLayerNorm = 2,             // round((x - mean) * r * gamma + beta)
};

struct NormWeights {
  const float* gamma;  // [width]
  const float* beta;   // [width]; layer norm only, may be null
  NormKind kind;
  float epsilon;
};

// Normalizes `groups` slices of `width` elements in each row, from column `in_column` of `in`.
struct NormOp {
  NormWeights weights;
  int32_t in, out;
  int32_t in_column, out_column;
  int32_t groups, width;
  int32_t residual;  // buffer, or -1: out = round(residual + round(norm * multiplier))
  float multiplier;
};

enum class Activation : int32_t { kNone = 0, kSilu = 1, kGeluErf = 2, kGeluTanh = 3, kRelu = 4 };

enum class Epilogue : int32_t {
  kStore = 0,     // out = activation(y), with y = round(in * weight^T + bias)
  kGated = 1,     // out = round(activation(gate) * up); a panel holds 32 gate columns, then their 32 up columns
  kResidual = 2,  // out = round(out + round(y * multiplier)); with `other`: round(round(y + other) + out)
};

struct ProductOp {
  PackedWeight weight;
  int32_t in, out;
  int32_t out_width;
  Epilogue epilogue;
  Activation activation;
  float multiplier;
  int32_t other;  // buffer, or -1
};

enum class RotaryStyle : int32_t { kNone = 0, kHalves = 1, kInterleaved = 2 };

// Queries, keys and values as the columns of one buffer: heads of queries, then of keys, then of values.
struct AttentionShape {
  int32_t layer;  // index of the layer's key and value cache
  int32_t heads, kv_heads;
  int32_t key_dim, value_dim;
};

// Normalizes (optional) and rotates queries and keys in place, then writes keys and values to the paged cache if the
// step has slots for them.
struct RotateAndStoreOp {
  AttentionShape shape;
  NormWeights query_norm, key_norm;  // per head; gamma null: none
  int32_t qkv;
  int32_t rotary_dim;
  RotaryStyle style;
  int32_t round_products;  // the module multiplies in the element type instead of fp32
  int32_t table;           // index of the rotary table
};

struct AttentionOp {
  AttentionShape shape;
  int32_t qkv, out;
  int32_t window;       // 0: none
  float scale;
  float softcap;        // 0: none
  const float* sinks;   // [heads], or null
};

// Logits of the sampled rows: scaling, softcap, argmax (the first of equal ones) and, if asked for, the logits.
struct HeadOp {
  PackedWeight weight;
  HeadScreen screen;  // of the weight, if the scaling keeps the order of the logits
  int32_t in;
  int32_t vocab;
  float multiplier;  // 1: none
  float divisor;     // 1: none
  float softcap;     // 0: none
};

constexpr int kMaxExperts = 1024;

// Chooses experts for every row of `logits`: softmax over the router's logits, then the most probable ones.
struct RouteOp {
  int32_t logits;
  int32_t experts, chosen;
  int32_t normalize;      // weights of the chosen ones add up to 1
  int32_t round_weights;  // to the element type
};

// Orders the (token, expert) pairs by expert. The tokens are the rows of `logits`, those of the RouteOp before.
struct OrderPairsOp {
  int32_t logits;
  int32_t experts, chosen;
};

// out[pair] = in[row of the pair]
struct GatherPairsOp {
  int32_t in, out;
  int32_t width, chosen;
};

// A product with each expert's weight for the pairs of that expert. Epilogue kGated, or kStore followed by
// round(y * weight of the pair).
struct ExpertsOp {
  const PackedWeight* weights;  // [experts]
  int32_t experts;
  int32_t in, out;
  int32_t out_width;
  Epilogue epilogue;
  Activation activation;
};

// y = the sum of the pairs of a row, rounded after each addition; out = y, or as in NormOp with a residual.
struct CombineOp {
  int32_t in, out;
  int32_t width, chosen;
  int32_t residual;
  float multiplier;
};

// out[i] = in[row of the i-th sample]
struct GatherSamplesOp {
  int32_t in, out;
  int32_t width;
};

struct RotaryTable {
  const float *cosine, *sine;  // [positions, rotary_dim]
  int64_t positions;
};

// One step. All arrays are those of StepBatch; those that the operations of the step do not use may be null.
struct Step {
  HfpBatch batch;
  int64_t tokens, samples;
  const int64_t* token_ids;
  const int64_t* positions;
  void* const* key_cache;    // [layers]
  void* const* value_cache;  // [layers]
  const int64_t* sample_rows;
  int64_t* argmax;  // [samples]
  float* logits;    // [samples, vocab], or null
  int32_t num_blocks;
  int32_t first_op, end_op;
  int32_t threads;
  int32_t by_rows;  // whether a step of many rows may be cut into a part for each thread: best while none loses its core
  int64_t batch_number;  // equal ones have the same batch and threads, so that attention is planned once; 0: none
  double* op_seconds;  // [operations], to which the time of each is added; or null
  double cpu_seconds;  // out: CPU time of all threads; what they slept, or had no core, is not in it
};

struct Op {
  OpKind kind;
  union {
    EmbedOp embed;
    NormOp norm;
    ProductOp product;
    RotateAndStoreOp rotate;
    AttentionOp attention;
    HeadOp head;
    RouteOp route;
    OrderPairsOp order;
    GatherPairsOp gather;
    ExpertsOp experts;
    CombineOp combine;
    GatherSamplesOp samples;
  };
};

// Meeting point of the threads of one step.
struct Barrier {
  int32_t arrived;     // threads at the present meeting
  int32_t generation;  // meetings so far
  int32_t blocked;     // threads that gave up spinning
};

// How far the thread of a part of a step is, for those that wait for it. On a cache line of its own.
struct alignas(64) Progress {
  int32_t ops;      // all operations before this one are done
  int32_t blocked;  // threads that gave up spinning
};

// The items of one attention operation of the running step. Operations of the same shape and window share a plan.
struct AttentionWork {
  HfpCache cache;
  HfpAttentionArgs args;
  PlannedItems plan;
};

// Which experts the rows of the current layer go to: its tokens, or sampled ones. A pair is a row and one of its
// experts.
struct Routing {
  int32_t* experts;    // [rows, chosen], ascending in each row
  float* weights;      // [rows, chosen]
  int32_t* place;      // [rows, chosen], place of the pair in the order by expert
  int32_t* row;        // [pairs] in that order
  float* pair_weight;  // [pairs] in that order
  int32_t* first_pair;  // [kMaxExperts + 1], first pair of each expert
};

// What the threads of a running step share.
struct Run {
  const Step* step;
  const Op* ops;
  const Buffer* buffers;
  const RotaryTable* tables;
  HfpDtype type;  // element type of the buffers, the weights and the cache
  Barrier* barrier;          // unused by one thread
  Progress* progress;        // of a part of a step, right behind those of the parts before it; or null
  int32_t earlier_parts;     // so many of them store keys and values that this one needs
  AttentionWork* attention;  // [ops], filled in for attention operations
  UnitRange* units;          // [ops, threads]
  Routing routing;
  float* best_logit;         // [threads, samples]
  int64_t* best_index;       // [threads, samples]
  ScreenWork* screen;

  HFP_ALWAYS_INLINE int64_t rows(RowSet set) const { return set == RowSet::kTokens ? step->tokens : step->samples; }
  HFP_ALWAYS_INLINE int64_t rows(int32_t buffer) const { return rows(buffers[buffer].rows); }
  // The ranges that the threads begin with in an operation.
  HFP_ALWAYS_INLINE UnitRange* units_of(int32_t op, Share share) const { return units + int64_t(op) * share.count; }
};

}  // namespace hfp
