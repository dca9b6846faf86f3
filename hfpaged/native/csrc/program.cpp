// Building and running step programs: the C ABI, the activations and the parallel region.
#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <new>
#include <vector>
#if defined(_OPENMP)
#include <omp.h>
#endif

#include "isa.h"
#include "row_parts.h"

HFP_DECLARE_VARIANTS(void run_share(const Run& run, Share share))

namespace hfp {
namespace {

constexpr int64_t kCacheLine = 64;

// What the indices of a step must stay below.
struct StepLimits {
  int64_t positions, vocab;
};

struct Program {
  Code code;
  std::vector<Buffer> buffers;
  RunMemory memory;  // of steps that are run as they are
  RowParts parts;    // of the others

  ~Program() {
    for (Buffer& buffer : buffers)
      if (!buffer.is_bound) std::free(buffer.data);
  }

  int64_t rows_of(const Step& step, RowSet set) const;
  bool reserve(const Step& step);
  StepLimits limits(const Step& step) const;
  HfpProgramStatus check(const Step& step) const;
  HfpProgramStatus run(Step& step);
  HfpProgramStatus run_whole(Step& step);
  HfpProgramStatus run_parts(Step& step, int count);
};

int64_t stride_of(int64_t width, int64_t element_bytes) {
  int64_t bytes = (width * element_bytes + kCacheLine - 1) / kCacheLine * kCacheLine;
  // Rows a multiple of 1 KiB apart would fall into few sets of the first-level cache.
  if (bytes % 1024 == 0) bytes += kCacheLine;
  return bytes / element_bytes;
}

int64_t Program::rows_of(const Step& step, RowSet set) const {
  switch (set) {
    case RowSet::kTokens: return step.tokens;
    case RowSet::kSamples: return step.samples;
    case RowSet::kExpertPairs: return std::max(step.tokens, step.samples) * code.chosen_experts;
  }
  return 0;
}

bool Program::reserve(const Step& step) {
  for (Buffer& buffer : buffers) {
    int64_t rows = rows_of(step, buffer.rows);
    if (buffer.is_bound || rows <= buffer.capacity) continue;
    int64_t capacity = std::max(rows, buffer.capacity * 3 / 2);
    int64_t bytes = capacity * buffer.stride * code.element_bytes();
    char* data = static_cast<char*>(std::aligned_alloc(kCacheLine, bytes));
    if (!data) return false;
    std::memset(data, 0, bytes);
    std::free(buffer.data);
    buffer.data = data;
    buffer.capacity = capacity;
  }
  return true;
}

// Positions that all rotary tables of the step's operations have, and entries of its embedding table; no limit without.
StepLimits Program::limits(const Step& step) const {
  StepLimits limits = {INT64_MAX, INT64_MAX};
  for (int32_t i = step.first_op; i < step.end_op; i++) {
    const Op& op = code.ops[i];
    if (op.kind == OpKind::kEmbed) limits.vocab = op.embed.vocab;
    if (op.kind == OpKind::kRotateAndStore && op.rotate.style != RotaryStyle::kNone)
      limits.positions = std::min(limits.positions, code.tables[op.rotate.table].positions);
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
  if (step.first_op < 0 || step.end_op > int32_t(code.ops.size())) return HFP_PROGRAM_BAD_STEP;
  StepLimits limit = limits(step);
  int64_t slots = int64_t(step.num_blocks) * step.batch.block_size;
  if (!are_below(step.token_ids, step.tokens, limit.vocab)) return HFP_PROGRAM_BAD_TOKEN;
  if (!are_below(step.positions, step.tokens, limit.positions)) return HFP_PROGRAM_BAD_POSITION;
  if (!are_below(step.batch.slots, step.tokens, slots)) return HFP_PROGRAM_BAD_BATCH;
  if (!are_below(step.sample_rows, step.samples, step.tokens)) return HFP_PROGRAM_BAD_SAMPLE_ROW;
  return HFP_PROGRAM_OK;
}

double thread_cpu_seconds() {
  timespec now;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return double(now.tv_sec) + 1e-9 * double(now.tv_nsec);
}

// Runs `work(share)` on up to `threads` threads, of which the runtime may grant fewer. Returns the CPU time of all.
template <class Work>
double run_shares(int threads, Work&& work) {
  double cpu_seconds = 0;
  auto run_timed = [&](Share share) {
    double before = thread_cpu_seconds();
    work(share);
    return thread_cpu_seconds() - before;
  };
#if defined(_OPENMP)
  if (threads > 1) {
#pragma omp parallel num_threads(threads) reduction(+ : cpu_seconds)
    cpu_seconds = run_timed(Share{omp_get_thread_num(), omp_get_num_threads()});
    return cpu_seconds;
  }
#endif
  // Without a region: a team of one between two larger ones would be made anew, and they too.
  return run_timed(Share{0, 1});
}

bool has_head(const Code& code, const Step& step) {
  return step.end_op > 0 && code.ops[step.end_op - 1].kind == OpKind::kHead;
}

HfpProgramStatus Program::run(Step& step) {
  if (!reserve(step)) return HFP_PROGRAM_OUT_OF_MEMORY;
  int count = RowParts::count_for(code, step);
  return count > 1 ? run_parts(step, count) : run_whole(step);
}

// Every operation on all threads, which meet after each.
HfpProgramStatus Program::run_whole(Step& step) {
  HfpProgramStatus status = memory.prepare(code, buffers.data(), step);
  if (status != HFP_PROGRAM_OK) return status;
  auto run_share = HFP_PICK_VARIANT(run_share);
  Barrier barrier = {};
  Run run = memory.run(code, buffers.data(), step, &barrier);
  int threads = 1;
  step.cpu_seconds = run_shares(step.threads, [&](Share share) {
    if (share.index == 0) threads = share.count;
    run_share(run, share);
  });
  if (has_head(code, step)) memory.write_argmax(step, threads);
  return HFP_PROGRAM_OK;
}

// Every part on a thread of its own, if the runtime grants as many.
HfpProgramStatus Program::run_parts(Step& step, int count) {
  HfpProgramStatus status = parts.cut(code, buffers, step, count);
  if (status != HFP_PROGRAM_OK) return status;
  auto run_share = HFP_PICK_VARIANT(run_share);
  step.cpu_seconds = run_shares(step.threads, [&](Share share) {
    // In ascending order on each thread, so that the parts that another waits for are never behind it.
    for (int index = share.index; index < count; index += share.count) run_share(parts.run(code, index), Share{0, 1});
  });
  for (int index = 0; has_head(code, step) && index < count; index++)
    parts[index].memory.write_argmax(parts[index].step, 1);
  return HFP_PROGRAM_OK;
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
  if (program) program->code.type = HfpDtype(dtype);
  return program;
}

HFP_API void hfp_program_destroy(Program* program) { delete program; }

// Adds a buffer of `width` elements a row; returns its index.
HFP_API int32_t hfp_program_add_buffer(Program* program, int32_t width, int32_t row_set) {
  hfp::Buffer buffer = {};
  buffer.width = width;
  buffer.rows = hfp::RowSet(row_set);
  buffer.stride = hfp::stride_of(width, program->code.element_bytes());
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
  hfp::Code& code = program->code;
  code.ops.push_back(op);
  if (op.kind == hfp::OpKind::kRoute) code.chosen_experts = std::max<int64_t>(code.chosen_experts, op.route.chosen);
  return int32_t(code.ops.size()) - 1;
}

// Replaces operation `index` by another of the same kind. Returns 0, or -1 if the caller's struct is not ours.
HFP_API int32_t hfp_program_replace_op(Program* program, int32_t index, int32_t kind, const void* desc,
                                       int64_t bytes) {
  hfp::Op op;
  op.kind = hfp::OpKind(kind);
  if (op.kind != program->code.ops[index].kind || !hfp::fill(op, desc, bytes)) return -1;
  program->code.ops[index] = op;
  return 0;
}

// Sets rotary table `index`, adding it if it is the next one. The arrays stay the caller's.
HFP_API void hfp_program_set_table(Program* program, int32_t index, const float* cosine, const float* sine,
                                   int64_t positions) {
  std::vector<hfp::RotaryTable>& tables = program->code.tables;
  if (size_t(index) >= tables.size()) tables.resize(index + 1);
  tables[index] = {cosine, sine, positions};
}

// Runs operations [first_op, end_op). Returns an HfpProgramStatus; on anything but OK nothing was computed.
HFP_API int32_t hfp_program_run(Program* program, hfp::Step* step) {
  HfpProgramStatus status = program->check(*step);
  if (status != HFP_PROGRAM_OK) return status;
  try {
    return program->run(*step);
  } catch (const std::bad_alloc&) {
    return HFP_PROGRAM_OUT_OF_MEMORY;
  }
}
