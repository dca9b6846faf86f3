// Element types of the kernels, the same for every instruction set.
#pragma once
#include <cstdint>

namespace hfp {

// The upper half of an IEEE fp32 number.
struct bf16 {
  uint16_t bits;
};

// IEEE half precision.
struct fp16 {
  uint16_t bits;
};

}  // namespace hfp
