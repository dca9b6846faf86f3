// Building and running step programs: the C ABI, the buffers and the parallel region.
#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <memory>
#include <new>
#include <vector>
#if defined(_OPENMP)
#include <omp.h>
#endif

#include "attention_plan.h"
#include "isa.h"
#include "program.h"
#include "screen_memory.h"

HFP_DECLARE_VARIANTS(void run_share(const Run& run, Share share))
HFP_DECLARE_VARIANTS(int64_t screen_rows())

namespace hfp {
namespace {

constexpr int64_t kCacheLine = 64;

// A plan and what it depends on besides the batch.
struct SharedPlan {
  AttentionShape shape;
  int32_t window;
  std::unique_ptr<AttentionPlan> plan;
  int64_t batch_number = 0;  // of the step that it was last built for

  bool is_of(const Step& step) const { return step.batch_number && step.batch_number == batch_number; }

  bool serves(const AttentionOp& op) const {
    return shape.heads == op.shape.heads && shape.kv_heads == op.shape.kv_heads &&
           shape.key_dim == op.shape.key_dim && shape.value_dim == op.shape.value_dim && window == op.window;
  }
};

// What the indices of a step must stay below.
struct StepLimits {
  int64_t positions, vocab;
};

struct Program {
  HfpDtype type;
  std::vector<Op> ops;
  std::vector<Buffer> buffers;
  std::vector<RotaryTable> tables;
  std::vector<AttentionWork> attention;
  std::vector<UnitRange> units;
  std::vector<SharedPlan> plans;
  int64_t chosen_experts = 0;  // of a token, at most
  std::vector<int32_t> routing_indices;
  std::vector<float> routing_weights;
  Routing routing = {};
  std::vector<float> best_logit;
  std::vector<int64_t> best_index;
  ScreenMemory screen;

  ~Program() {
    for (Buffer& buffer : buffers)
      if (!buffer.is_bound) std::free(buffer.data);
  }

  int64_t element_bytes() const { return type == HFP_FP32 ? 4 : 2; }

