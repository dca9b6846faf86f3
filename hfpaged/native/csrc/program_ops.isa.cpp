// Runs the operations of a step program. Each thread does its share of one operation, then waits for the others; or one
// thread does all of a step, or of a part of one (row_parts.h).
#include <time.h>

#include "ops_cache.h"
#include "ops_epilogue.h"
#include "ops_head.h"
#include "ops_norm.h"
#include "ops_rotary.h"
#include "ops_routing.h"
#include "program_barrier.h"
#include "units.h"

namespace hfp {
namespace HFP_ISA {
namespace {

template <class T>
T* row_of(const Buffer& buffer, int64_t row) {
  return reinterpret_cast<T*>(buffer.data) + row * buffer.stride;
}

template <class T>
OutputRows<T> output_rows(const Buffer& buffer, int width) {
  return {reinterpret_cast<T*>(buffer.data), buffer.stride, width};
}

template <class T>
void embed(const Run& run, const EmbedOp& op, Share share) {
  int64_t tokens = run.step->tokens;
  for (int64_t t = share.begin(tokens); t < share.end(tokens); t++) {
    const T* source = static_cast<const T*>(op.table) + run.step->token_ids[t] * op.width;
    T* out = row_of<T>(run.buffers[op.out], t);
    Vec16 scale = splat16(op.scale);
    for_each16(op.width, [&](int i, auto count) {
      store_upto16(out + i, load_upto16(source + i, count) * scale, count);
    });
  }
}

template <class T>
void norm(const Run& run, const NormOp& op, Share share) {
  int64_t items = run.rows(op.out) * op.groups;
  for (int64_t item = share.begin(items); item < share.end(items); item++) {
    int64_t row = item / op.groups, column = item % op.groups * op.width;
    const T* x = row_of<T>(run.buffers[op.in], row) + op.in_column + column;
    T* y = row_of<T>(run.buffers[op.out], row) + op.out_column + column;
    if (op.residual < 0) {
      normalize_into(x, y, op.width, op.weights);
      continue;
    }
    const T* residual = row_of<T>(run.buffers[op.residual], row) + column;
    normalize(x, op.width, op.weights, [&](int i, auto count, Vec16 value) {
      value = rounded16<T>(value);
      if (op.multiplier != 1.f) value = rounded16<T>(value * splat16(op.multiplier));
      store_upto16(y + i, load_upto16(residual + i, count) + value, count);
    });
  }
}

bool is_screened(const Run& run, const HeadOp& op) {
  return op.screen.codes && !run.step->logits && run.step->samples <= kScreenRows;
}

// What this thread reads first in the product that follows, to be fetched at the end of this one.
const char* first_panel_of_next_product(const Run& run, int32_t op_index, Share share) {
  for (int32_t i = op_index + 1; i < run.step->end_op; i++) {
    const Op& op = run.ops[i];
    if (op.kind != OpKind::kProduct && op.kind != OpKind::kHead) continue;
    const PackedWeight& weight = op.kind == OpKind::kProduct ? op.product.weight : op.head.weight;
    // A kernel fetches only what it knows the layout of.
    if (!weight.strips != !run.ops[op_index].product.weight.strips) return nullptr;
    int64_t panel = share.begin(weight.panel_count());
    if (op.kind == OpKind::kHead && is_screened(run, op.head))
      return reinterpret_cast<const char*>(op.head.screen.panel(panel));
    if (!weight.strips) return weight.panel(panel);
    return reinterpret_cast<const char*>(weight.strips->strips + panel * kPanelVectors);
  }
  return nullptr;
}

template <class T>
InputRows<T> input_rows(const Run& run, int32_t buffer) {
  const Buffer& in = run.buffers[buffer];
  return {reinterpret_cast<const T*>(in.data), in.stride, static_cast<int>(run.rows(buffer))};
}

// Units [begin, end) of a product.
template <class T>
void product(const Run& run, const ProductOp& op, int64_t begin, int64_t end, const char* next) {
  InputRows<T> in = input_rows<T>(run, op.in);
  OutputRows<T> out = output_rows<T>(run.buffers[op.out], op.out_width);
  switch (op.epilogue) {
    case Epilogue::kStore:
      return multiply<T>(in, op.weight, begin, end, next, StoreEpilogue<T>{op.weight, out, op.activation});
    case Epilogue::kGated:
      return multiply<T>(in, op.weight, begin, end, next, GatedEpilogue<T>{op.weight, out, op.activation});
    case Epilogue::kResidual: {
      OutputRows<const T> other = {nullptr, 0, 0};
      if (op.other >= 0) other = output_rows<const T>(run.buffers[op.other], op.out_width);
      return multiply<T>(in, op.weight, begin, end, next, ResidualEpilogue<T>{op.weight, out, op.multiplier, other});
    }
  }
}

template <class T>
void product(const Run& run, int32_t index, Share share) {
  const ProductOp& op = run.ops[index].product;
  int64_t own_end = share.end(units_of<T>(run.rows(op.in), op.weight).count);
  const char* next = first_panel_of_next_product(run, index, share);
  work_through(run.units_of(index, share), share, [&](int64_t begin, int64_t end) {
    product<T>(run, op, begin, end, end == own_end ? next : nullptr);
  });
}

template <class T>
void normalize_heads(const TokenHeads<T>& heads, const NormWeights& weights) {
  for (int head = 0; weights.gamma && head < heads.count; head++) {
    T* x = heads.data + head * heads.dim;
    normalize_into(x, x, heads.dim, weights);
  }
}

// Tokens [begin, end).
template <class T>
void rotate_and_store(const Run& run, const RotateAndStoreOp& op, int64_t begin, int64_t end) {
  const AttentionShape& shape = op.shape;
  const Step& step = *run.step;
  CacheSlots<T> slots(step, shape);
  for (int64_t token = begin; token < end; token++) {
    T* queries = row_of<T>(run.buffers[op.qkv], token);
    T *keys = queries + shape.heads * shape.key_dim, *values = keys + shape.kv_heads * shape.key_dim;
    normalize_heads<T>({queries, shape.heads, shape.key_dim}, op.query_norm);
    normalize_heads<T>({keys, shape.kv_heads, shape.key_dim}, op.key_norm);
    if (op.style != RotaryStyle::kNone) {
      TokenHeads<T> both = {queries, shape.heads + shape.kv_heads, shape.key_dim};
      rotate(both, run.tables[op.table], step.positions[token], op);
    }
    if (step.batch.slots) slots.store(token, keys, values);
  }
}

void attend(const Run& run, int32_t index, Share share) {
  wait_for_earlier_parts(run, index);
  const AttentionWork& work = run.attention[index];
  work_through_items(work.plan, work.args, run.units_of(index, share), share);
}

template <class T>
void screened_head(const Run& run, int32_t index, const InputRows<T>& in, Share share, HeadEpilogue<T>& epilogue) {
  ScreenedHead<T> screened(run.ops[index].head, in, *run.screen);
  screened.write_rows(share);
  wait_for_all(run.barrier, share);
  work_through(run.units_of(index, share), share, [&](int64_t begin, int64_t end) { screened.bound(begin, end); });
  wait_for_all(run.barrier, share);
  screened.multiply_rest(epilogue);
}

template <class T>
void head(const Run& run, int32_t index, Share share) {
  const HeadOp& op = run.ops[index].head;
  int64_t samples = run.step->samples;
  float* best = run.best_logit + share.index * samples;
  int64_t* best_index = run.best_index + share.index * samples;
  for (int64_t i = 0; i < samples; i++) {
    best[i] = -__builtin_inff();
    best_index[i] = 0;
  }
  InputRows<T> in = input_rows<T>(run, op.in);
  HeadEpilogue<T> epilogue = {op, best, best_index, run.step->logits};
  if (is_screened(run, op)) return screened_head<T>(run, index, in, share, epilogue);
  work_through(run.units_of(index, share), share, [&](int64_t begin, int64_t end) {
    multiply<T>(in, op.weight, begin, end, nullptr, epilogue);
  });
}

template <class T>
void route(const Run& run, const RouteOp& op, Share share) {
  int64_t rows = run.rows(op.logits);
  for (int64_t row = share.begin(rows); row < share.end(rows); row++) {
    int64_t first = row * op.chosen;
    route_row(row_of<T>(run.buffers[op.logits], row), op, run.routing.experts + first, run.routing.weights + first);
  }
}

template <class T>
void gather_pairs(const Run& run, const GatherPairsOp& op, Share share) {
  int64_t pairs = run.rows(op.in) * op.chosen;
  for (int64_t i = share.begin(pairs); i < share.end(pairs); i++) {
    const T* source = row_of<T>(run.buffers[op.in], run.routing.row[i]);
    std::memcpy(row_of<T>(run.buffers[op.out], i), source, sizeof(T) * op.width);
  }
}

template <class T>
void one_expert(const Run& run, const ExpertsOp& op, int expert, int64_t begin, int64_t end) {
  const PackedWeight& weight = op.weights[expert];
  int32_t first = run.routing.first_pair[expert], rows = run.routing.first_pair[expert + 1] - first;
  const Buffer &in_buffer = run.buffers[op.in], &out_buffer = run.buffers[op.out];
  InputRows<T> in = {row_of<T>(in_buffer, first), in_buffer.stride, rows};
  OutputRows<T> out = {row_of<T>(out_buffer, first), out_buffer.stride, op.out_width};
  if (op.epilogue == Epilogue::kGated)
    multiply<T>(in, weight, begin, end, nullptr, GatedEpilogue<T>{weight, out, op.activation});
  else
    multiply<T>(in, weight, begin, end, nullptr, WeightedEpilogue<T>{weight, out, run.routing.pair_weight + first});
}

// The units of all experts' products are one range, of which each thread takes its share.
template <class T>
void experts(const Run& run, const ExpertsOp& op, Share share) {
  auto units_of_expert = [&](int e) {
    int rows = run.routing.first_pair[e + 1] - run.routing.first_pair[e];
    return rows ? units_of<T>(rows, op.weights[e]).count : 0;
  };
  int64_t total = 0;
  for (int e = 0; e < op.experts; e++) total += units_of_expert(e);
  int64_t begin = share.begin(total), end = share.end(total), first = 0;
  for (int e = 0; e < op.experts && first < end; e++) {
    int64_t units = units_of_expert(e);
    int64_t from = begin > first ? begin - first : 0, to = end - first < units ? end - first : units;
    if (from < to) one_expert<T>(run, op, e, from, to);
    first += units;
  }
}

template <class T>
void combine(const Run& run, const CombineOp& op, Share share) {
  int64_t rows = run.rows(op.out);
  for (int64_t row = share.begin(rows); row < share.end(rows); row++) {
    T* out = row_of<T>(run.buffers[op.out], row);
    for_each16(op.width, [&](int i, auto count) {
      Vec16 sum = zero16();
      for (int c = 0; c < op.chosen; c++) {
        const T* pair = row_of<T>(run.buffers[op.in], run.routing.place[row * op.chosen + c]);
        sum = rounded16<T>(sum + load_upto16(pair + i, count));
      }
      if (op.residual >= 0) {
        if (op.multiplier != 1.f) sum = rounded16<T>(sum * splat16(op.multiplier));
        sum = load_upto16(row_of<T>(run.buffers[op.residual], row) + i, count) + sum;
      }
      store_upto16(out + i, sum, count);
    });
  }
}

template <class T>
void gather_samples(const Run& run, const GatherSamplesOp& op, Share share) {
  int64_t samples = run.step->samples;
  for (int64_t i = share.begin(samples); i < share.end(samples); i++) {
    const T* source = row_of<T>(run.buffers[op.in], run.step->sample_rows[i]);
    std::memcpy(row_of<T>(run.buffers[op.out], i), source, sizeof(T) * op.width);
  }
}

double seconds_now() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return double(now.tv_sec) + 1e-9 * double(now.tv_nsec);
}

template <class T>
void run_op(const Run& run, int32_t index, Share share) {
  const Op& op = run.ops[index];
  switch (op.kind) {
    case OpKind::kEmbed: return embed<T>(run, op.embed, share);
    case OpKind::kNorm: return norm<T>(run, op.norm, share);
    case OpKind::kProduct: return product<T>(run, index, share);
    case OpKind::kRotateAndStore:
      return work_through(run.units_of(index, share), share, [&](int64_t begin, int64_t end) {
        rotate_and_store<T>(run, op.rotate, begin, end);
      });
    case OpKind::kAttention: return attend(run, index, share);
    case OpKind::kHead: return head<T>(run, index, share);
    case OpKind::kRoute: return route<T>(run, op.route, share);
    case OpKind::kOrderPairs:
      if (share.index == 0) order_pairs(run.routing, op.order, run.rows(op.order.logits));
      return;
    case OpKind::kGatherPairs: return gather_pairs<T>(run, op.gather, share);
    case OpKind::kExperts: return experts<T>(run, op.experts, share);
    case OpKind::kCombine: return combine<T>(run, op.combine, share);
    case OpKind::kGatherSamples: return gather_samples<T>(run, op.samples, share);
  }
}

// Units of an operation that threads take from each other; 0: each does its share.
template <class T>
int64_t shared_units(const Run& run, int32_t index) {
  const Op& op = run.ops[index];
  switch (op.kind) {
    case OpKind::kProduct: return units_of<T>(run.rows(op.product.in), op.product.weight).count;
    case OpKind::kHead:
      if (is_screened(run, op.head)) return ScreenedHead<T>::units(op.head, run.step->samples).count;
      return units_of<T>(run.rows(op.head.in), op.head.weight).count;
    case OpKind::kAttention: return run.attention[index].plan.count;
    case OpKind::kRotateAndStore: return run.step->tokens;
    default: return 0;
  }
}

// Gives this thread its range of the units of every operation.
template <class T>
void deal_units(const Run& run, Share share) {
  for (int32_t index = run.step->first_op; index < run.step->end_op; index++)
    deal_units(run.units_of(index, share), share, shared_units<T>(run, index));
}

template <class T>
void run_ops(const Run& run, Share share) {
  double* op_seconds = share.index == 0 ? run.step->op_seconds : nullptr;
  deal_units<T>(run, share);
  wait_for_all(run.barrier, share);
  double began = op_seconds ? seconds_now() : 0;
  for (int32_t index = run.step->first_op; index < run.step->end_op; index++) {
    run_op<T>(run, index, share);
    wait_for_all(run.barrier, share);
    if (run.progress) announce(&run.progress->ops, index + 1, &run.progress->blocked);
    if (!op_seconds) continue;
    double ended = seconds_now();
    op_seconds[index] += ended - began;
    began = ended;
  }
}

}  // namespace

int64_t screen_rows() { return kScreenRows; }

void run_share(const Run& run, Share share) {
  if (run.type == HFP_FP32) run_ops<float>(run, share);
  else if (run.type == HFP_BF16) run_ops<bf16>(run, share);
  else run_ops<fp16>(run, share);
}

}  // namespace HFP_ISA
}  // namespace hfp
