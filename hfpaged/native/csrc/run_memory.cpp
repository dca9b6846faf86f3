#include "run_memory.h"

#include <algorithm>

#include "isa.h"

HFP_DECLARE_VARIANTS(int64_t screen_rows())

namespace hfp {
namespace {

HfpAttentionArgs attention_args(const Buffer* buffers, const Step& step, const AttentionOp& op) {
  const Buffer &qkv = buffers[op.qkv], &out = buffers[op.out];
  HfpAttentionArgs args = {};
  args.batch = &step.batch;
  args.query = qkv.data;
  args.output = out.data;
  args.sinks = op.sinks;
  args.query_token_stride = qkv.stride;
  args.query_head_stride = op.shape.key_dim;
  args.output_token_stride = out.stride;
  args.output_head_stride = op.shape.value_dim;
  args.num_heads = op.shape.heads;
  args.window = op.window;
  args.scale = op.scale;
  args.softcap = op.softcap;
  args.num_threads = step.threads;
  return args;
}

HfpCache cache_of(HfpDtype type, const Step& step, const AttentionShape& shape) {
  return {step.key_cache[shape.layer], step.value_cache[shape.layer], type, step.num_blocks,
          shape.kv_heads, shape.key_dim, shape.value_dim};
}

template <class T>
void grow(std::vector<T>& memory, size_t size) {
  memory.resize(std::max(memory.size(), size));
}

}  // namespace

bool RunMemory::SharedPlan::serves(const AttentionOp& op) const {
  return shape.heads == op.shape.heads && shape.kv_heads == op.shape.kv_heads && shape.key_dim == op.shape.key_dim &&
         shape.value_dim == op.shape.value_dim && window == op.window;
}

HfpProgramStatus RunMemory::prepare(const Code& code, const Buffer* buffers, const Step& step, int64_t first_token) {
  reserve_routing(std::max(step.tokens, step.samples) * code.chosen_experts);
  grow(best_logit_, step.threads * step.samples);
  grow(best_index_, step.threads * step.samples);
  reserve_screen(code, step);
  grow(units_, code.ops.size() * step.threads);
  return plan_attention(code, buffers, step, first_token);
}

Run RunMemory::run(const Code& code, const Buffer* buffers, const Step& step, Barrier* barrier) {
  Run run = {};
  run.step = &step;
  run.ops = code.ops.data();
  run.buffers = buffers;
  run.tables = code.tables.data();
  run.type = code.type;
  run.barrier = barrier;
  run.attention = attention_.data();
  run.units = units_.data();
  run.routing = routing_;
  run.best_logit = best_logit_.data();
  run.best_index = best_index_.data();
  run.screen = screen_.work();
  return run;
}

void RunMemory::write_argmax(const Step& step, int threads) const {
  for (int64_t i = 0; i < step.samples; i++) {
    int64_t best = i;
    for (int64_t other = i + step.samples; other < threads * step.samples; other += step.samples) {
      bool is_larger = best_logit_[other] > best_logit_[best];
      bool is_earlier = best_logit_[other] == best_logit_[best] && best_index_[other] < best_index_[best];
      if (is_larger || is_earlier) best = other;
    }
    step.argmax[i] = best_index_[best];
  }
}

// Room for the routing of one layer; the layers use it one after the other.
void RunMemory::reserve_routing(int64_t pairs) {
  if (!pairs) return;
  grow(routing_indices_, 3 * pairs + kMaxExperts + 1);
  grow(routing_weights_, 2 * pairs);
  int32_t* indices = routing_indices_.data();
  float* weights = routing_weights_.data();
  routing_ = {indices,         weights,         indices + pairs, indices + 2 * pairs,
              weights + pairs, indices + 3 * pairs};
}

void RunMemory::reserve_screen(const Code& code, const Step& step) {
  if (step.logits || step.samples > HFP_PICK_VARIANT(screen_rows)()) return;
  for (const Op& op : code.ops)
    if (op.kind == OpKind::kHead && op.head.screen.codes) screen_.reserve(op.head, step.samples);
}

RunMemory::SharedPlan& RunMemory::plan_for(const AttentionOp& op) {
  for (SharedPlan& plan : plans_)
    if (plan.serves(op)) return plan;
  plans_.push_back({op.shape, op.window, std::make_unique<AttentionPlan>()});
  return plans_.back();
}

// Once for all layers of a kind.
HfpProgramStatus RunMemory::plan_attention(const Code& code, const Buffer* buffers, const Step& step,
                                           int64_t first_token) {
  Rows rows = {step.batch_number, first_token, step.tokens};
  attention_.resize(code.ops.size());
  for (SharedPlan& shared : plans_) shared.is_built = step.batch_number && shared.rows == rows;
  for (int32_t i = step.first_op; i < step.end_op; i++) {
    if (code.ops[i].kind != OpKind::kAttention) continue;
    const AttentionOp& op = code.ops[i].attention;
    AttentionWork& work = attention_[i];
    work.cache = cache_of(code.type, step, op.shape);
    work.args = attention_args(buffers, step, op);
    work.args.cache = &work.cache;
    SharedPlan& shared = plan_for(op);
    if (!shared.is_built) {
      shared.rows = {};
      if (check_attention(&work.args) != HFP_OK) return HFP_PROGRAM_BAD_BATCH;
      shared.plan->build(work.args, step.threads);
      shared.rows = rows;
      shared.is_built = true;
    }
    work.plan = shared.plan->items();
  }
  return HFP_PROGRAM_OK;
}

}  // namespace hfp