  void add_plan_for(const AttentionOp& op);
  int64_t rows_of(const Step& step, RowSet set) const;
  void reserve_routing(size_t pairs);
  void reserve_screen(const Step& step);
  bool reserve(const Step& step);
  StepLimits limits(const Step& step) const;
  HfpProgramStatus check(const Step& step) const;
  int plan_attention(const Step& step);
  void run(Step& step);
};

int64_t stride_of(int64_t width, int64_t element_bytes) {
  int64_t bytes = (width * element_bytes + kCacheLine - 1) / kCacheLine * kCacheLine;
  // Rows a multiple of 1 KiB apart would fall into few sets of the first-level cache.
  if (bytes % 1024 == 0) bytes += kCacheLine;
  return bytes / element_bytes;
}

void Program::add_plan_for(const AttentionOp& op) {
  for (const SharedPlan& plan : plans)
    if (plan.serves(op)) return;
  plans.push_back({op.shape, op.window, std::make_unique<AttentionPlan>(), 0});
}

int64_t Program::rows_of(const Step& step, RowSet set) const {
  switch (set) {
    case RowSet::kTokens: return step.tokens;
    case RowSet::kSamples: return step.samples;
    case RowSet::kExpertPairs: return std::max(step.tokens, step.samples) * chosen_experts;
  }
  return 0;
}

// Room for the routing of one layer; the layers use it one after the other.
void Program::reserve_routing(size_t pairs) {
  if (!pairs) return;
  routing_indices.resize(std::max(routing_indices.size(), 3 * pairs + kMaxExperts + 1));
  routing_weights.resize(std::max(routing_weights.size(), 2 * pairs));
  int32_t* indices = routing_indices.data();
  float* weights = routing_weights.data();
  routing = {indices,         weights,         indices + pairs, indices + 2 * pairs,
             weights + pairs, indices + 3 * pairs};
}

void Program::reserve_screen(const Step& step) {
  if (step.logits || step.samples > HFP_PICK_VARIANT(screen_rows)()) return;
  for (const Op& op : ops)
    if (op.kind == OpKind::kHead && op.head.screen.codes) screen.reserve(op.head, step.samples);
}

bool Program::reserve(const Step& step) {
  for (Buffer& buffer : buffers) {
    int64_t rows = rows_of(step, buffer.rows);
    if (buffer.is_bound || rows <= buffer.capacity) continue;
    int64_t capacity = std::max(rows, buffer.capacity * 3 / 2);
    int64_t bytes = capacity * buffer.stride * element_bytes();
    char* data = static_cast<char*>(std::aligned_alloc(kCacheLine, bytes));
    if (!data) return false;
    std::memset(data, 0, bytes);
    std::free(buffer.data);
    buffer.data = data;
    buffer.capacity = capacity;
  }
  reserve_routing(rows_of(step, RowSet::kExpertPairs));
  best_logit.resize(std::max<size_t>(best_logit.size(), step.threads * step.samples));
  best_index.resize(best_logit.size());
  reserve_screen(step);
  units.resize(std::max(units.size(), ops.size() * step.threads));
  return true;
}

// Positions that all rotary tables of the step's operations have, and entries of its embedding table; no limit without.
StepLimits Program::limits(const Step& step) const {
  StepLimits limits = {INT64_MAX, INT64_MAX};
  for (int32_t i = step.first_op; i < step.end_op; i++) {
    const Op& op = ops[i];
    if (op.kind == OpKind::kEmbed) limits.vocab = op.embed.vocab;
    if (op.kind == OpKind::kRotateAndStore && op.rotate.style != RotaryStyle::kNone)
      limits.positions = std::min(limits.positions, tables[op.rotate.table].positions);
  }
  return limits;
}

// Whether `count` indices, if there are any, are in [0, end).
bool are_below(const int64_t* indices, int64_t count, int64_t end) {
  for (int64_t i = 0; indices && i < count; i++)
    if (indices[i] < 0 || indices[i] >= end) return false;
  return true;
}

HfpProgramStatus Program::check(const Step& step) const {
  if (step.threads < 1 || step.tokens < 1 || step.samples < 0) return HFP_PROGRAM_BAD_STEP;
  if (step.first_op < 0 || step.end_op > int32_t(ops.size())) return HFP_PROGRAM_BAD_STEP;
  StepLimits limit = limits(step);
  int64_t slots = int64_t(step.num_blocks) * step.batch.block_size;
  if (!are_below(step.token_ids, step.tokens, limit.vocab)) return HFP_PROGRAM_BAD_TOKEN;
  if (!are_below(step.positions, step.tokens, limit.positions)) return HFP_PROGRAM_BAD_POSITION;
  if (!are_below(step.batch.slots, step.tokens, slots)) return HFP_PROGRAM_BAD_BATCH;
  if (!are_below(step.sample_rows, step.samples, step.tokens)) return HFP_PROGRAM_BAD_SAMPLE_ROW;
  return HFP_PROGRAM_OK;
}

HfpAttentionArgs attention_args(const Program& program, const Step& step, const AttentionOp& op) {
  const Buffer &qkv = program.buffers[op.qkv], &out = program.buffers[op.out];
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

HfpCache cache_of(const Program& program, const Step& step, const AttentionShape& shape) {
  return {step.key_cache[shape.layer], step.value_cache[shape.layer], program.type, step.num_blocks,
          shape.kv_heads, shape.key_dim, shape.value_dim};
}

// Cuts the attention of the step into items, once for all layers of a kind.
int Program::plan_attention(const Step& step) {
  attention.resize(ops.size());
  std::vector<bool> built(plans.size());
  for (int32_t i = step.first_op; i < step.end_op; i++) {
    if (ops[i].kind != OpKind::kAttention) continue;
    const AttentionOp& op = ops[i].attention;
    AttentionWork& work = attention[i];
    work.cache = cache_of(*this, step, op.shape);
    work.args = attention_args(*this, step, op);
    work.args.cache = &work.cache;
    size_t index = 0;
    while (!plans[index].serves(op)) index++;
    AttentionPlan& plan = *plans[index].plan;
    if (!built[index] && !plans[index].is_of(step)) {
      plans[index].batch_number = 0;
      if (int status = check_attention(&work.args)) return status;
      plan.build(work.args, step.threads);
      plans[index].batch_number = step.batch_number;
    }
    built[index] = true;
    work.plan = plan.items();
    work.at_once = plan.items_at_once();
    work.next = 0;
  }
  return HFP_OK;
}

// The largest logit that any thread has found, the first of equal ones.
void merge_argmax(const Run& run, int threads) {
  int64_t samples = run.step->samples;
  for (int64_t i = 0; i < samples; i++) {
    int64_t best = i;
    for (int64_t other = i + samples; other < threads * samples; other += samples) {
      bool is_larger = run.best_logit[other] > run.best_logit[best];
      bool is_earlier = run.best_logit[other] == run.best_logit[best] && run.best_index[other] < run.best_index[best];
      if (is_larger || is_earlier) best = other;
    }
    run.step->argmax[i] = run.best_index[best];
  }
}

double thread_cpu_seconds() {
  timespec now;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return double(now.tv_sec) + 1e-9 * double(now.tv_nsec);
}

// Runs `work(share)` on up to `threads` threads that pass `barrier`. Returns the CPU time of all of them.
template <class Work>
double run_shares(int threads, Barrier& barrier, Work&& work) {
  double cpu_seconds = 0;
  auto run_timed = [&](Share share) {
    double before = thread_cpu_seconds();
    work(share);
    return thread_cpu_seconds() - before;
  };
#if defined(_OPENMP)
  if (threads > 1) {
#pragma omp parallel num_threads(threads) reduction(+ : cpu_seconds)
    {
#pragma omp single
      barrier.threads = omp_get_num_threads();  // the runtime may grant fewer than were asked for
      cpu_seconds = run_timed(Share{omp_get_thread_num(), barrier.threads});
    }
    return cpu_seconds;
  }
#endif
  // Without a region: a team of one between two larger ones would be made anew, and they too.
  barrier.threads = 1;
  return run_timed(Share{0, 1});
}

void Program::run(Step& step) {
  auto run_share = HFP_PICK_VARIANT(run_share);
  Barrier barrier = {};
  Run run = {&step,    ops.data(),       buffers.data(), tables.data(), type,
             &barrier, attention.data(), units.data(),   routing,       best_logit.data(),
             best_index.data(), screen.work()};
  step.cpu_seconds = run_shares(step.threads, barrier, [&](Share share) { run_share(run, share); });
  bool has_head = step.end_op > 0 && ops[step.end_op - 1].kind == OpKind::kHead;
  if (has_head) merge_argmax(run, barrier.threads);
}

template <class Desc>
bool copy_desc(Desc& target, const void* source, int64_t bytes) {
  if (bytes != int64_t(sizeof(Desc))) return false;
  std::memcpy(&target, source, sizeof(Desc));
  return true;
}

bool fill(Op& op, const void* desc, int64_t bytes) {
  switch (op.kind) {
    case OpKind::kEmbed: return copy_desc(op.embed, desc, bytes);
    case OpKind::kNorm: return copy_desc(op.norm, desc, bytes);
    case OpKind::kProduct: return copy_desc(op.product, desc, bytes);
    case OpKind::kRotateAndStore: return copy_desc(op.rotate, desc, bytes);
    case OpKind::kAttention: return copy_desc(op.attention, desc, bytes);
    case OpKind::kHead: return copy_desc(op.head, desc, bytes);
    case OpKind::kRoute: return copy_desc(op.route, desc, bytes) && op.route.experts <= kMaxExperts;
    case OpKind::kOrderPairs: return copy_desc(op.order, desc, bytes);
    case OpKind::kGatherPairs: return copy_desc(op.gather, desc, bytes);
    case OpKind::kExperts: return copy_desc(op.experts, desc, bytes);
    case OpKind::kCombine: return copy_desc(op.combine, desc, bytes);
    case OpKind::kGatherSamples: return copy_desc(op.samples, desc, bytes);
  }
  return false;
}

}  // namespace
}  // namespace hfp

using hfp::Program;

// Lets parallel regions of the calling thread, those of PyTorch too, have `threads` threads from now on.
HFP_API void hfp_use_threads(int32_t threads) {
#if defined(_OPENMP)
  omp_set_num_threads(threads);
#else
  (void)threads;
#endif
}

HFP_API Program* hfp_program_create(int32_t dtype) {
  Program* program = new (std::nothrow) Program{};
  if (program) program->type = HfpDtype(dtype);
  return program;
}

HFP_API void hfp_program_destroy(Program* program) { delete program; }

// Adds a buffer of `width` elements a row; returns its index.
HFP_API int32_t hfp_program_add_buffer(Program* program, int32_t width, int32_t row_set) {
  hfp::Buffer buffer = {};
  buffer.width = width;
  buffer.rows = hfp::RowSet(row_set);
  buffer.stride = hfp::stride_of(width, program->element_bytes());
  program->buffers.push_back(buffer);
  return int32_t(program->buffers.size()) - 1;
}

// Has the rows of a buffer, from now on until it is bound again, in memory of the caller's, `stride` elements apart.
// Rows that a 16-bit product reads are of even width.
HFP_API void hfp_program_bind_buffer(Program* program, int32_t index, void* data, int64_t stride) {
  hfp::Buffer& buffer = program->buffers[index];
  if (!buffer.is_bound) std::free(buffer.data);
  buffer.is_bound = true;
  buffer.data = static_cast<char*>(data);
  buffer.stride = stride;
}

// First row of a buffer and the elements from row to row. Null before the first step that used it.
HFP_API void* hfp_program_buffer(Program* program, int32_t index, int64_t* stride) {
  *stride = program->buffers[index].stride;
  return program->buffers[index].data;
}

// Adds the operation that `desc` (one of the *Op structs, of `bytes` bytes) describes; returns its index, or -1 if the
// caller's struct is not ours.
HFP_API int32_t hfp_program_add_op(Program* program, int32_t kind, const void* desc, int64_t bytes) {
  hfp::Op op;
  op.kind = hfp::OpKind(kind);
  if (!hfp::fill(op, desc, bytes)) return -1;
  program->ops.push_back(op);
  if (op.kind == hfp::OpKind::kAttention) program->add_plan_for(op.attention);
  if (op.kind == hfp::OpKind::kRoute)
    program->chosen_experts = std::max<int64_t>(program->chosen_experts, op.route.chosen);
  return int32_t(program->ops.size()) - 1;
}

// Replaces operation `index` by another of the same kind. Returns 0, or -1 if the caller's struct is not ours.
HFP_API int32_t hfp_program_replace_op(Program* program, int32_t index, int32_t kind, const void* desc,
                                       int64_t bytes) {
  hfp::Op op;
  op.kind = hfp::OpKind(kind);
  if (op.kind != program->ops[index].kind || !hfp::fill(op, desc, bytes)) return -1;
  program->ops[index] = op;
  return 0;
}

// Sets rotary table `index`, adding it if it is the next one. The arrays stay the caller's.
HFP_API void hfp_program_set_table(Program* program, int32_t index, const float* cosine, const float* sine,
                                   int64_t positions) {
  if (size_t(index) >= program->tables.size()) program->tables.resize(index + 1);
  program->tables[index] = {cosine, sine, positions};
}

// Runs operations [first_op, end_op). Returns an HfpProgramStatus; on anything but OK nothing was computed.
HFP_API int32_t hfp_program_run(Program* program, hfp::Step* step) {
  HfpProgramStatus status = program->check(*step);
  if (status != HFP_PROGRAM_OK) return status;
  try {
    if (!program->reserve(*step)) return HFP_PROGRAM_OUT_OF_MEMORY;
    if (program->plan_attention(*step) != HFP_OK) return HFP_PROGRAM_BAD_BATCH;
  } catch (const std::bad_alloc&) {
    return HFP_PROGRAM_OUT_OF_MEMORY;
  }
  program->run(*step);
  return HFP_PROGRAM_OK;
}
