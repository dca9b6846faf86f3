#include "row_parts.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "strips.h"

namespace hfp {
namespace {

// Fewer rows to a thread, and each would wait for the weights, which all of them read.
constexpr int64_t kLeastRows = 32;
// Attention runs at about two thirds of the speed of products; reading a byte takes about as long as so many
// multiply-adds of bf16.
constexpr double kAttentionCost = 1.5, kByteCost = 7;
// Part of the cost by which parts may differ for the sake of a cut between two requests.
constexpr double kTolerance = 0.02;

// The cost of layers with one window, in multiply-adds for each token that is seen.
struct AttentionCost {
  int32_t window;
  double of_rows;     // of a row that shares the reading with others of its request
  double of_reading;  // of a row that is its request's only one
};

// What a row costs, in multiply-adds.
struct RowCost {
  double products = 1;  // of every row
  double sampled = 0;   // of a sampled one beside that
  std::vector<AttentionCost> attention;

  RowCost(const Code& code, const std::vector<Buffer>& buffers, const Step& step) {
    for (int32_t i = step.first_op; i < step.end_op; i++) {
      const Op& op = code.ops[i];
      if (op.kind == OpKind::kAttention) add(op.attention, code.element_bytes());
      if (op.kind == OpKind::kHead) sampled += multiply_adds(op.head.weight, code.element_bytes());
      if (op.kind != OpKind::kProduct) continue;
      bool is_sampled = buffers[op.product.in].rows == RowSet::kSamples;
      (is_sampled ? sampled : products) += multiply_adds(op.product.weight, code.element_bytes());
    }
  }

  static double multiply_adds(const PackedWeight& weight, int64_t element_bytes) {
    const StripWeight* strips = weight.strips;
    int64_t depth = strips ? int64_t(strips->groups) * strips->group_words * kWordCodes
                           : weight.depth * (4 / element_bytes);
    return double(weight.columns) * double(depth);
  }

  void add(const AttentionOp& op, int64_t element_bytes) {
    size_t i = 0;
    while (i < attention.size() && attention[i].window != op.window) i++;
    if (i == attention.size()) attention.push_back({op.window, 0, 0});
    double dims = op.shape.key_dim + op.shape.value_dim;
    double rows = kAttentionCost * dims * op.shape.heads;
    attention[i].of_rows += rows;
    attention[i].of_reading += std::max(rows, kByteCost * dims * op.shape.kv_heads * double(element_bytes));
  }

