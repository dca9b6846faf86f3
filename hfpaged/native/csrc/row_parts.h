// A step of many rows, cut into parts of neighbouring rows. Each thread runs all operations for the rows of its part: what
// one operation writes is in the cache of the core that the next one runs on, and threads wait for each other only where
// a request has rows in several parts. For baseline sources only.
#pragma once
#include <vector>

#include "run_memory.h"

namespace hfp {

// Rows of a step as a step of their own, for one thread.
class RowPart {
 public:
  // Becomes the tokens [first, end) of a step, to which most arrays and all buffers still belong.
  void take(const Code& code, const std::vector<Buffer>& of_whole, const Step& whole, int64_t first, int64_t end);

  int64_t end_token() const { return first_token + step.tokens; }

  Step step;
  std::vector<Buffer> buffers;
  RunMemory memory;
  int64_t first_token;          // of the whole step
  int64_t first_request_token;  // the first one there of the request that first_token is of
  int earlier;                  // how many parts right before this one have tokens of that request

 private:
  void take_requests(const HfpBatch& batch, int64_t end);
  void take_samples(const Code& code, const Step& whole, int64_t end);

  int64_t first_sample_;
  std::vector<int32_t> query_start_, context_len_;
  std::vector<int64_t> sample_rows_;
};

class RowParts {
 public:
  // How many parts a step should be cut into; 1: as it is.
  static int count_for(const Code& code, const Step& step);

  // Cuts a step into that many parts of about equal cost, and prepares each. On anything but OK they can't be run.
  // Throws std::bad_alloc.
  HfpProgramStatus cut(const Code& code, const std::vector<Buffer>& buffers, const Step& step, int count);

  RowPart& operator[](int index) { return parts_[index]; }

  // Rows of part `index` for the thread that runs it. The parts before it have to be running, or done.
  Run run(const Code& code, int index);

 private:
  void find_costs(const Code& code, const std::vector<Buffer>& buffers, const Step& step);
  int64_t cut_near(double cost, const Step& step) const;

  std::vector<RowPart> parts_;
  std::vector<Progress> progress_;
  std::vector<double> costs_;  // of all tokens before each one; at the end, of all
};

}  // namespace hfp
