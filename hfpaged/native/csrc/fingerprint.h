// Content hash of a memory range, the same on every machine and for any number of threads.
#pragma once
#include <stddef.h>
#include <stdint.h>

#include "abi.h"

namespace hfp {

// Bytes hashed independently of each other, by whichever thread.
constexpr size_t kFingerprintSegment = size_t(256) << 10;

}  // namespace hfp

// 64-bit hash of the `bytes` bytes at `data` (may be null if `bytes` is 0). Not cryptographic.
HFP_API uint64_t hfp_fingerprint(const void* data, size_t bytes, int num_threads);