  // Of a row that sees `context` tokens, apart from what only sampled ones cost.
  double of(int64_t context, bool is_only_row) const {
    double cost = products;
    for (const AttentionCost& one : attention) {
      int64_t seen = one.window ? std::min<int64_t>(context, one.window) : context;
      cost += double(seen) * (is_only_row ? one.of_reading : one.of_rows);
    }
    return cost;
  }
};

bool has_requests(const Step& step) { return step.batch.query_start && step.batch.context_len; }

bool has_whole_requests(const HfpBatch& batch, int64_t tokens) {
  const int32_t* start = batch.query_start;
  for (int32_t r = 0; r < batch.num_requests; r++)
    if (start[r + 1] < start[r] || batch.context_len[r] < start[r + 1] - start[r]) return false;
  return start[0] == 0 && start[batch.num_requests] == tokens;
}

}  // namespace

// ---- one part ----

void RowPart::take(const Code& code, const std::vector<Buffer>& of_whole, const Step& whole, int64_t first,
                   int64_t end) {
  first_token = first_request_token = first;
  step = whole;
  step.tokens = end - first;
  step.threads = 1;
  if (whole.token_ids) step.token_ids = whole.token_ids + first;
  if (whole.positions) step.positions = whole.positions + first;
  if (has_requests(whole)) take_requests(whole.batch, end);
  take_samples(code, whole, end);
  if (first > 0) step.op_seconds = nullptr;
  buffers = of_whole;
  for (Buffer& buffer : buffers) {
    int64_t row = buffer.rows == RowSet::kSamples ? first_sample_ : first;
    if (buffer.data) buffer.data += row * buffer.stride * code.element_bytes();
  }
}

// The requests with tokens from first_token to `end`, with those tokens.
void RowPart::take_requests(const HfpBatch& batch, int64_t end) {
  const int32_t *start = batch.query_start, *starts_end = start + batch.num_requests;
  int32_t first_request = int32_t(std::upper_bound(start, starts_end, int32_t(first_token)) - start) - 1;
  int32_t request = first_request;
  query_start_.assign(1, 0);
  context_len_.clear();
  for (; request < batch.num_requests && start[request] < end; request++) {
    int64_t last = std::min<int64_t>(end, start[request + 1]);
    query_start_.push_back(int32_t(last - first_token));
    context_len_.push_back(int32_t(batch.context_len[request] - (start[request + 1] - last)));
  }
  first_request_token = start[first_request];
  step.batch.query_start = query_start_.data();
  step.batch.context_len = context_len_.data();
  step.batch.table_rows = batch.table_rows + first_request;
  step.batch.num_requests = request - first_request;
  if (batch.slots) step.batch.slots = batch.slots + first_token;
}

void RowPart::take_samples(const Code& code, const Step& whole, int64_t end) {
  const int64_t *rows = whole.sample_rows, *rows_end = rows + whole.samples;
  const int64_t *begin = std::lower_bound(rows, rows_end, first_token), *stop = std::lower_bound(begin, rows_end, end);
  first_sample_ = begin - rows;
  sample_rows_.assign(begin, stop);
  for (int64_t& row : sample_rows_) row -= first_token;
  step.samples = stop - begin;
  step.sample_rows = sample_rows_.data();
  const Op& last = code.ops[whole.end_op - 1];
  if (last.kind != OpKind::kHead) return;
  step.argmax = whole.argmax + first_sample_;
  if (whole.logits) step.logits = whole.logits + first_sample_ * last.head.vocab;
}

// ---- all parts ----

// Experts of few tokens wait for their weights, most of which each part would read again.
int RowParts::count_for(const Code& code, const Step& step) {
  if (!step.by_rows || step.threads < 2 || step.tokens < kLeastRows * step.threads) return 1;
  if (step.first_op >= step.end_op) return 1;
  for (int32_t i = step.first_op; i < step.end_op; i++)
    if (code.ops[i].kind == OpKind::kExperts) return 1;
  if (has_requests(step) && !has_whole_requests(step.batch, step.tokens)) return 1;
  if (!std::is_sorted(step.sample_rows, step.sample_rows + step.samples)) return 1;
  return step.threads;
}

HfpProgramStatus RowParts::cut(const Code& code, const std::vector<Buffer>& buffers, const Step& step, int count) {
  find_costs(code, buffers, step);
  if (parts_.size() < size_t(count)) parts_.resize(count);
  progress_.assign(count, {});
  int64_t first = 0;
  for (int i = 0; i < count; i++) {
    int64_t rest = count - 1 - i, cut = rest ? cut_near(costs_.back() * (i + 1) / count, step) : step.tokens;
    int64_t end = std::min(std::max(cut, first + 1), step.tokens - rest);
    RowPart& part = parts_[i];
    part.take(code, buffers, step, first, end);
    part.earlier = 0;
    while (part.earlier < i && first > part.first_request_token &&
           parts_[i - 1 - part.earlier].end_token() > part.first_request_token)
      part.earlier++;
    HfpProgramStatus status = part.memory.prepare(code, part.buffers.data(), part.step, first);
    if (status != HFP_PROGRAM_OK) return status;
    first = end;
  }
  return HFP_PROGRAM_OK;
}

Run RowParts::run(const Code& code, int index) {
  RowPart& part = parts_[index];
  Run run = part.memory.run(code, part.buffers.data(), part.step, nullptr);
  run.progress = &progress_[index];
  run.earlier_parts = part.earlier;
  return run;
}

void RowParts::find_costs(const Code& code, const std::vector<Buffer>& buffers, const Step& step) {
  RowCost cost(code, buffers, step);
  costs_.assign(step.tokens + 1, 0);
  for (int64_t i = 0; i < step.samples; i++) costs_[step.sample_rows[i] + 1] += cost.sampled;
  if (has_requests(step)) {
    for (int32_t r = 0; r < step.batch.num_requests; r++) {
      int32_t first = step.batch.query_start[r], end = step.batch.query_start[r + 1];
      for (int32_t row = first; row < end; row++)
        costs_[row + 1] += cost.of(step.batch.context_len[r] - (end - row - 1), end - first == 1);
    }
  } else {
    for (int64_t row = 1; row <= step.tokens; row++) costs_[row] += cost.products;
  }
  std::partial_sum(costs_.begin(), costs_.end(), costs_.begin());
}

// The token before which about that much of the cost is; the first one of a request if one is about as good.
int64_t RowParts::cut_near(double cost, const Step& step) const {
  int64_t token = std::lower_bound(costs_.begin(), costs_.end(), cost) - costs_.begin();
  if (!has_requests(step)) return token;
  const int32_t* start = step.batch.query_start;
  const int32_t* next = std::lower_bound(start, start + step.batch.num_requests, int32_t(token));
  auto distance = [&](int64_t cut) { return std::abs(costs_[cut] - cost); };
  int64_t nearest = next > start && distance(next[-1]) < distance(*next) ? next[-1] : *next;
  return distance(nearest) <= kTolerance * costs_.back() ? nearest : token;
}

}  // namespace hfp
