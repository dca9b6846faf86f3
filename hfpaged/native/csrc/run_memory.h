// What running operations needs beside the operations and the activations: attention plans, routing, partial results of
// the head. A step has one, and each part of a step that is cut (row_parts.h). For baseline sources only.
#pragma once
#include <memory>
#include <vector>

#include "attention_plan.h"
#include "program.h"
#include "screen_memory.h"

namespace hfp {

// The operations of a program and what they say about all steps.
struct Code {
  HfpDtype type;
  std::vector<Op> ops;
  std::vector<RotaryTable> tables;
  int64_t chosen_experts = 0;  // of a token, at most

  int64_t element_bytes() const { return type == HFP_FP32 ? 4 : 2; }
};

class RunMemory {
 public:
  // Makes room for a step over `buffers`, and cuts its attention into items. On anything but OK it can't be run. Of a part
  // of a step, `first_token` says where in there it begins. Throws std::bad_alloc.
  HfpProgramStatus prepare(const Code& code, const Buffer* buffers, const Step& step, int64_t first_token = 0);

  // The step that was prepared, for threads that meet at `barrier`, or for one thread and null. Code, buffers and step
  // have to be the same still.
  Run run(const Code& code, const Buffer* buffers, const Step& step, Barrier* barrier);

  // Writes the step's argmax: the largest logit that any of its `threads` threads has found, the first of equal ones.
  void write_argmax(const Step& step, int threads) const;

 private:
  // Tokens of a step. Parts of steps with the same number, run for other operations, may be others.
  struct Rows {
    int64_t batch_number, first_token, tokens;

    bool operator==(const Rows& other) const {
      return batch_number == other.batch_number && first_token == other.first_token && tokens == other.tokens;
    }
  };

  // A plan and what it depends on.
  struct SharedPlan {
    AttentionShape shape;
    int32_t window;
    std::unique_ptr<AttentionPlan> plan;
    Rows rows = {};         // that it was last built for
    bool is_built = false;  // for the present step

    bool serves(const AttentionOp& op) const;
  };

  SharedPlan& plan_for(const AttentionOp& op);
  void reserve_routing(int64_t pairs);
  void reserve_screen(const Code& code, const Step& step);
  HfpProgramStatus plan_attention(const Code& code, const Buffer* buffers, const Step& step, int64_t first_token);

  std::vector<AttentionWork> attention_;
  std::vector<UnitRange> units_;
  std::vector<SharedPlan> plans_;
  std::vector<int32_t> routing_indices_;
  std::vector<float> routing_weights_;
  Routing routing_ = {};
  std::vector<float> best_logit_;
  std::vector<int64_t> best_index_;
  ScreenMemory screen_;
};

}  // namespace hfp
