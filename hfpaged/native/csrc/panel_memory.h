// Memory in which a thread puts a panel of a packed weight together.
#pragma once
#include <cstdint>

namespace hfp {

// At least `words` words, 64-byte aligned, with anything in them. They are the calling thread's until its next call, and
// freed when it ends. Null when there is no memory.
uint32_t* panel_memory(int64_t words);

}  // namespace hfp
