// Runs kernels on fixed problems and prints one line with a hash of the results of each, to compare machines.
#include <cstdio>
#include <cstring>
#include <vector>

#include "attention.h"
#include "fingerprint.h"
#include "program.h"

HFP_API int hfp_use_isa(int isa);
HFP_API void hfp_panels_pack(const void* weight, int32_t dtype, int64_t rows, int64_t k, int64_t row_bytes,
                             const int32_t* columns, void* panels, int32_t threads);
extern "C" {
void* hfp_program_create(int32_t dtype);
void hfp_program_destroy(void* program);
int32_t hfp_program_add_buffer(void* program, int32_t width, int32_t row_set);
void hfp_program_bind_buffer(void* program, int32_t index, void* data, int64_t stride);
int32_t hfp_program_add_op(void* program, int32_t kind, const void* desc, int64_t bytes);
int32_t hfp_program_run(void* program, hfp::Step* step);
}

namespace {

constexpr int kThreads = 2;

int width_of(HfpDtype dtype) { return dtype == HFP_FP32 ? 4 : 2; }

// `count` numbers from -1 to 1 that any machine writes alike: 8 significant bits.
std::vector<char> numbers(HfpDtype dtype, size_t count, uint32_t seed) {
  std::vector<char> bytes(count * width_of(dtype));
  for (size_t i = 0; i < count; i++) {
    seed = seed * 1664525u + 1013904223u;
    float value = float(int32_t(seed >> 24) - 128) / 128.f;
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    uint16_t half = uint16_t(bits >> 16);
    if (dtype == HFP_FP16) {
      int exponent = int((bits >> 23) & 0xff) - 112;
      half = value == 0.f ? 0 : uint16_t((bits >> 16 & 0x8000) | exponent << 10 | (bits >> 13 & 0x3ff));
    }
    std::memcpy(&bytes[i * width_of(dtype)], dtype == HFP_FP32 ? static_cast<void*>(&bits) : &half, width_of(dtype));
  }
  return bytes;
}

void print(const char* what, HfpDtype dtype, int status, const std::vector<char>& result) {
  unsigned long long hash = hfp_fingerprint(result.data(), result.size(), kThreads);
  std::printf("%s dtype %d status %d %016llx\n", what, int(dtype), status, hash);
}

// Two requests, a prompt of 40 tokens and the 90th token of another, with grouped heads, over blocks in no order.
void attention(HfpDtype dtype, int window, float softcap) {
  constexpr int kHeads = 6, kKvHeads = 2, kDim = 32, kBlock = 16, kBlocks = 12, kPrompt = 40, kContext = 90;
  int32_t table[2][6] = {{7, 2, 11, 0, 0, 0}, {5, 1, 9, 3, 10, 4}};
  int32_t table_rows[] = {0, 1}, context_len[] = {kPrompt, kContext};
  HfpBatch batch = {nullptr, context_len, table_rows, table[0], nullptr, 6, 2, 2, kBlock};
  std::vector<char> memory(size_t(kBlocks) * kBlock * kKvHeads * 2 * kDim * width_of(dtype));
  HfpCache cache = {memory.data(), memory.data() + size_t(kBlock) * kDim * width_of(dtype), dtype, kBlocks, kKvHeads,
                    kDim,          kDim};
  auto slot = [&](int row, int position) { return int64_t(table[row][position / kBlock]) * kBlock + position % kBlock; };
  std::vector<int64_t> slots;
  for (int i = 0; i < kPrompt; i++) slots.push_back(slot(0, i));
  for (int i = 0; i < kContext; i++) slots.push_back(slot(1, i));
  int32_t all[] = {0, kPrompt, kPrompt + kContext};
  batch.query_start = all;
  batch.slots = slots.data();
  auto key = numbers(dtype, slots.size() * kKvHeads * kDim, 1), value = numbers(dtype, slots.size() * kKvHeads * kDim, 2);
  HfpWriteKvArgs write = {&batch,          &cache, key.data(),      value.data(), kKvHeads * kDim, kDim,
                          kKvHeads * kDim, kDim,   kThreads};
  int status = hfp_write_kv(&write);
  int32_t newest[] = {0, kPrompt, kPrompt + 1};
  batch.query_start = newest;
  auto query = numbers(dtype, size_t(kPrompt + 1) * kHeads * kDim, 3);
  std::vector<char> output(query.size());
  HfpAttentionArgs args = {&batch,         &cache, query.data(), output.data(), nullptr, kHeads * kDim, kDim,
                           kHeads * kDim,  kDim,   kHeads,       window,        0.2f,    softcap,       kThreads};
  if (status == HFP_OK) status = hfp_attention(&args);
  print("attention", dtype, status, output);
}

// Runs one operation from buffer 0, of `input`, to buffer 1, of the result.
template <class Op>
void run_op(const char* what, HfpDtype dtype, hfp::OpKind kind, const Op& op, int rows, int width, int out_width,
            std::vector<char> input) {
  std::vector<char> output(size_t(rows) * out_width * width_of(dtype));
  void* program = hfp_program_create(dtype);
  for (int buffer : {0, 1}) {
    hfp_program_add_buffer(program, 1, int(hfp::RowSet::kTokens));
    hfp_program_bind_buffer(program, buffer, buffer ? output.data() : input.data(), buffer ? out_width : width);
  }
  hfp_program_add_op(program, int(kind), &op, sizeof(op));
  hfp::Step step = {};
  step.tokens = rows;
  step.end_op = 1;
  step.threads = kThreads;
  int status = hfp_program_run(program, &step);
  hfp_program_destroy(program);
  print(what, dtype, status, output);
}

// A linear module of 150 outputs on so many rows, which several kernels share.
void linear(HfpDtype dtype, int rows) {
  constexpr int kIn = 96, kOut = 150, kPanels = 3;
  auto weight = numbers(dtype, size_t(kIn) * kOut, 4), input = numbers(dtype, size_t(kIn) * rows, 5);
  std::vector<int32_t> columns(kOut);
  for (int i = 0; i < kOut; i++) columns[i] = i;
  int depth = dtype == HFP_FP32 ? kIn : kIn / 2;
  alignas(64) static char panels[kPanels * kIn * hfp::kStepBytes];
  std::memset(panels, 0, sizeof(panels));
  hfp_panels_pack(weight.data(), dtype, kOut, kIn, int64_t(kIn) * width_of(dtype), columns.data(), panels, kThreads);
  hfp::ProductOp op = {{panels, nullptr, nullptr, kOut, depth}, 0, 1, kOut, hfp::Epilogue::kStore};
  op.multiplier = 1.f;
  op.other = -1;
  run_op("linear", dtype, hfp::OpKind::kProduct, op, rows, kIn, kOut, input);
}

void norm(HfpDtype dtype) {
  constexpr int kWidth = 80, kRows = 5;
  auto input = numbers(dtype, kWidth * kRows, 6), gamma = numbers(HFP_FP32, kWidth, 7);
  hfp::NormWeights weights = {reinterpret_cast<const float*>(gamma.data()), nullptr, hfp::NormKind(0), 1e-5f};
  hfp::NormOp op = {weights, 0, 1, 0, 0, 1, kWidth, -1, 1.f};
  run_op("norm", dtype, hfp::OpKind::kNorm, op, kRows, kWidth, kWidth, input);
}

}  // namespace

int main() {
  hfp_use_isa(0);
  for (HfpDtype dtype : {HFP_FP32, HFP_BF16, HFP_FP16}) {
    attention(dtype, 0, 0.f);
    attention(dtype, 24, 3.f);
    for (int rows : {1, 6, 12, 33}) linear(dtype, rows);
    norm(dtype);
  }
}
