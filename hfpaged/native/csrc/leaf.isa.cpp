// One thread's share of each native leaf.
#include "leaf.h"
#include "ops_epilogue.h"
#include "ops_norm.h"
#include "ops_rotary.h"

namespace hfp {
namespace HFP_ISA {
namespace {

template <class T>
InputRows<T> input_rows(const HfpLeafInput& in) {
  return {static_cast<const T*>(in.data), in.width, static_cast<int>(in.rows)};
}

template <class T>
void multiply_linear(const InputRows<T>& in, const HfpLeafLinear& linear, int64_t begin, int64_t end,
                     const char* next) {
  OutputRows<T> out = {static_cast<T*>(linear.out), linear.out_width, linear.out_width};
  multiply<T>(in, linear.weight, begin, end, next, StoreEpilogue<T>{linear.weight, out, Activation::kNone});
}

// The units of all products are one range, of which each thread takes its share.
template <class T>
void linears(const HfpLeafLinears& args, Share share) {
  InputRows<T> in = input_rows<T>(args.in);
  int64_t total = 0, first = 0;
  for (int i = 0; i < args.count; i++) total += units_of<T>(in.count, args.linears[i].weight).count;
  int64_t begin = share.begin(total), end = share.end(total);
  for (int i = 0; i < args.count && first < end; i++) {
    int64_t units = units_of<T>(in.count, args.linears[i].weight).count;
    int64_t from = begin > first ? begin - first : 0, to = end - first < units ? end - first : units;
    const char* next = i + 1 < args.count ? args.linears[i + 1].weight.panel(0) : nullptr;
    if (from < to) multiply_linear<T>(in, args.linears[i], from, to, next);
    first += units;
  }
}

template <class T>
void mlp_inner(const HfpLeafMlp& args, const LeafInner& inner, Share share) {
  InputRows<T> in = input_rows<T>(args.in);
  OutputRows<T> out = {static_cast<T*>(inner.data), inner.stride, args.inner_width};
  const char* next = args.down.weight.panel(share.begin(args.down.weight.panel_count()));
  if (args.gated) multiply<T>(in, args.inner, share, next, GatedEpilogue<T>{args.inner, out, args.activation});
  else multiply<T>(in, args.inner, share, next, StoreEpilogue<T>{args.inner, out, args.activation});
}

template <class T>
void mlp_down(const HfpLeafMlp& args, const LeafInner& inner, Share share) {
  InputRows<T> in = {static_cast<const T*>(inner.data), inner.stride, static_cast<int>(args.in.rows)};
  int64_t units = units_of<T>(in.count, args.down.weight).count;
  multiply_linear<T>(in, args.down, share.begin(units), share.end(units), nullptr);
}

template <class T>
void norm(const HfpLeafNorm& args, Share share) {
  int width = args.in.width;
  for (int64_t row = share.begin(args.in.rows); row < share.end(args.in.rows); row++) {
    const T* x = static_cast<const T*>(args.in.data) + row * width;
    normalize_into(x, static_cast<T*>(args.out) + row * width, width, args.weights);
  }
}

template <class T>
void head(const HfpLeafHead& args, float* best, int64_t* best_index, Share share) {
  for (int64_t i = 0; i < args.in.rows; i++) {
    best[i] = -__builtin_inff();
    best_index[i] = 0;
  }
  multiply<T>(input_rows<T>(args.in), args.head.weight, share, nullptr,
              HeadEpilogue<T>{args.head, best, best_index, nullptr});
}

template <class T>
void rotate_states(const HfpLeafRotation& args, Share share) {
  RotateAndStoreOp op = {};
  op.rotary_dim = args.rotary_dim;
  op.style = args.style;
  op.round_products = args.round_products;
  RotaryTable table = {args.cosine, args.sine, args.tokens};
  int heads = args.heads + args.kv_heads;
  for (int64_t item = share.begin(args.tokens * heads); item < share.end(args.tokens * heads); item++) {
    int64_t token = item / heads, head = item % heads, kv_head = head - args.heads;
    T* state = kv_head < 0 ? static_cast<T*>(args.query) + (token * args.heads + head) * args.dim
                           : static_cast<T*>(args.key) + (token * args.kv_heads + kv_head) * args.dim;
    rotate(state, table, token, op);
  }
}

// Calls body with a value of the element type.
template <class Body>
void with_type(HfpDtype dtype, Body&& body) {
  if (dtype == HFP_FP32) body(float{});
  else if (dtype == HFP_BF16) body(bf16{});
  else body(fp16{});
}

}  // namespace

void leaf_linears(const HfpLeafLinears& args, Share share) {
  with_type(args.in.dtype, [&](auto type) { linears<decltype(type)>(args, share); });
}

void leaf_mlp_inner(const HfpLeafMlp& args, const LeafInner& inner, Share share) {
  with_type(args.in.dtype, [&](auto type) { mlp_inner<decltype(type)>(args, inner, share); });
}

void leaf_mlp_down(const HfpLeafMlp& args, const LeafInner& inner, Share share) {
  with_type(args.in.dtype, [&](auto type) { mlp_down<decltype(type)>(args, inner, share); });
}

void leaf_norm(const HfpLeafNorm& args, Share share) {
  with_type(args.in.dtype, [&](auto type) { norm<decltype(type)>(args, share); });
}

void leaf_head(const HfpLeafHead& args, float* best, int64_t* best_index, Share share) {
  with_type(args.in.dtype, [&](auto type) { head<decltype(type)>(args, best, best_index, share); });
}

void leaf_rotate(const HfpLeafRotation& args, Share share) {
  with_type(args.dtype, [&](auto type) { rotate_states<decltype(type)>(args, share); });
}

}  // namespace HFP_ISA
}  // namespace hfp
