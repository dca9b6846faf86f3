// Single modules of a model as native calls on the caller's tensors: linear modules, norms, MLPs, the rotation of
// queries and keys, and the head. For models whose layers run as Python code; the step program (program.h) is the same
// kernels without that code in between.
//
// This header is the C ABI that hfpaged/runtime/leaves/abi.py mirrors field by field. Tensors are contiguous and of one
// dtype.
// A row of any result has the same bits alone and in any batch, on any number of threads.
#pragma once
#include "abi.h"
#include "program.h"

// Rows that a module reads.
struct HfpLeafInput {
  const void* data;  // [rows, width]; for 16-bit types width is even
  int64_t rows;
  int32_t width;
  HfpDtype dtype;
  int32_t threads;  // at most
};

// One linear module: out = in * weight^T + bias.
struct HfpLeafLinear {
  hfp::PackedWeight weight;
  void* out;  // [rows, out_width]
  int32_t out_width;
};

// Linear modules that read the same rows.
struct HfpLeafLinears {
  HfpLeafInput in;
  const HfpLeafLinear* linears;
  int32_t count;
};

// out = down(activation(gate) * up), or down(activation(inner)).
struct HfpLeafMlp {
  HfpLeafInput in;
  hfp::PackedWeight inner;  // gated: panels of 32 gate columns, then their 32 up columns
  HfpLeafLinear down;
  int32_t inner_width;
  int32_t gated;
  hfp::Activation activation;
};

struct HfpLeafNorm {
  HfpLeafInput in;
  hfp::NormWeights weights;
  void* out;  // [rows, width]; may be the input
};

// The argmax of every row's logits, the first of equal ones.
struct HfpLeafHead {
  HfpLeafInput in;
  hfp::HeadOp head;
  int64_t* argmax;  // [rows]
};

// Rotates queries and keys in place.
struct HfpLeafRotation {
  void* query;          // [tokens, heads, dim]
  void* key;            // [tokens, kv_heads, dim]
  const float* cosine;  // [tokens, rotary_dim]
  const float* sine;
  int64_t tokens;
  int32_t heads, kv_heads, dim;
  int32_t rotary_dim;
  hfp::RotaryStyle style;
  int32_t round_products;  // as in RotateAndStoreOp
  HfpDtype dtype;
  int32_t threads;
};

HFP_API void hfp_leaf_use_threads(int32_t threads);
HFP_API void hfp_leaf_linears(const HfpLeafLinears* args);
HFP_API int hfp_leaf_mlp(const HfpLeafMlp* args);
HFP_API void hfp_leaf_norm(const HfpLeafNorm* args);
HFP_API int hfp_leaf_head(const HfpLeafHead* args);
HFP_API void hfp_leaf_rotate(const HfpLeafRotation* args);

namespace hfp {

// What an MLP's first product writes and its second reads.
struct LeafInner {
  void* data;      // [rows, stride]
  int64_t stride;  // elements
};

}  // namespace hfp
